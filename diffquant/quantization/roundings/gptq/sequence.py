"""Rounds a checkpoint's weights in the order in which the model runs, each for its inputs on calibration data."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffquant.checkpoints.building import build_model
from diffquant.checkpoints.calibration import Calibration
from diffquant.checkpoints.compressed_tensors import decode_codes
from diffquant.checkpoints.row_stream import open_workers
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.staging import Staging
from diffquant.model.walk import LayerRunner, split_into_batches
from diffquant.quantization.roundings.base import Magnitudes
from diffquant.quantization.roundings.gptq.compensation import InputStatistics, compensate, compute_retargeting, damp
from diffquant.quantization.roundings.gptq.layer_inputs import (
    ActivationStore,
    SecondMoments,
    StoredActivations,
    capture_input,
    collect_inputs,
    iterate_grouped_layers,
)
from diffquant.recipe.rounding import RoundingSettings
from diffquant.recipe.scheme import Scheme
from diffquant.support.progress import Progress

BATCH_TOKENS = 512
# Rows per worker task. Rounding goes column by column, so with few rows the call overhead dominates.
_ROWS = 2048

Made = tuple[Tensor, Tensor]
States = list[StoredActivations[Any]]
# (weights of a rounded layer, its inputs, its target outputs): refines the codes and scales, and replaces the inputs by
# the layer's new outputs.
Finish = Callable[["LayerWeights", States, States], None]


def round_layers(
    source: Source,
    schemes: Mapping[str, Scheme],
    settings: RoundingSettings,
    calibration: Calibration,
    progress: Progress,
    staging: Staging | None = None,
    finish: Finish | None = None,
) -> dict[str, Made]:
    """Run a model on calibration data in float32, and round each layer's weights before the next layer runs.

    The model always runs on the CPU, so that a recipe gives the same codes on every device. Memory holds the model, the
    second moments of one layer, and the activations between two layers up to half of the free memory; the rest of the
    activations is on disk.

    Args:
        schemes: scheme of each module whose weight is quantized, by name in the checkpoint.
        calibration: calibration data.
        staging: partial folder that keeps each finished layer; a layer that it has kept is only run.
        finish: function called with each rounded layer before the next layer runs. Each of its batches is a window.

    Returns:
        Codes and scales of all rounded weights in the layers.

    Raises:
        DiffQuantError: the checkpoint cannot be read.
    """
    model, ids = build_model(source, torch.float32), calibration.ids
    store, made = ActivationStore(), dict[str, Made]()
    tokens = ids.shape[1] if finish else BATCH_TOKENS
    with torch.no_grad():
        runner = model.new_layer_runner(ids.shape[1])
        states: States = [store.keep(runner.embed(batch)) for batch in split_into_batches(ids, tokens)]
        exact = list(states)
        for number, (layer, readers) in enumerate(iterate_grouped_layers(model, ids)):
            file = f"layer-{number}.safetensors"
            weights = LayerWeights(source, schemes, settings, runner, layer, f"model.layers.{number}", store)
            groups = [names for names in readers if any(map(weights.is_rounded, names))]
            kept = staging.find_kept(file) if staging else None
            if kept is not None:
                _run_kept(weights, kept, states, exact)
            elif settings.inputs == "unrounded":
                _round_for_unrounded(weights, groups, states)
            else:
                _round_in_turn(weights, groups, states, exact)
                if finish is None:
                    weights.run_layer(states)
                else:
                    finish(weights, states, exact)
            if staging and kept is None:
                staging.keep_tensors(file, _flatten(weights.made))
            made |= weights.made
            progress(number + 1, len(runner.layers), "rounding by layers")
    return made


class LayerWeights:
    """Rounds the weights of one decoder layer, sets the dequantized weights in the running model, and runs the layer.

    Args:
        source: checkpoint from which the 16-bit weights are read.
        schemes: as in `round_layers`.
        prefix: name of the layer, such as "model.layers.3".

    Attributes:
        settings: as in `round_layers`.
        runner, layer: the running model, and the layer in it.
        made: codes and scale of each rounded weight, by the checkpoint's name.
        store: store for the layer's outputs.
    """

    def __init__(
        self,
        source: Source,
        schemes: Mapping[str, Scheme],
        settings: RoundingSettings,
        runner: LayerRunner[Any],
        layer: nn.Module,
        prefix: str,
        store: ActivationStore,
    ) -> None:
        self._source, self._schemes, self._prefix = source, schemes, prefix
        self.settings, self.runner, self.layer, self.store = settings, runner, layer, store
        self.made: dict[str, Made] = {}
        self._magnitudes = Magnitudes(source.checkpoint, schemes)

    def is_rounded(self, module: str) -> bool:
        return self._stored_name(module).removesuffix(".weight") in self._schemes

    def round(self, modules: Sequence[str], moments: SecondMoments) -> None:
        """Round the weights of modules that share an input, and set them in the running model.

        Args:
            modules: names of the modules in the layer; those without a scheme are skipped.
            moments: second moments of their input.
        """
        products = damp(moments.products)
        inputs = InputStatistics.factorize(products, by_activation=self.settings.order == "activation")
        moved = None if moments.lost is None else compute_retargeting(products, moments.lost)
        with open_workers() as pool:
            under_way = {
                module: [pool.submit(self._round_rows, module, rows, inputs, moved) for rows in self._rows(module)]
                for module in filter(self.is_rounded, modules)
            }
            for module, blocks in under_way.items():
                codes, scales = zip(*(block.result() for block in blocks), strict=True)
                self.set_rounded(module, (torch.cat(codes), torch.cat(scales)))

    def _rows(self, module: str) -> Sequence[Tensor]:
        rows: Sequence[Tensor] = self._source.checkpoint.read(self._stored_name(module)).split(_ROWS)
        return rows

    def _round_rows(self, module: str, rows: Tensor, inputs: InputStatistics, moved: Tensor | None) -> Made:
        name = self._stored_name(module)
        values, scheme = rows.float(), self._bound_scheme(name)
        dtype = scheme.format.scale_dtype(self._source.checkpoint.output_dtype(name))
        return compensate(values if moved is None else values + values @ moved, inputs, scheme, dtype)

    def set_rounded(self, module: str, made: Made) -> None:
        """Record a module's codes and scale, and set its dequantized weight in the running model."""
        name = self._stored_name(module)
        self.made[name] = made
        scheme, dtype = self._scheme(name), self._source.checkpoint.output_dtype(name)
        self.layer.get_submodule(module).weight.data = self.reorder(module, decode_codes(*made, scheme).to(dtype))

    def rounded_modules(self) -> Iterator[tuple[str, Tensor, Made, Scheme]]:
        """Yield each rounded module's name, 16-bit weight [out, in], codes and scale, and scheme."""
        for module in (name for name, each in self.layer.named_modules() if isinstance(each, nn.Linear)):
            name = self._stored_name(module)
            if self.is_rounded(module) and name in self.made:
                yield module, self._source.checkpoint.read(name).float(), self.made[name], self._bound_scheme(name)

    def set_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Record and set what `_flatten` returned for the layer."""
        names = {name.rpartition(".")[0] for name in kept}
        self.made.update({name: (kept[f"{name}.codes"], kept[f"{name}.scale"]) for name in names})
        for module, _, made, _ in self.rounded_modules():
            self.set_rounded(module, made)

    def run_layer(self, states: States, layer: nn.Module | None = None, first: int = 0) -> None:
        """Replace each batch in `states`, from number `first` on, by the layer's output for it.

        Args:
            layer: layer to run instead, such as a copy with the 16-bit weights.
        """
        ran = self.layer if layer is None else layer
        for number in range(first, len(states)):
            states[number] = self.store.keep(self.runner.run_layer(ran, states[number].get()))

    def reorder(self, module: str, weight: Tensor) -> Tensor:
        """Return a weight [out, in] of the checkpoint in float32, with its rows in the order of the running model."""
        order = self._source.adapter.row_order(self._name(module))
        return weight.float() if order is None else weight.float()[order]

    def _scheme(self, name: str) -> Scheme:
        return self._schemes[name.removesuffix(".weight")]

    def _bound_scheme(self, name: str) -> Scheme:
        """Return a weight's scheme, bound to its largest magnitude if the format has a scale per tensor."""
        scheme = self._scheme(name)
        return (
            scheme.with_tensor_scale(self._magnitudes.largest_magnitude(name)) if scheme.format.spans_tensor else scheme
        )

    def _stored_name(self, module: str) -> str:
        return self._source.adapter.source_name(self._name(module))

    def _name(self, module: str) -> str:
        return f"{self._prefix}.{module}.weight"


