"""A checkpoint's weights rounded in the order in which the model reads them, each for the inputs that it then has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffquant.formats.compressed_tensors import decode_codes
from diffquant.formats.row_stream import workers
from diffquant.model.walk import Walk, batches
from diffquant.quantization.magnitudes import Magnitudes
from diffquant.quantization.roundings.base import Rounder
from diffquant.quantization.roundings.gptq.compensation import Inputs, compensate, damped, retargeting
from diffquant.quantization.roundings.gptq.layer_inputs import Moments, input_of, inputs_on_the_way, readers_by_input
from diffquant.quantization.roundings.mse import round_with_clipping
from diffquant.recipe.rounding import RoundingSettings
from diffquant.scheme import Scheme
from diffquant.source.building import build_model
from diffquant.source.source import Source
from diffquant.support.progress import Progress
from diffquant.text.corpus import load_text, text_digest
from diffquant.text.tokens import max_length, token_windows

TOKENS = 16384
WINDOW = 512
BATCH_TOKENS = 512
# Rows that a worker rounds at once. It goes column by column, and with few rows the calls themselves take the time.
_ROWS = 2048

Made = tuple[Tensor, Tensor]
# (walk, weights of a rounded layer, its inputs, the outputs it is to have): changes codes and scales once more, and
# gives the outputs that the layer then has.
Finish = Callable[[Walk[Any], "LayerWeights", Sequence[Any], Sequence[Any]], Sequence[Any]]


def rounded_layers(
    source: Source,
    schemes: Mapping[str, Scheme],
    settings: RoundingSettings,
    progress: Progress,
    finish: Finish | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Rounder:
    """Run a model over a text in float32, layer by layer, and round each layer's weights before the next one reads.

    It runs on the CPU whatever the model is loaded on later, so that every reader of a recipe gets the same codes.
    Beside the model, memory holds the text's states and the second moments of one layer. A weight outside the layers is
    rounded as by mse.

    Args:
        schemes: scheme of each module whose weight is quantized, by the checkpoint's own names.
        finish: function that is called with each layer once it is rounded, before the next one reads.
        batch_tokens: number of tokens that run at once, one window at least.

    Raises:
        DiffQuantError: the checkpoint or its tokenizer cannot be read, or the text holds no window.
    """
    text, tokenizer, tokens = load_text(settings.text), source.tokenizer, settings.tokens or TOKENS
    model = build_model(source, torch.float32)
    window = min(settings.window or WINDOW, tokens, max_length(model.config, tokenizer))
    ids = token_windows(model, tokenizer, text, window, tokens)
    made: dict[str, Made] = {}
    with torch.no_grad():
        # Two tokens tell in which order a layer's modules run.
        walk, glance = model.walk(window), model.walk(2)
        states: Sequence[Any] = [walk.embed(batch) for batch in batches(ids, batch_tokens)]
        exact = states
        glimpse = glance.embed(ids[:1, :2])
        for number, layer in enumerate(walk.layers):
            readers, glimpse = readers_by_input(glance, layer, glimpse)
            weights = LayerWeights(source, schemes, settings, layer, f"model.layers.{number}", made)
            groups = [names for names in readers if any(map(weights.is_rounded, names))]
            if settings.inputs == "unrounded":
                states = _round_for_unrounded(walk, weights, groups, states)
            else:
                inputs, exact = states, _round_in_turn(walk, weights, groups, states, exact)
                if finish is None:
                    states = [walk.run(layer, state) for state in inputs]
                else:
                    states = finish(walk, weights, inputs, exact)
            progress(number + 1, len(walk.layers), "rounding by layers")
    identity = {"text": text_digest(text), "tokens": ids.numel(), "window": window}
    return Rounder(round_with_clipping, identity | settings.options, made)


class LayerWeights:
    """The weights of one layer, in the checkpoint and in the model that runs."""

    def __init__(
        self,
        source: Source,
        schemes: Mapping[str, Scheme],
        settings: RoundingSettings,
        layer: nn.Module,
        prefix: str,
        made: dict[str, Made],
    ) -> None:
        self._source, self._schemes, self.settings, self.layer = source, schemes, settings, layer
        self._prefix, self._made = prefix, made
        self._magnitudes = Magnitudes(source.checkpoint, schemes)

    def is_rounded(self, module: str) -> bool:
        return self._stored_name(module).removesuffix(".weight") in self._schemes

    def round(self, modules: Sequence[str], moments: Moments) -> None:
        """Round the weights of modules that read one input, and let the model run on."""
        products = damped(moments.products)
        inputs = Inputs.of(products, by_activation=self.settings.order == "activation")
        moved = None if moments.lost is None else retargeting(products, moments.lost)
        with workers() as pool:
            under_way = {
                module: [pool.submit(self._rounded, module, rows, inputs, moved) for rows in self._rows(module)]
                for module in filter(self.is_rounded, modules)
            }
            for module, blocks in under_way.items():
                codes, scales = zip(*(block.result() for block in blocks), strict=True)
                self.take(module, (torch.cat(codes), torch.cat(scales)))

    def _rows(self, module: str) -> Sequence[Tensor]:
        rows: Sequence[Tensor] = self._source.checkpoint.read(self._stored_name(module)).split(_ROWS)
        return rows

    def _rounded(self, module: str, rows: Tensor, inputs: Inputs, moved: Tensor | None) -> Made:
        name = self._stored_name(module)
        values, scheme = rows.float(), self._bound_scheme(name)
        dtype = scheme.format.scale_dtype(self._source.checkpoint.written_dtype(name))
        return compensate(values if moved is None else values + values @ moved, inputs, scheme, dtype)

    def take(self, module: str, made: Made) -> None:
        """Give a module codes and a scale, in the checkpoint and in the model that runs."""
        name = self._stored_name(module)
        self._made[name] = made
        scheme, dtype = self._scheme(name), self._source.checkpoint.written_dtype(name)
        self.layer.get_submodule(module).weight.data = self.in_order(module, decode_codes(*made, scheme).to(dtype))

    def rounded(self) -> Iterator[tuple[str, Tensor, Made, Scheme]]:
        """Modules that are rounded by now: name, 16-bit weight [out, in], codes and scale, and scheme."""
        for module in (name for name, each in self.layer.named_modules() if isinstance(each, nn.Linear)):
            name = self._stored_name(module)
            if self.is_rounded(module) and name in self._made:
                yield module, self._source.checkpoint.read(name).float(), self._made[name], self._bound_scheme(name)

    def in_order(self, module: str, weight: Tensor) -> Tensor:
        """A checkpoint's weight [out, in] in float32, its rows as the model has them."""
        order = self._source.adapter.row_order(self._name(module))
        return weight.float() if order is None else weight.float()[order]

    def _scheme(self, name: str) -> Scheme:
        return self._schemes[name.removesuffix(".weight")]

    def _bound_scheme(self, name: str) -> Scheme:
        """A weight's scheme, bound to it where its format's scales depend on all of it."""
        scheme = self._scheme(name)
        return scheme.bound_to(self._magnitudes.of(name)) if scheme.format.spans_tensor else scheme

    def _stored_name(self, module: str) -> str:
        return self._source.adapter.source_name(self._name(module))

    def _name(self, module: str) -> str:
        return f"{self._prefix}.{module}.weight"


