"""Reads and writes compressed-tensors' entry of config.json: which modules are packed, and in which scheme.

Source: compressed-tensors 0.20, config.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from diffquant.checkpoints.compressed_targets import name_patterns, pick_targets
from diffquant.errors import CheckpointError
from diffquant.recipe.numbers.formats import FORMATS, NumberFormat
from diffquant.recipe.numbers.formats.integer import BYTES, PACK_QUANTIZED
from diffquant.recipe.numbers.sharing import Granularity
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.recipe.targets import target_of
from diffquant.support.names import first_few

# Format of a folder whose groups have different formats.
_MIXED = "mixed-precision"

# The `kv_cache_scheme` of a cache whose scales are stored with the weights.
STATIC_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
# Version of compressed-tensors with this layout; 6-bit codes are dense from 0.17 on.
_LAYOUT_VERSION = "0.20.0"
NO_INPUTS: Mapping[str, Scheme] = MappingProxyType({})
# Both names of the activation order, in which the inputs of a group are not neighbours.
REORDERED = ("group", "dynamic")
_EXPERT = re.compile(r"experts\.\d")
_STRATEGIES = {"group": "group", "tensor_group": "group", "channel": "row", "tensor": "tensor", "block": "block"}


def quantization_config(
    schemes: Mapping[str, Scheme],
    linears: Iterable[str],
    ignored: Iterable[str] = (),
    inputs: Mapping[str, Scheme] = NO_INPUTS,
) -> dict[str, Any]:
    """Make the entry `quantization_config` of config.json.

    Args:
        schemes: scheme of each packed module by name.
        linears: every Linear of the model by module name, packed or not.
        ignored: regular expressions of further modules that are not packed; those that match a packed module are
            left out.
        inputs: scheme of the inputs of each packed module whose inputs are rounded while the model runs.
    """
    others = [each for each in ignored if not any(re.fullmatch(each, name) for name in schemes)]
    unpacked = [name for name in linears if name not in schemes]
    groups: dict[tuple[Scheme, Scheme], list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault((scheme, inputs.get(name, FULL)), []).append(name)
    # transformers (5.24) unpacks experts by the first group whose targets have "experts", as in shared_experts.
    groups = dict(sorted(groups.items(), key=lambda group: not any(map(_EXPERT.search, group[1]))))
    plain = len(groups) == 1 and set(schemes) <= set(linears)
    # diffquant's own layouts are named in the entry that every reader checks first, so that others refuse the folder.
    own = [scheme.format.layout for scheme, _ in groups if not scheme.format.is_in_compressed_tensors]
    layouts = {scheme.format.layout for scheme, _ in groups} or {PACK_QUANTIZED}
    # With rounded inputs, compressed-tensors reads integers as int8 tensors unless their group states another layout.
    states_layouts = bool(own or inputs or len(layouts) > 1)
    return {
        "quant_method": "compressed-tensors",
        "format": own[0] if own else _MIXED if len(layouts) > 1 else layouts.pop(),
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if plain else name_patterns(names),
                "weights": _weights_entry(scheme),
                **({"input_activations": _inputs_entry(of_inputs)} if of_inputs.quantizes else {}),
                **({"format": scheme.format.layout} if states_layouts else {}),
            }
            for i, ((scheme, of_inputs), names) in enumerate(groups.items())
        },
        "ignore": name_patterns(unpacked) + ([f"re:({'|'.join(others)})$"] if others else []),
        "version": _LAYOUT_VERSION,
    }


def has_packed_weights(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes packed weights, and not only scales of a KV cache."""
    entry = config.get("quantization_config")
    return entry is not None and entry.get("config_groups") != {}


def has_own_kv_cache_scheme(config: Mapping[str, Any]) -> bool:
    """Return whether config.json has the `kv_cache_scheme` that diffquant writes for engines.

    The result is false for folders of other libraries, which have no recipe of diffquant.
    """
    entry = config.get("quantization_config")
    is_stated = isinstance(entry, Mapping) and entry.get("kv_cache_scheme") == STATIC_CACHE
    return is_stated and "diffquant_config" in config