def _flatten(made: Mapping[str, Made]) -> dict[str, Tensor]:
    """Return the tensors of a layer by the weight's name and what they are, as a file keeps them."""
    parts = (
        (name, part, tensor)
        for name, each in made.items()
        for part, tensor in zip(("codes", "scale"), each, strict=True)
    )
    return {f"{name}.{part}": tensor.contiguous() for name, part, tensor in parts}


def _run_kept(weights: LayerWeights, kept: Mapping[str, Tensor], states: States, exact: States) -> None:
    """Set a layer's weights from what an earlier run kept of it, and run it as if it had just been rounded."""
    unrounded = weights.settings.inputs == "unrounded"
    if unrounded or weights.settings.target != "layer":
        weights.run_layer(states if unrounded else exact)
    weights.set_kept(kept)
    if not unrounded:
        weights.run_layer(states)


def _round_for_unrounded(weights: LayerWeights, groups: Sequence[Sequence[str]], states: States) -> None:
    """Round a layer for the 16-bit model's inputs, and replace these in `states` by the 16-bit model's outputs."""
    moments = [SecondMoments() for _ in groups]
    for number, state in enumerate(states):
        seen, output = collect_inputs(weights.runner, weights.layer, [names[0] for names in groups], state.get())
        states[number] = weights.store.keep(output)
        for names, of_group in zip(groups, moments, strict=True):
            of_group.add(seen[names[0]])
    for names, of_group in zip(groups, moments, strict=True):
        weights.round(names, of_group)


