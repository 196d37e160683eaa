"""The torch reference of an exported model: DiffTransformer with the export's codes and scales, run stage by stage.

A stage is the embedding, a layer, or the head behind the final norm. A stage can be given the runtime's output of the
stage before, so that an error is found in the stage that causes it and does not propagate.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from diffquant.checkpoints.source import Source
from diffquant.family.mask import Mask
from diffquant.measure import can_share_prefixes
from diffquant.model.modeling import DiffLayer
from diffquant.onnx.graph.plan import Scales, exported_cache_channels
from diffquant.onnx.options import ExportOptions
from diffquant.onnx.verification.arithmetic import SUM, ExportedWeights
from diffquant.onnx.verification.caches import WHOLE, CallPattern, GrowingCache, Past, StaticScaleCache, to_model_order
from diffquant.recipe import Recipe

# Most positions packed into one call. Matmuls with few rows are slow, and so is attention over many masked keys.
_PACKED = 256

# A stage's input and output for a whole sequence, and its cached keys and values; reused for equal inputs and prefixes.
_Kept = tuple[Tensor, Tensor, tuple[Tensor, ...]]


class Reference(ExportedWeights):
    """The torch reference of an exported folder, in float32.

    Attributes:
        layers: number of layers.
        cache: quantized cache that rounds keys and values, or None if the cache has the activations' type.
        packs: whether a layer can compute several sequences in one call.
    """

    packs: ClassVar[bool] = True

    def __init__(
        self, source: Source, options: ExportOptions, scales: Mapping[int, Scales], exact_bits: Collection[int] = ()
    ) -> None:
        """Load the checkpoint with the export's weights.

        Args:
            scales: scales of the quantized cache by layer.
            exact_bits: widths of the weight codes that the graph multiplies with float32 activations.
        """
        super().__init__(source, options, exact_bits)
        self._orders = exported_cache_channels(source)
        by_layer = {layer: to_model_order(layer_scales, self._orders) for layer, layer_scales in scales.items()}
        self.cache = StaticScaleCache(by_layer, options.kv_bits) if scales else None
        self.layers = self.model.config.num_hidden_layers
        self._shares_prefixes = can_share_prefixes(Recipe(logits=options.logits))
        self._is_other_cache = False
        self._reading = WHOLE
        self._kept: dict[tuple[int, torch.Size], _Kept] = {}
        self._kept_for: tuple[object, ...] = ()

    @property
    def width(self) -> int:
        """Width d of a query head in the graph's attention nodes."""
        return self._plan.spec.head_dim

    @property
    def stages(self) -> list[str]:
        """Names of the stages in order."""
        return ["the embedding", *(f"layer {layer}" for layer in range(self.layers)), "the head"]

    def simulate_cache(self, cache: "StaticScaleCache | None") -> AbstractContextManager[None]:
        """Inside the context, round keys and values with this cache; if it is None, leave them unrounded."""
        return self._set(cache=cache, _is_other_cache=cache is not self.cache)

    def use_call_pattern(self, reading: CallPattern) -> AbstractContextManager[None]:
        """Inside the context, split sequences into calls, and run them behind a past, as this pattern specifies."""
        return self._set(_reading=reading)

    @torch.no_grad()
    def compute_stage(self, number: int, sequences: Sequence[Tensor], firsts: Sequence[int] = ()) -> list[Tensor]:
        """Compute a stage's outputs for several sequences.

        Results are reused: a stage stores its last whole sequence of each length. An input that is a prefix of a stored
        one is not computed again. If it equals a stored one only before its entry of `firsts`, the positions from that
        entry on are computed.

        Args:
            number: index of the stage in `stages`.
            sequences: outputs [B, T, D] of the stage before, or token ids [B, T].
            firsts: for each sequence, the first position to return; 0 by default.

        Returns:
            For each sequence, outputs [B, T - first, D], or logits [B, T - first, vocabulary] of the head.
        """
        firsts = firsts or [0] * len(sequences)
        if self._noise is not None or self._is_other_cache:
            computed = self._compute(number, sequences, [()] * len(sequences))
            return [output[:, first:] for (output, _), first in zip(computed, firsts, strict=True)]
        context = (self._is_rounding, self._reading)
        if len(self._kept_for) != len(context) or any(a is not b for a, b in zip(context, self._kept_for, strict=True)):
            self._kept, self._kept_for = {}, context
        outputs: dict[int, Tensor] = {}
        # Sequences to compute, by index: number of positions to skip, and the keys and values cached for them.
        missing: dict[int, tuple[int, tuple[Tensor, ...]]] = {}
        for place, (x, first) in enumerate(zip(sequences, firsts, strict=True)):
            kept = self._kept.get((number, x.shape[:2])) or self._beginning_of_another(number, x)
            if kept is not None and torch.equal(kept[0], x):
                outputs[place] = kept[1][:, first:]
            elif first and self._reading is WHOLE and not 0 < number <= self.layers:
                missing[place] = first, ()
            elif (
                first and self._reading is WHOLE and kept is not None and torch.equal(kept[0][:, :first], x[:, :first])
            ):
                missing[place] = first, tuple(rows[:, :, :first] for rows in kept[2])
            else:
                missing[place] = 0, ()
        inputs = [sequences[place][:, left_out:] for place, (left_out, _) in missing.items()]
        results = self._compute(number, inputs, [cached for _, cached in missing.values()])
        for (place, (left_out, _)), (output, cached) in zip(missing.items(), results, strict=True):
            x, first = sequences[place], firsts[place]
            if not first:
                # With a long past, the cached rows would take a whole context's memory in every layer.
                self._kept[number, x.shape[:2]] = x, output, cached if self._reading is WHOLE else ()
            outputs[place] = output[:, first - left_out :]
        return [outputs[place] for place in range(len(sequences))]

    def _beginning_of_another(self, number: int, x: Tensor) -> _Kept | None:
        """Return a stage's kept output cut to x if x is a prefix of a kept input, or None if it is not."""
        if not self._shares_prefixes or self._reading is not WHOLE:
            return None
        length = x.shape[1]
        for (of, shape), kept in self._kept.items():
            if of == number and shape[0] == len(x) and shape[1] > length and torch.equal(kept[0][:, :length], x):
                rows = tuple(part[:, :, :length] for part in kept[2])
                self._kept[number, x.shape[:2]] = beginning = x, kept[1][:, :length], rows
                return beginning
        return None

    def _compute(
        self, number: int, sequences: Sequence[Tensor], cached: Sequence[tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        """Compute a stage behind cached keys and values; return each output and the cache after it."""
        results: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        for some in self._groups(sequences):
            group, rows = sequences[some], cached[some]
            if not 0 < number <= self.layers:
                x = torch.cat(list(group), 1)
                output = self._embed(x) if number == 0 else self.model.lm_head(self._final_norm(x))
                results += [(part, ()) for part in output.split([each.shape[1] for each in group], 1)]
            elif len(group) == 1:
                results.append(self._layer_output(number - 1, group[0], rows[0]))
            else:
                results += self._compute_packed(number, group, rows)
        return results

    def _groups(self, sequences: Sequence[Tensor]) -> Iterator[slice]:
        """Yield ranges of sequences that are computed in one call."""
        packs = self.packs and self._shares_prefixes and self._reading is WHOLE and all(len(x) == 1 for x in sequences)
        begin = positions = 0
        for place, x in enumerate(sequences):
            positions += x.shape[1]
            if place > begin and (not packs or positions > _PACKED):
                yield slice(begin, place)
                begin, positions = place, x.shape[1]
        if len(sequences) > begin:
            yield slice(begin, len(sequences))

    def _compute_packed(
        self, number: int, sequences: Sequence[Tensor], cached: Sequence[tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        """Compute a layer for several sequences [1, T, D] in one call, masked so that none attends to another."""
        lengths, pasts = [x.shape[1] for x in sequences], [rows[0].shape[2] if rows else 0 for rows in cached]
        tables = [self._rotary(x, past) for x, past in zip(sequences, pasts, strict=True)]
        cos, sin = (torch.cat(parts, 1) for parts in zip(*tables, strict=True))
        visible = [torch.ones(new, past + new).tril(past) for new, past in zip(lengths, pasts, strict=True)]
        cache = GrowingCache(self.cache, None, cached, lengths)
        mask = Mask(explicit=torch.block_diag(*visible).bool()[None, None])
        layer = cast(DiffLayer, self.model.model.layers[number - 1])
        output = layer(torch.cat(list(sequences), 1), (cos, sin), mask, cache)
        return list(zip(output.split(lengths, 1), cache.held, strict=True))

    def _embed(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.model.model.embed_tokens(ids))

    def _final_norm(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.model.model.norm(x))

    def _layer_output(self, number: int, x: Tensor, cached: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run a layer on hidden states [B, T, D] behind cached keys and values; return its output and the new cache."""
        calls, past = self._reading.calls, self._reading.past
        cache = GrowingCache(self.cache, past, [cached])
        first, parts = past.length if past else cached[0].shape[2] if cached else 0, []
        for chunk in x.split(list(calls) or x.shape[1], 1):
            parts.append(self._output_of_call(number, chunk, first, cache))
            first += chunk.shape[1]
        return torch.cat(parts, 1), cache.held[0]

    def _output_of_call(self, number: int, x: Tensor, first: int, cache: GrowingCache) -> Tensor:
        """Run a layer on a call's hidden states [B, T, D], whose first position is `first`."""
        layer = cast(DiffLayer, self.model.model.layers[number])
        output: Tensor = layer(x, self._rotary(x, first), Mask(None), cache)
        return output

    def adapt_random_cache(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return random cached keys and values, changed if the model's values depend on its keys.

        Args:
            keys: [1, KV pairs, tokens, entries], as stored.
            values: [1, KV pairs, tokens, entries], as stored.
        """
        return keys, values

    def convert_past(self, keys: np.ndarray, values: np.ndarray, states: Sequence[np.ndarray] = ()) -> Past:
        """Convert an exported model's cached keys and values, and its recurrent states, for a `CallPattern`.

        Args:
            keys: [1, KV pairs, tokens, entries], as stored.
            values: [1, KV pairs, tokens, entries], as stored.
            states: [1, ...] each; empty for a model without recurrent states.
        """
        of_layer = tuple(torch.from_numpy(state.astype(np.float32)) for state in states)
        return Past.from_export(keys, values, self._orders, (of_layer[0], of_layer[1]) if of_layer else None)

    @torch.no_grad()
    def compute_logits(self, passages: Sequence[np.ndarray]) -> list[Tensor]:
        """Compute the logits [1, T, vocabulary] of each passage's token ids [1, T] through all stages."""
        if not self.packs and len(passages) > 1:
            return [self.compute_logits([ids])[0] for ids in passages]
        sequences = list(map(torch.from_numpy, passages))
        for number in range(len(self.stages)):
            sequences = [output for output, _ in self._compute(number, sequences, [()] * len(sequences))]
        return sequences

    def _rotary(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, T, d] for x [1, T, D], whose first position is `first`."""
        rotary = self.model.model.rotary_emb
        cos, sin = rotary(x, position_ids=torch.arange(first, first + x.shape[1])[None])
        if self._noise is None or not first:
            return cos, sin
        # Powers differ between CPUs in the last digit, and with them the angles of far positions.
        angle = torch.arange(first, first + x.shape[1])[:, None] * rotary.inv_freq.repeat(2)
        turn = angle * SUM * self._disturbance.draw_normals(angle.shape[-1])
        return cos - turn * sin, sin + turn * cos