def read_schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Read the scheme of each packed module from config.json; the inverse of `quantization_config`.

    Args:
        config: content of config.json; without `quantization_config` nothing is packed.
        modules: names of the packed modules.

    Raises:
        CheckpointError: the quantization method, the format or a setting is not supported, such as asymmetric weights;
            activations are quantized without a recipe of diffquant; or no group covers a module.
    """
    modules = list(modules)
    entry = config.get("quantization_config")
    if entry is None:
        if modules:
            raise CheckpointError(
                f"config.json has no quantization_config, yet the weights of {first_few(modules, ', ')} are packed"
            )
        return {}
    groups = _read_groups(entry, has_input_schemes(config), has_own_kv_cache_scheme(config))
    schemes = pick_targets(modules, groups)
    uncovered = [module for module, scheme in schemes.items() if scheme is None]
    if uncovered:
        raise CheckpointError(
            f"no group of quantization_config covers the packed weights of {first_few(uncovered, ', ')}"
        )
    return {module: scheme for module, scheme in schemes.items() if scheme is not None}


def _weights_entry(scheme: Scheme) -> dict[str, Any]:
    return {
        **scheme.format.config_fields,
        "strategy": _strategy(scheme, "channel"),
        "group_size": None if scheme.sharing.block_size else scheme.granularity_size,
        **({"block_structure": [scheme.sharing.block_size] * 2} if scheme.sharing.block_size else {}),
        "dynamic": False,
    }


def _inputs_entry(scheme: Scheme) -> dict[str, Any]:
    """Return the entry of activations that are rounded dynamically, with scales computed from them."""
    strategy = _strategy(scheme, "token")
    return {
        **scheme.format.config_fields,
        "strategy": strategy,
        "group_size": scheme.granularity_size,
        "dynamic": "local" if scheme.format.spans_tensor else True,
    }


def _strategy(scheme: Scheme, row: str) -> str:
    """Return compressed-tensors' name for the granularity of scales; `row` is its name for one scale per row."""
    return {"row": row, "group": scheme.format.group_strategy}.get(scheme.granularity, scheme.granularity)


def has_input_schemes(config: Mapping[str, Any]) -> bool:
    """Return whether the recipe in config.json has a scheme, or an override, for the inputs of Linears."""
    recorded = config.get("diffquant_config")
    recipe = recorded.get("recipe") if isinstance(recorded, Mapping) else None
    if not isinstance(recipe, Mapping):
        return False
    overrides = recipe.get("overrides")
    patterns = overrides if isinstance(overrides, Mapping) else {}
    return "activations" in recipe or any(target_of(str(each)) == "activations" for each in patterns)


def _read_groups(entry: Any, rounds_inputs: bool, has_cache: bool) -> dict[str, Scheme]:
    """Read the scheme of each target of `quantization_config`.

    Args:
        rounds_inputs: whether groups may have rounded inputs.
        has_cache: whether its `kv_cache_scheme` comes from a recipe.

    Raises:
        CheckpointError: something in the entry is not supported; the message lists all of it.
    """
    if not isinstance(entry, Mapping) or entry.get("quant_method") != "compressed-tensors":
        method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
        raise CheckpointError(f"this checkpoint is quantized by {method!r}, whose packed weights are not supported")
    layout = entry.get("format")
    problems = [] if layout == _MIXED or _formats_in(layout) else [f"its format is {layout!r}"]
    if entry.get("kv_cache_scheme") and not has_cache:
        problems.append("it has a kv_cache_scheme")
    targets: dict[str, Scheme] = {}
    groups = entry.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError("config.json: config_groups of quantization_config must be a mapping")
    for name, group in groups.items():
        group_problems = _group_problems(group, layout, rounds_inputs)
        problems += [f"{name} {problem}" for problem in group_problems]
        if not group_problems and (number_format := _format_of(group, layout)):
            targets |= dict.fromkeys(group["targets"], _scheme(number_format, group["weights"]))
    if problems:
        raise CheckpointError(
            f"this checkpoint's quantization_config is not supported: {'; '.join(problems)}; supported is "
            f"compressed-tensors' {PACK_QUANTIZED} with symmetric integer weights of 2 to 8 bits per tensor, channel "
            f"or group, and {_read_layouts()}"
        )
    return targets


