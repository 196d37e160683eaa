"""Loads a checkpoint, quantized or not, as a model that runs under a recipe."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from diffquant.checkpoints.building import Rewrite, build_model, keep_unchanged, make_memory_source
from diffquant.checkpoints.compressed_tensors import read_stored_ranges
from diffquant.checkpoints.places import DeviceMap, OffloadPlan
from diffquant.checkpoints.ranges import read_ranges
from diffquant.checkpoints.source import Source, open_source
from diffquant.errors import UsageError
from diffquant.model.causal import CausalModel
from diffquant.quantization.checks import check_activations, checked_schemes
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.rounded_weight import quantize_as_stored
from diffquant.quantization.roundings import rounding_named
from diffquant.quantization.roundings.base import Magnitudes
from diffquant.quantization.targets import find_packable_modules, unpacked_dtypes
from diffquant.recipe import Recipe, RecipeLike
from diffquant.recipe.scheme import Scheme
from diffquant.support.devices import as_dtype, resolve_device
from diffquant.support.machine import use_torch_defaults
from diffquant.support.progress import report_nothing

# Packages whose result versions determine what a loaded model computes.
MODEL_MODULES = (
    "diffquant.attention",
    "diffquant.checkpoints",
    "diffquant.kernels",
    "diffquant.model",
    "diffquant.quantization",
    "diffquant.recipe.numbers",
)


@use_torch_defaults()
def load(
    path: Path | str | Source,
    recipe: RecipeLike | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "auto",
    packed: bool | None = None,
    scales: Path | str | None = None,
    device_map: DeviceMap | OffloadPlan | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: Path | str | None = None,
) -> CausalModel:
    """Return the runnable model of a checkpoint under a recipe.

        model = diffquant.load("checkpoint", {"weights": "4:g32", "logits": "6:row"}, dtype="bfloat16")
        logits = model(ids).logits  # ids [B, T] -> [B, T, V]

    Its `generate` stops at the tokens in generation_config.json, as transformers does. It decodes greedily unless its
    arguments say otherwise, and ignores the other settings of that file.

    Args:
        path: a folder of any model_type that an adapter reads, quantized or not; a .gguf file of a llama; or an open
            `Source`.
        recipe: recipe to simulate, as `Recipe.parse` takes it; by default a quantized checkpoint's recorded recipe. The
            weights of a quantized checkpoint stay as stored. Those of a 16-bit checkpoint are rounded exactly as
            `quantize` would store them; a rounding that reads calibration data does so at each load.
        dtype: dtype of the model, or its name; "auto" is bfloat16 where it is native, else float32. The checkpoint's by
            default.
        device: device of the model; by default CUDA if torch finds a CUDA device, else the CPU.
        packed: whether packed weights stay packed, or are dequantized to `dtype`. By default they stay packed in half
            precision on CUDA, where kernels can read them. Weights whose group size the kernels do not support (not a
            multiple of 16) are always dequantized.
        scales: file of ranges calibrated on this checkpoint, for static schemes. They replace ranges of the cache that
            the checkpoint may contain.
        device_map: devices for a model that is larger than one device: "auto", or a mapping from module names to
            devices, "cpu" or "disk", as in accelerate and transformers; or an `OffloadPlan`, which also contains the
            next two arguments. Weights are dequantized then.
        max_memory: maximum bytes per device under "auto", such as {0: "20GB", "cpu": "60GB"}; no limit by default.
        offload_folder: folder for weights offloaded to disk, which must exist as long as the model.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete, not supported, or changed since it was opened.
        UsageError: the recipe quantizes weights that are quantized already, does not fit the checkpoint or names an
            unknown rounding; there is no such device; or a device map omits parts of the model or is combined with a
            device.
    """
    if not isinstance(device_map, OffloadPlan):
        device_map = OffloadPlan.of(device, device_map, offload_folder, max_memory)
    if device_map is not None and packed:
        raise UsageError("packed weights cannot be spread over devices; leave out packed, or device_map")
    device = resolve_device(device)
    source = open_source(path)
    recipe = None if recipe is None else Recipe.parse(recipe)
    recipe, schemes = resolve_recipe(source, recipe)
    ranges = read_stored_ranges(source.checkpoint, source.adapter)
    if scales is not None:
        calibrated = read_ranges(Path(scales), source)
        calibrated.check_recipe(recipe)
        ranges |= calibrated.tensors
    rewrite = _rewrite_as_stored(source, schemes, recipe)
    model = build_model(source, as_dtype(dtype, device), device, packed, rewrite, device_map)
    source.check_unchanged()
    model.model.ranges = {name: tensor.to(model.device) for name, tensor in ranges.items()}
    model.model.recipe = recipe
    model.model.quantized_linears = _quantized_linears(source, schemes or source.packed)
    model.apply_recipe(recipe)
    return model


def _quantized_linears(source: Source, packed: Collection[str]) -> dict[str, str]:
    """Return the Linears whose inputs a recipe may round: the model's name -> the checkpoint's."""
    adapter, targets = source.adapter, find_packable_modules(source)
    names = {name.removesuffix(".weight"): adapter.source_name(name) for name in source.architecture.parameters}
    stored = {name: of_weight.removesuffix(".weight") for name, of_weight in names.items()}
    return {name: module for name, module in stored.items() if module in packed and targets.has_rounded_input(module)}


def load_by_layer(source: Source, recipe: Recipe) -> CausalModel:
    """Return a float32 model without head that loads one layer's parameters at a time, to be run layer by layer.

    Raises:
        UsageError: the recipe does not fit the checkpoint.
        CheckpointError: the checkpoint changed since it was opened.
    """
    recipe, schemes = resolve_recipe(source, recipe)
    rewrite = _rewrite_as_stored(source, schemes, recipe)
    model = build_model(source, torch.float32, rewrite=rewrite, by_layer=True, unsplit_modules=schemes)
    model.model.recipe = recipe
    model.apply_recipe(recipe)
    return model


def quantize_model(model: CausalModel, recipe: RecipeLike) -> CausalModel:
    """Return a new model identical to one that is written by `quantize` and read back by `load`.

    The model's cache and logits schemes apply unless the new recipe sets them. Dtype and device stay the same.

    Raises:
        UsageError: the model's weights are quantized already, or the rounding reads calibration data.
        DiffQuantError: see `quantize`.
    """
    wanted = Recipe.parse(recipe)
    if rounding_named(wanted.rounding.name).needs_text:
        raise UsageError(
            f"{wanted.rounding.name} needs a tokenizer, and a model in memory has none: quantize the folder that "
            "save_pretrained writes, with its tokenizer"
        )
    source = make_memory_source(model)
    return load(source, plan_quantization(source, wanted).recipe, model.dtype, str(model.device))


def _rewrite_as_stored(source: Source, schemes: Mapping[str, Scheme], recipe: Recipe) -> Rewrite:
    """Return a function that replaces each parameter by the values that `quantize` would store."""
    if not schemes:
        return keep_unchanged
    rounder = rounding_named(recipe.rounding.name).prepare(source, schemes, recipe.rounding, report_nothing).finish()
    unpacked, magnitudes = unpacked_dtypes(source), Magnitudes(source.checkpoint, schemes)

    def round_weight(name: str, data: Tensor) -> Tensor:
        scheme, dtype = schemes.get(name.removesuffix(".weight")), source.checkpoint.output_dtype(name)
        if scheme is None:
            return data.to(unpacked.get(name, dtype))
        # codes * scale is rounded once, to the dtype that the model runs in, as when packed weights are dequantized.
        return quantize_as_stored(rounder, name, data.float(), scheme, scheme.format.scale_dtype(dtype), magnitudes)

    return round_weight


def check_loadable(source: Source, recipes: Iterable[Recipe]) -> None:
    """Check that `load` would accept each recipe and that the tokenizer can be read, without loading the model.

    Raises:
        DiffQuantError: `load` would raise it, or the tokenizer cannot be read.
    """
    for recipe in recipes:
        resolve_recipe(source, recipe)
    _ = source.tokenizer


def resolve_recipe(source: Source, recipe: Recipe | None) -> tuple[Recipe, dict[str, Scheme]]:
    """Return the recipe that a model runs under, and the scheme of each weight that loading rounds, by module.

    Args:
        recipe: recipe to run under, which replaces the checkpoint's recorded one, except for packed weights; or None to
            use the recorded one.

    Raises:
        UsageError: the recipe quantizes weights that are quantized already, or does not fit the checkpoint.
    """
    if recipe is None:
        return source.recipe, {}
    if not source.packed:
        return recipe, checked_schemes(source, recipe)
    if recipe.weights.quantizes or recipe.weight_overrides:
        raise UsageError(
            f"{source.path} has quantized weights already; give a recipe without weights, or its 16-bit original"
        )
    source.architecture.check_recipe(recipe)
    check_activations(source, recipe, source.packed)
    return recipe.with_weights_of(source.recipe), {}
