"""Checks that a recipe can be applied to a checkpoint; each error names the obstacle and a remedy."""

import difflib
import math
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

import torch

from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.weight_layout import find_ambiguous_experts, find_transposed
from diffquant.checkpoints.weight_source import WeightSource
from diffquant.errors import CheckpointError, GroupSizeError, UsageError
from diffquant.quantization.roundings import checked_rounding, rounding_named
from diffquant.quantization.targets import PackableModules, find_packable_modules, split_experts
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.recipe.targets import LAYER_TARGETS, target_of
from diffquant.support.names import NAMED, first_few, option_name

# Last parts of the names of embeddings in transformers' models, including architectures that diffquant cannot run.
_EMBEDDINGS = ("embed_tokens", "embed_in", "embed_positions", "*embeddings", "wte", "wpe", "shared")
_QUANTIZED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Common group sizes; an error suggests those that divide the width.
_GROUP_SIZES = (16, 32, 64, 128)


def checked_schemes(source: Source | WeightSource, recipe: Recipe) -> dict[str, Scheme]:
    """Check that a recipe can be applied to a 16-bit checkpoint, and return the scheme of each module that it packs.

    Returns:
        Schemes by the modules' names in the checkpoint.

    Raises:
        CheckpointError: a weight has a dtype that cannot be quantized, or is stored [in, out]; or the rules of a
            `WeightSource` select no weight.
        GroupSizeError: a group size does not divide the width of some tensors; the message names the first.
        UsageError: an override matches nothing, or names a module that other libraries cannot load packed; the
            rounding is unknown or does not support these schemes; the schemes of `activations` are invalid, see
            `check_activations`; or the recipe quantizes attention or a cache of a `WeightSource`.
    """
    targets = find_packable_modules(source)
    schemes = targets.schemes(recipe)
    by_name = {targets.weights[module]: scheme for module, scheme in schemes.items()}
    _check_overrides(recipe, targets)
    if isinstance(source, WeightSource):
        _check_weights_alone(source, recipe, schemes)
    else:
        source.architecture.check_recipe(recipe)
    check_activations(source, recipe, schemes)
    _refuse_transposed(source, by_name)
    _check_packable(source.checkpoint, by_name)
    if checked_rounding(recipe.rounding, schemes).needs_text:
        reader = option_name("rounding", recipe.rounding.name)
        _refuse_experts(source.checkpoint, by_name, reader, "use nearest or mse")
    elif recipe.rounding.imatrix is not None:
        _refuse_experts(source.checkpoint, by_name, option_name("imatrix"), "leave it out")
    return schemes


def check_activations(source: Source | WeightSource, recipe: Recipe, packed: Collection[str]) -> None:
    """Check that a recipe's schemes of `activations`, if any, apply only to Linears with quantized weights.

    Args:
        packed: names in the checkpoint of the modules with quantized weights.

    Raises:
        UsageError: there are such schemes, but no Linear has quantized weights; an override matches none of these
            Linears; or a scheme applies to a module that is not a Linear.
        GroupSizeError: a group size does not divide the number of input channels of some Linears.
    """
    patterns = [pattern for pattern in recipe.overrides if target_of(pattern) == "activations"]
    if not patterns and not recipe.activations.quantizes:
        return
    targets = find_packable_modules(source)
    modules = [module for module in packed if targets.has_rounded_input(module)]
    if not modules:
        raise UsageError(
            f"activations are the inputs of Linears with quantized weights, and no weight of {source.path} is "
            f"quantized; also give {option_name('weights', '8:channel')}"
        )
    unmatched = [each for each in patterns if not any(fnmatchcase(f"{name}.activations", each) for name in modules)]
    if unmatched:
        raise UsageError(
            f"overrides {first_few(map(repr, unmatched), ', ')} match no input of a Linear with quantized weights, "
            f"such as '{modules[0]}.activations'"
        )
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for module in modules:
        if (scheme := recipe.input_scheme(module)).quantizes:
            shapes.setdefault(scheme.granularity_size or 1, {})[module] = _weight_shape(source, targets.weights[module])
    rounded = [module for of_size in shapes.values() for module in of_size]
    if apart := [module for module in rounded if not _is_linear(source, module, targets.weights[module])]:
        raise UsageError(
            f"the inputs of {first_few(apart, ', ')} are not rounded here, since their weights belong to no Linear; "
            f"keep them at 16 bits with {option_name('overrides', 'PATTERN.activations=16')}"
        )
    if problems := [problem for size, misfits in shapes.items() if (problem := _misfit_problem(size, misfits))]:
        raise GroupSizeError(f"activations: {'; '.join(problems)}")