def _read_layouts() -> str:
    """Return the names of compressed-tensors' float layouts that diffquant reads, joined by commas."""
    known = [each for each in FORMATS.values() if each.quantizes and each.is_in_compressed_tensors]
    layouts = {each.layout for each in known} - {PACK_QUANTIZED}
    return ", ".join(sorted(layouts))


def _formats_in(layout: object) -> list[NumberFormat]:
    """Return the number formats that are stored in a layout."""
    return [each for each in (*FORMATS.values(), BYTES) if each.quantizes and each.layout == layout]


def _format_of(group: Mapping[str, Any], layout: object) -> NumberFormat | None:
    """Return the number format of a config group, whose layout overrides the folder's, or None if unknown."""
    weights = {"type": "int", "symmetric": True, **group["weights"]}
    formats = _formats_in(group.get("format") or layout)
    return next((each for each in formats if each.config_fields.items() <= weights.items()), None)


def _group_problems(group: Any, layout: object, rounds_inputs: bool) -> list[str]:
    """List settings of a config group that are not supported."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return ["does not quantize weights"]
    problems = []
    if not has_targets(group):
        problems.append("has no list of targets")
    own, number_format = group.get("format") or layout, _format_of(group, layout)
    if not (formats := _formats_in(own)):
        problems += [f"has format {own!r}"] if own != layout else []
    elif number_format is None:
        problems += _unknown_codes(weights, formats)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    has_tiles = number_format is None or number_format.has_tiles
    if not isinstance(strategy, str) or strategy not in _STRATEGIES or (strategy == "block" and not has_tiles):
        problems.append(f"has strategy {strategy!r}")
    elif strategy == "block" and not has_square_blocks(weights.get("block_structure")):
        problems.append(f"has block_structure {weights.get('block_structure')!r}")
    if strategy == "group" and not _is_size(size):
        problems.append("has no group_size" if size is None else f"has group_size {size!r}")
    if weights.get("actorder") in REORDERED:
        problems.append("reorders columns (actorder)")
    if (group.get("input_activations") and not rounds_inputs) or group.get("output_activations"):
        problems.append("quantizes activations")
    return problems


def has_targets(group: Mapping[str, Any]) -> bool:
    """Return whether a config group has a list of `targets`, which name its modules."""
    targets = group.get("targets")
    return isinstance(targets, list) and all(isinstance(target, str) for target in targets)


def _unknown_codes(weights: Mapping[str, Any], formats: list[NumberFormat]) -> list[str]:
    """List settings of a group's weights that no number format of its layout has."""
    problems = []
    if weights.get("type", "int") not in [each.config_fields["type"] for each in formats]:
        problems.append(f"has {weights.get('type', 'int')} codes")
    if not weights.get("symmetric", True):
        problems.append("is asymmetric")
    if weights.get("num_bits") not in [each.config_fields.get("num_bits") for each in formats]:
        problems.append(f"has {weights.get('num_bits')!r} bits")
    return problems


def has_square_blocks(structure: object) -> bool:
    """Return whether a `block_structure` of quantization_config gives square blocks."""
    block = block_shape(structure)
    return block is not None and block[0] == block[1]


def block_shape(structure: object) -> tuple[int, int] | None:
    """Return (height, width) of a `block_structure`, or None if it is not a list of two positive whole numbers."""
    if isinstance(structure, list) and len(structure) == 2 and all(map(_is_size, structure)):
        return structure[0], structure[1]
    return None


def _is_size(size: object) -> bool:
    return type(size) is int and size > 0


def _scheme(number_format: NumberFormat, weights: Mapping[str, Any]) -> Scheme:
    granularity = _STRATEGIES[weights["strategy"]]
    if granularity == "block":
        return Scheme(number_format, Granularity(granularity, weights["block_structure"][0]))
    return Scheme(number_format, Granularity(granularity, weights["group_size"] if granularity == "group" else None))
