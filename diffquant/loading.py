"""Loading of a checkpoint, plain or quantized, as a model that runs under a recipe."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.formats.compressed_tensors import scale_dtype
from diffquant.model.causal import CausalModel
from diffquant.quantization.plan import checked_schemes
from diffquant.quantization.rounded_weight import as_stored
from diffquant.quantization.roundings import rounding_named
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme
from diffquant.source.building import Rewrite, as_it_is, build_model
from diffquant.source.ranges import read_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.devices import resolve_device
from diffquant.support.progress import silent


def load(
    path: Path | str | Source,
    recipe: Recipe | None = None,
    dtype: torch.dtype | None = None,
    device: str = "auto",
    packed: bool | None = None,
    scales: Path | str | None = None,
) -> CausalModel:
    """The runnable model of a checkpoint, a recipe applied.

    Args:
        path: a folder of any model_type that an adapter reads, plain or quantized; a .gguf file
            of a llama, or either as an open `Source`.
        recipe: recipe to simulate; a quantized checkpoint's own by default, whose weights it keeps in any case. Weights
            of a plain checkpoint come out as `quantize` stores them, whatever the recipe's rounding; one that reads a
            text does so at each load.
        dtype: dtype of the model; the checkpoint's by default.
        device: device of the model; by default CUDA where torch finds a device of it, else the processor.
        packed: whether the layers' packed weights stay packed, or are expanded to `dtype`; by default they
            stay packed where kernels read them, in half precision on CUDA. Weights whose groups the kernels do
            not know (no multiple of 16) are expanded in any case.
        scales: file of ranges calibrated on this checkpoint, for static schemes.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete, of a kind that is not read, or changed since it was
            opened.
        UsageError: the recipe quantizes weights that already are, does not fit the checkpoint or names an unknown
            rounding, or there is no such device.
    """
    device = resolve_device(device)
    source = open_source(path)
    schemes = _simulated_schemes(source, recipe)
    recipe = source.recipe if recipe is None else recipe.with_weights_of(source.recipe) if source.packed else recipe
    ranges = read_ranges(Path(scales), source) if scales else None
    if ranges is not None:
        ranges.check(recipe)
    rewrite = _rewrite_as_stored(source, schemes, recipe) if schemes else as_it_is
    model = build_model(source, dtype, device, packed, rewrite)
    source.check_unchanged()
    if ranges is not None:
        model.model.ranges = {name: tensor.to(device) for name, tensor in ranges.tensors.items()}
    model.apply_recipe(recipe)
    return model


def _rewrite_as_stored(source: Source, schemes: Mapping[str, Scheme], recipe: Recipe) -> Rewrite:
    """Rewriting of each parameter into what `quantize` stores of it, under the recipe's rounding."""
    rounder = rounding_named(recipe.rounding.name).prepare(source, recipe.rounding, silent)

    def rounded(name: str, data: Tensor) -> Tensor:
        scheme, dtype = schemes.get(name.removesuffix(".weight")), source.checkpoint.written_dtype(name)
        if scheme is None:
            return data.to(dtype)
        return as_stored(rounder, name, data, scheme, scale_dtype(dtype))

    return rounded


def check_loadable(source: Source, recipes: Iterable[Recipe]) -> None:
    """Check that a checkpoint's tokenizer and recipes for it are what `load` takes, without loading.

    Raises:
        DiffQuantError: as `load` raises it, or the tokenizer cannot be read.
    """
    for recipe in recipes:
        _simulated_schemes(source, recipe)
    _ = source.tokenizer


def _simulated_schemes(source: Source, recipe: Recipe | None) -> dict[str, Scheme]:
    """Scheme of each weight that is rounded while it is loaded; none under a checkpoint's own recipe."""
    if recipe is None:
        return {}
    if not source.packed:
        return checked_schemes(source, recipe)
    if recipe.weights.quantizes or recipe.weight_overrides:
        raise UsageError(
            f"{source.path} holds quantized weights already; give a recipe without weights, or its 16-bit original"
        )
    recipe.check_layers(source.architecture.target_layers)
    return {}
