"""Loading of a checkpoint, plain or quantized, as a model that runs under a recipe."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.model.causal import CausalModel
from diffquant.quantization.checks import checked_schemes
from diffquant.quantization.magnitudes import Magnitudes
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.rounded_weight import as_stored
from diffquant.quantization.roundings import rounding_named
from diffquant.quantization.unpacked import unpacked_dtypes
from diffquant.recipe import Recipe, RecipeLike
from diffquant.scheme import Scheme
from diffquant.source.building import Rewrite, as_it_is, build_model
from diffquant.source.memory import memory_source
from diffquant.source.places import DeviceMap, Places
from diffquant.source.ranges import read_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.devices import as_dtype, resolve_device
from diffquant.support.progress import silent


def load(
    path: Path | str | Source,
    recipe: RecipeLike | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "auto",
    packed: bool | None = None,
    scales: Path | str | None = None,
    device_map: DeviceMap | Places | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: Path | str | None = None,
) -> CausalModel:
    """The runnable model of a checkpoint, a recipe applied.

        model = diffquant.load("checkpoint", {"weights": "4:g32", "logits": "6:row"}, dtype="bfloat16")
        logits = model(ids).logits  # ids [B, T] -> [B, T, V]

    Its `generate` ends texts where transformers' does, by generation_config.json, and decodes greedily unless its
    arguments say otherwise: other settings of that file are not taken.

    Args:
        path: a folder of any model_type that an adapter reads, plain or quantized; a .gguf file
            of a llama, or either as an open `Source`.
        recipe: recipe to simulate, as `Recipe.parse` takes it; a quantized checkpoint's own by default, whose weights
            it keeps in any case. Weights of a plain checkpoint come out as `quantize` stores them, whatever the
            recipe's rounding; one that reads a text does so at each load.
        dtype: dtype of the model, or its name; "auto" is bfloat16 where it is native, else float32. The checkpoint's by
            default.
        device: device of the model; by default CUDA where torch finds a device of it, else the processor.
        packed: whether the layers' packed weights stay packed, or are expanded to `dtype`; by default they
            stay packed where kernels read them, in half precision on CUDA. Weights whose groups the kernels do
            not know (no multiple of 16) are expanded in any case.
        scales: file of ranges calibrated on this checkpoint, for static schemes.
        device_map: places of a model that is larger than one device: "auto", or a mapping from modules' names to
            devices, "cpu" or "disk", as accelerate and transformers have it; or `Places`, which hold all three. Weights
            are expanded then.
        max_memory: most bytes of each place under "auto", such as {0: "20GB", "cpu": "60GB"}; all of it by default.
        offload_folder: folder for what lies on disk, which is there as long as the model.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete, of a kind that is not read, or changed since it was
            opened.
        UsageError: the recipe quantizes weights that already are, does not fit the checkpoint or names an unknown
            rounding, there is no such device, or a device map leaves parts of the model out or comes with a device.
    """
    if not isinstance(device_map, Places):
        device_map = Places.of(device, device_map, offload_folder, max_memory)
    if device_map is not None and packed:
        raise UsageError("packed weights stay on one device; leave out packed, or device_map")
    device = resolve_device(device)
    source = open_source(path)
    recipe = None if recipe is None else Recipe.parse(recipe)
    recipe, schemes = recipe_of_run(source, recipe)
    ranges = read_ranges(Path(scales), source) if scales else None
    if ranges is not None:
        ranges.check(recipe)
    rewrite = _rewrite_as_stored(source, schemes, recipe) if schemes else as_it_is
    model = build_model(source, as_dtype(dtype, device), device, packed, rewrite, device_map)
    source.check_unchanged()
    if ranges is not None:
        model.model.ranges = {name: tensor.to(model.device) for name, tensor in ranges.tensors.items()}
    model.model.recipe = recipe
    model.apply_recipe(recipe)
    return model


def load_by_layer(source: Source, recipe: Recipe) -> CausalModel:
    """A model in float32 that holds one layer's parameters at a time and no head, for a walk through its layers.

    Raises:
        UsageError: the recipe does not fit the checkpoint.
        CheckpointError: it changed since it was opened.
    """
    recipe, schemes = recipe_of_run(source, recipe)
    rewrite = _rewrite_as_stored(source, schemes, recipe) if schemes else as_it_is
    model = build_model(source, torch.float32, rewrite=rewrite, by_layer=True, whole=schemes)
    model.model.recipe = recipe
    model.apply_recipe(recipe)
    return model


def quantized(model: CausalModel, recipe: RecipeLike) -> CausalModel:
    """Another model that computes what a loaded one does once `quantize` wrote it and `load` read it again.

    What the model's own recipe says of cache and logits stays where this one says nothing. Its dtype and device stay.

    Raises:
        UsageError: the model's weights are at low bits already, or the rule reads a text.
        DiffQuantError: as `quantize` raises it.
    """
    wanted = Recipe.parse(recipe)
    if rounding_named(wanted.rounding.name).needs_text:
        raise UsageError(
            f"{wanted.rounding.name} reads a text, and a model in memory has no tokenizer: quantize the folder that "
            "save_pretrained writes, with its tokenizer"
        )
    source = memory_source(model)
    return load(source, plan_quantization(source, wanted).recipe, model.dtype, str(model.device))


def _rewrite_as_stored(source: Source, schemes: Mapping[str, Scheme], recipe: Recipe) -> Rewrite:
    """Rewriting of each parameter into what `quantize` stores of it, under the recipe's rounding."""
    rounder = rounding_named(recipe.rounding.name).prepare(source, schemes, recipe.rounding, silent)

    unpacked, magnitudes = unpacked_dtypes(source), Magnitudes(source.checkpoint, schemes)

    def rounded(name: str, data: Tensor) -> Tensor:
        scheme, dtype = schemes.get(name.removesuffix(".weight")), source.checkpoint.written_dtype(name)
        if scheme is None:
            return data.to(unpacked.get(name, dtype))
        # As unpacked codes, the products are rounded once, to the run's dtype.
        return as_stored(rounder, name, data.float(), scheme, scheme.format.scale_dtype(dtype), magnitudes)

    return rounded


def check_loadable(source: Source, recipes: Iterable[Recipe]) -> None:
    """Check that a checkpoint's tokenizer and recipes for it are what `load` takes, without loading.

    Raises:
        DiffQuantError: as `load` raises it, or the tokenizer cannot be read.
    """
    for recipe in recipes:
        recipe_of_run(source, recipe)
    _ = source.tokenizer


def recipe_of_run(source: Source, recipe: Recipe | None) -> tuple[Recipe, dict[str, Scheme]]:
    """The recipe that a model runs under, and the scheme of each weight that is rounded while it is loaded.

    Without one it is the checkpoint's own. One that is given says all of cache and logits; packed weights stay as they
    are.

    Raises:
        UsageError: it quantizes weights that already are, or does not fit the checkpoint.
    """
    if recipe is None:
        return source.recipe, {}
    if not source.packed:
        return recipe, checked_schemes(source, recipe)
    if recipe.weights.quantizes or recipe.weight_overrides:
        raise UsageError(
            f"{source.path} holds quantized weights already; give a recipe without weights, or its 16-bit original"
        )
    source.architecture.check_recipe(recipe)
    return recipe.with_weights_of(source.recipe), {}