def _round_for_unrounded(
    walk: Walk[Any], weights: LayerWeights, groups: Sequence[Sequence[str]], states: Sequence[Any]
) -> Sequence[Any]:
    """Round a layer for the 16-bit model's inputs, and give that model's output."""
    outputs, moments = [], [Moments() for _ in groups]
    for state in states:
        seen, output = inputs_on_the_way(walk, weights.layer, [names[0] for names in groups], state)
        outputs.append(output)
        for names, of_group in zip(groups, moments, strict=True):
            of_group.add(seen[names[0]])
    for names, of_group in zip(groups, moments, strict=True):
        weights.round(names, of_group)
    return outputs


def _round_in_turn(
    walk: Walk[Any],
    weights: LayerWeights,
    groups: Sequence[Sequence[str]],
    states: Sequence[Any],
    exact: Sequence[Any],
) -> Sequence[Any]:
    """Round a layer for the inputs that its modules have once what runs before them is rounded.

    Returns:
        The 16-bit layer's output for `exact` where it is a target.
    """
    layer, exact_inputs = weights.layer, [dict[str, Tensor]() for _ in states]
    if weights.settings.target != "layer":
        firsts = [names[0] for names in groups]
        runs = [inputs_on_the_way(walk, layer, firsts, state) for state in exact]
        exact_inputs, exact = [dict(seen) for seen, _ in runs], [output for _, output in runs]
    for names in groups:
        moments = Moments()
        for state, of_exact in zip(states, exact_inputs, strict=True):
            moments.add(input_of(walk, layer, names[0], state), of_exact.get(names[0]))
        weights.round(names, moments)
    return exact