def _weight_shape(source: Source | WeightSource, name: str) -> tuple[int, ...]:
    known = source.adapter.source_parameters if isinstance(source, Source) else source.checkpoint.tensors
    return known[name].shape


def _is_linear(source: Source | WeightSource, module: str, name: str) -> bool:
    """Return whether a weight multiplies the inputs of one Linear, or as many as its experts."""
    if isinstance(source, WeightSource):
        return all(len(part.shape) == 2 for part in split_experts(module, _weight_shape(source, name)))
    parameter = source.adapter.source_parameters[name]
    return len(parameter.shape) == 2 and not parameter.by_head


def _check_weights_alone(source: WeightSource, recipe: Recipe, schemes: Mapping[str, Scheme]) -> None:
    """Check that a recipe for an architecture that diffquant cannot run quantizes weights and nothing else."""
    for pattern in recipe.overrides:
        if target_of(pattern) != "weights":
            last = pattern.rsplit(".", 1)[-1]
            literal = f"{pattern.removesuffix(last)}[{last[0]}]{last[1:]}"
            raise UsageError(
                f"override {pattern!r} ends in .{last} and so refers to the {last} of layers, but {source.path} is "
                f"quantized by tensor names only; for a weight with that name write {literal!r}"
            )
    targets = [target for target in LAYER_TARGETS if recipe.quantizes_any(target)]
    if targets:
        raise UsageError(
            f"{source.path} (model_type {source.model_type!r}) is quantized by tensor names and cannot be run: "
            f"{', '.join(targets)} cannot be quantized; give only {option_name('weights')}"
        )
    if rounding_named(recipe.rounding.name).needs_text:
        raise UsageError(
            f"{option_name('rounding', recipe.rounding.name)} runs the model, but {source.path} (model_type "
            f"{source.model_type!r}) is quantized by tensor names and cannot be run; use nearest or mse"
        )
    if not schemes:
        raise CheckpointError(
            f"no tensor of {source.path} would be packed: {len(source.packable_weights)} of "
            f"{len(source.checkpoint.tensors)} are weights by their names, but the recipe or the rules exclude all of "
            f"them; the rules pack {', '.join((*source.rules.linears, *source.rules.experts))}. Give other rules with "
            f"{option_name('weight_rules')}"
        )


def _refuse_transposed(source: Source | WeightSource, chosen: Collection[str]) -> None:
    """Refuse to pack weights that are stored [in, out].

    Args:
        chosen: names of the weights to pack.

    Raises:
        CheckpointError: some of them are stored so, or may be; the message names the first.
    """
    tensors = source.checkpoint.tensors
    if isinstance(source, WeightSource):
        found = find_transposed(tensors)
        unclear = [f"{name} {list(tensors[name].shape)}" for name in find_ambiguous_experts(tensors) if name in chosen]
        if unclear:
            raise CheckpointError(
                f"the matrices of experts in {source.path} are square, and no other tensor shows whether they "
                f"are stored [out, in] or [in, out], so they could be packed along the wrong axis: "
                f"{first_few(unclear, ', ')}; leave them unquantized with {option_name('keep', 'PATTERN')}, or "
                f"write each expert as a separate matrix [out, in]"
            )
    else:
        parameters = source.adapter.source_parameters
        found = [name for name, each in parameters.items() if each.contracted not in (-1, len(each.shape) - 1)]
    transposed = [name for name in found if name in chosen]
    if transposed:
        shapes = first_few((f"{name} {list(tensors[name].shape)}" for name in transposed), ", ")
        cure = option_name("overrides", "PATTERN=16")
        if isinstance(source, WeightSource):
            cure = option_name("keep", "PATTERN")
        raise CheckpointError(
            f"{len(transposed)} weights of {source.path} are stored [in, out], as GPT-2's Conv1D and some experts are, "
            f"and would be packed along the wrong axis: {shapes}; leave them unquantized with {cure}, or write "
            "them [out, in] for a model of Linear layers"
        )


def _refuse_experts(checkpoint: Checkpoint, chosen: Collection[str], reader: str, remedy: str) -> None:
    """Refuse to round experts stacked in one tensor by a rule that reads the inputs of Linears.

    Args:
        chosen: names of the weights to pack.
        reader: the option that names the rule.
        remedy: what to do instead.

    Raises:
        UsageError: some of them are stacked experts; the message names the first.
    """
    experts = [name for name in chosen if len(checkpoint.tensors[name].shape) > 2]
    if experts:
        raise UsageError(
            f"{reader} needs the inputs of Linears, but {first_few(experts, ', ')} have all experts in one tensor; "
            f"{remedy}, or keep 16 bits with {option_name('overrides', 'PATTERN=16')}"
        )