def _round_in_turn(weights: LayerWeights, groups: Sequence[Sequence[str]], states: States, exact: States) -> None:
    """Round a layer's modules in order, each for the inputs it gets from already rounded modules.

    Unless the setting `target` is "layer", the 16-bit model's hidden states in `exact` are replaced by the layer's
    16-bit outputs. The 16-bit inputs of modules are cached if they fit into memory, and recomputed for the other
    batches.
    """
    runner, layer, store = weights.runner, weights.layer, weights.store
    held: list[StoredActivations[dict[str, Tensor]]] = []
    is_target = weights.settings.target != "layer"
    for number, state in enumerate(exact if is_target else ()):
        seen, output = collect_inputs(runner, layer, [names[0] for names in groups], state.get())
        if (kept := store.keep_in_memory(dict(seen))) is None:
            break
        held.append(kept)
        exact[number] = store.keep(output)
    original = copy.deepcopy(layer) if is_target and len(held) < len(exact) else layer
    for names in groups:
        moments = SecondMoments()
        for number, state in enumerate(states):
            target = None
            if number < len(held):
                target = held[number].get()[names[0]]
            elif is_target:
                target = capture_input(runner, original, names[0], exact[number].get())
            moments.add(capture_input(runner, layer, names[0], state.get()), target)
        weights.round(names, moments)
    if is_target:
        weights.run_layer(exact, original, first=len(held))