def _check_overrides(recipe: Recipe, targets: PackableModules) -> None:
    unmatched = [
        pattern
        for pattern in recipe.weight_overrides
        if not any(fnmatchcase(module, pattern) for module in targets.weights)
    ]
    if unmatched:
        # Finding the nearest name is slow, and only the first few problems are shown.
        problems = [_no_match_problem(pattern, targets) for pattern in unmatched[:NAMED]]
        raise UsageError(first_few([*problems, *unmatched[NAMED:]]))


def _no_match_problem(pattern: str, targets: PackableModules) -> str:
    if targets.is_tied and fnmatchcase("lm_head", pattern):
        return f"override {pattern!r}: this model's head is its embedding (tie_word_embeddings), which stays 16-bit"
    nearest = difflib.get_close_matches(pattern.replace("*", ""), targets.weights, n=1, cutoff=0.0)
    hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
    return f"override {pattern!r} matches no weight{hint}"


def _check_packable(checkpoint: Checkpoint, schemes: Mapping[str, Scheme]) -> None:
    """Check that each weight in `schemes`, which is keyed by tensor name, can be packed under its scheme."""
    modules = [name.removesuffix(".weight") for name in schemes]
    embeddings = [m for m in modules if any(fnmatchcase(m.rsplit(".", 1)[-1], each) for each in _EMBEDDINGS)]
    if embeddings:
        raise UsageError(
            f"{first_few(embeddings, ', ')} would be packed, and compressed-tensors' readers cannot load a packed "
            "embedding; leave it at 16 bits"
        )
    infos = {name: checkpoint.tensors[name] for name in schemes}
    mistyped = [f"{name} is {info.dtype}" for name, info in infos.items() if info.dtype not in _QUANTIZED_TYPES]
    if mistyped:
        raise CheckpointError(
            f"weights must be float16, bfloat16 or float32 to be quantized: {first_few(mistyped, ', ')}; convert them "
            "first"
        )
    spanning = [n for n, scheme in schemes.items() if scheme.sharing.spans_rows and len(infos[n].shape) > 2]
    if spanning:
        raise UsageError(
            f"one scale per tensor would span all experts of {first_few(spanning, ', ')}; "
            "use a group or row granularity"
        )
    parted = {n: infos[n].shape for n, scheme in schemes.items() if _parts_experts(scheme, infos[n].shape)}
    if parted:
        raise GroupSizeError(
            "blocks would span two experts, since they do not divide the experts' rows, in "
            + first_few((f"{name} {list(shape)}" for name, shape in parted.items()), ", ")
            + "; use a group or row granularity"
        )
    groups: dict[tuple[int, str], dict[str, tuple[int, ...]]] = {}
    for name, info in infos.items():
        scheme = schemes[name]
        # Blocks need not divide a weight's shape.
        if scheme.granularity_size and not scheme.sharing.block_size:
            fixed_by = scheme.format.name if scheme.format.block else ""
            groups.setdefault((scheme.granularity_size * scheme.format.scales_per_step, fixed_by), {})[name] = (
                info.shape
            )
    problems = [_misfit_problem(size, shapes, fixed_by) for (size, fixed_by), shapes in groups.items()]
    if any(problems):
        raise GroupSizeError("; ".join(filter(None, problems)))


def _parts_experts(scheme: Scheme, shape: tuple[int, ...]) -> bool:
    # Each half of an expert's rows may be written as a separate Linear (gate and up projection).
    return len(shape) > 2 and bool(scheme.sharing.block_size) and shape[-2] // 2 % scheme.sharing.block_size > 0


def _misfit_problem(size: int, shapes: Mapping[str, tuple[int, ...]], fixed_by: str = "") -> str:
    """Describe the widths that a group size does not divide and the sizes that do; return "" if it divides all.

    Args:
        fixed_by: name of the number format that requires this size, or "" if the recipe chose it.
    """
    misfits = {name: shape for name, shape in shapes.items() if shape[-1] % size}
    if not misfits:
        return ""
    widths = ", ".join(map(str, sorted({shape[-1] for shape in misfits.values()})))
    name, shape = next(iter(misfits.items()))
    common = math.gcd(*(shape[-1] for shape in shapes.values()))
    power = common & -common
    fitting = [group for group in _GROUP_SIZES if common % group == 0] or ([power] if power > 1 else [])
    sizes = f"{', '.join(f'g{group}' for group in fitting)} or row" if fitting else "row"
    use = f"{fixed_by} has no other size, so use integers with {sizes}" if fixed_by else f"use {sizes}"
    return (
        f"group size {size} does not divide the input width of {len(misfits)} tensors, such as {name} {list(shape)}; "
        f"their widths are {widths}: {use}, or keep them at 16 bits with {option_name('overrides', 'PATTERN=16')}"
    )
