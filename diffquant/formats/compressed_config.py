"""What config.json says of packed weights, in compressed-tensors' words: which modules, and in which scheme each.

Source: compressed-tensors 0.20, config and utils/match.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from diffquant.errors import CheckpointError
from diffquant.numbers.formats import FORMATS, NumberFormat
from diffquant.numbers.formats.integer import PACK_QUANTIZED
from diffquant.numbers.sharing import Sharing
from diffquant.scheme import Scheme
from diffquant.support.expressions import first_matches
from diffquant.support.listing import first_few

# The folder's format where its groups have several.
_MIXED = "mixed-precision"

# The version whose layout this is; from 0.17 on 6-bit codes are dense.
_LAYOUT_VERSION = "0.20.0"
_T = TypeVar("_T")
# Both names of the order in which groups are not of neighbours.
REORDERED = ("group", "dynamic")
_STRATEGIES = {"group": "group", "tensor_group": "group", "channel": "row", "tensor": "tensor", "block": "block"}


def quantization_config(
    schemes: Mapping[str, Scheme], linears: Iterable[str], ignored: Iterable[str] = ()
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json.

    Args:
        schemes: scheme of each packed module by name.
        linears: every Linear of the model by module name, packed or not.
        ignored: regular expressions of further modules that are not packed; one that fits a packed module is left out.
    """
    others = [each for each in ignored if not any(re.fullmatch(each, name) for name in schemes)]
    unpacked = [name for name in linears if name not in schemes]
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    plain = len(groups) == 1 and set(schemes) <= set(linears)
    # A name that other readers do not know stands where all of them look first.
    own = [scheme.format.layout for scheme in groups if not scheme.format.is_standard]
    layouts = {scheme.format.layout for scheme in groups} or {PACK_QUANTIZED}
    return {
        "quant_method": "compressed-tensors",
        "format": own[0] if own else _MIXED if len(layouts) > 1 else layouts.pop(),
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if plain else name_patterns(names),
                "weights": _weights_entry(scheme),
                **({"format": scheme.format.layout} if own or len(layouts) > 1 else {}),
            }
            for i, (scheme, names) in enumerate(groups.items())
        },
        "ignore": name_patterns(unpacked) + ([f"re:({'|'.join(others)})$"] if others else []),
        "version": _LAYOUT_VERSION,
    }


def read_schemes(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
    """Scheme of each packed module, from config.json: the inverse of `quantization_config`.

    Args:
        config: content of config.json; without `quantization_config` nothing is packed.
        modules: names of the packed modules.

    Raises:
        CheckpointError: another quantization method or format, one we do not read (asymmetric,
            floating-point, quantized activations), or modules that no group covers.
    """
    modules = list(modules)
    entry = config.get("quantization_config")
    if entry is None:
        if modules:
            raise CheckpointError(
                f"config.json has no quantization_config, yet the weights of {first_few(modules, ', ')} are packed"
            )
        return {}
    groups = _checked_groups(entry)
    schemes = targets_of(modules, groups)
    uncovered = [module for module, scheme in schemes.items() if scheme is None]
    if uncovered:
        raise CheckpointError(
            f"no group of quantization_config covers the packed weights of {first_few(uncovered, ', ')}"
        )
    return {module: scheme for module, scheme in schemes.items() if scheme is not None}


def name_patterns(names: Iterable[str]) -> list[str]:
    """Module names as compressed-tensors targets; names that differ in a layer's number become one expression.

    So do those that also differ in an expert's, where all of them are in the same layers.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = re.fullmatch(r"(.*\.layers)\.(\d+)\.(.+)", name)
        key = (match[1], match[3]) if match else (name, "")
        layers.setdefault(key, []).append(match[2] if match else "")
    experts: dict[tuple[str, str, str], list[str]] = {}
    for (stem, tail), numbers in layers.items():
        match = re.fullmatch(r"(.*experts)\.(\d+)\.(.+)", tail)
        start = f"re:{re.escape(stem)}\\.{_alternatives(numbers)}\\." if tail else stem
        key_of_all = (start, match[1], match[3]) if match else (start, tail, "")
        experts.setdefault(key_of_all, []).append(match[2] if match else "")
    return [
        start + (re.escape(tail) + (f"\\.{_alternatives(numbers)}\\.{re.escape(end)}$" if end else "$") if tail else "")
        for (start, tail, end), numbers in experts.items()
    ]


def _alternatives(numbers: list[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"


def _weights_entry(scheme: Scheme) -> dict[str, Any]:
    return {
        **scheme.format.description,
        "strategy": scheme.format.strategy(scheme.granularity),
        "group_size": None if scheme.sharing.tile else scheme.size,
        **({"block_structure": [scheme.sharing.tile] * 2} if scheme.sharing.tile else {}),
        "dynamic": False,
    }


def _checked_groups(entry: Any) -> dict[str, Scheme]:
    """Scheme of each target of `quantization_config`.

    Raises:
        CheckpointError: something in the entry is not read; all of it is named.
    """
    if not isinstance(entry, Mapping) or entry.get("quant_method") != "compressed-tensors":
        method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
        raise CheckpointError(f"this checkpoint is quantized by {method!r}, whose packed weights are not read")
    layout = entry.get("format")
    problems = [] if layout == _MIXED or _in_layout(layout) else [f"its format is {layout!r}"]
    if entry.get("kv_cache_scheme"):
        problems.append("it has a kv_cache_scheme")
    targets: dict[str, Scheme] = {}
    groups = entry.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError("config.json: config_groups of quantization_config must be a mapping")
    for name, group in groups.items():
        group_problems = _group_problems(group, layout)
        problems += [f"{name} {problem}" for problem in group_problems]
        if not group_problems and (number_format := _format_of(group, layout)):
            targets |= dict.fromkeys(group["targets"], _scheme(number_format, group["weights"]))
    if problems:
        raise CheckpointError(
            f"this checkpoint's quantization_config is not read: {'; '.join(problems)}; read is compressed-tensors "
            f"{PACK_QUANTIZED} with symmetric integer weights of 2 to 8 bits per tensor, channel or group, and "
            f"{_read_layouts()}"
        )
    return targets


def _read_layouts() -> str:
    """The layouts of floats that are read."""
    layouts = {each.layout for each in FORMATS.values() if each.quantizes and each.is_standard} - {PACK_QUANTIZED}
    return ", ".join(sorted(layouts))


def _in_layout(layout: object) -> list[NumberFormat]:
    """The number formats that are stored in a layout."""
    return [each for each in FORMATS.values() if each.quantizes and each.layout == layout]


def _format_of(group: Mapping[str, Any], layout: object) -> NumberFormat | None:
    """The number format of a config group, whose own layout overrides the folder's; None if unknown."""
    weights = {"type": "int", "symmetric": True, **group["weights"]}
    formats = _in_layout(group.get("format") or layout)
    return next((each for each in formats if each.description.items() <= weights.items()), None)


def _group_problems(group: Any, layout: object) -> list[str]:
    """Settings of a config group that are not supported."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return ["does not quantize weights"]
    problems = []
    if not has_targets(group):
        problems.append("has no list of targets")
    own = group.get("format") or layout
    if not (formats := _in_layout(own)):
        problems += [f"has format {own!r}"] if own != layout else []
    elif _format_of(group, layout) is None:
        problems += _unknown_codes(weights, formats)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    has_tiles = (known := _format_of(group, layout)) is None or known.has_tiles
    if not isinstance(strategy, str) or strategy not in _STRATEGIES or (strategy == "block" and not has_tiles):
        problems.append(f"has strategy {strategy!r}")
    elif strategy == "block" and not is_square(weights.get("block_structure")):
        problems.append(f"has block_structure {weights.get('block_structure')!r}")
    if strategy == "group" and not _is_size(size):
        problems.append("has no group_size" if size is None else f"has group_size {size!r}")
    if weights.get("actorder") in REORDERED:
        problems.append("reorders columns (actorder)")
    if group.get("input_activations") or group.get("output_activations"):
        problems.append("quantizes activations")
    return problems


def has_targets(group: Mapping[str, Any]) -> bool:
    """Whether a config group names the modules that it is of."""
    targets = group.get("targets")
    return isinstance(targets, list) and all(isinstance(target, str) for target in targets)


def _unknown_codes(weights: Mapping[str, Any], formats: list[NumberFormat]) -> list[str]:
    """Settings of a group's weights that no number format of its layout has."""
    problems = []
    if weights.get("type", "int") not in [each.description["type"] for each in formats]:
        problems.append(f"has {weights.get('type', 'int')} codes")
    if not weights.get("symmetric", True):
        problems.append("is asymmetric")
    if weights.get("num_bits") not in [each.description.get("num_bits") for each in formats]:
        problems.append(f"has {weights.get('num_bits')!r} bits")
    return problems


def is_square(structure: object) -> bool:
    """Whether a block_structure is one of blocks as high as wide."""
    block = block_of(structure)
    return block is not None and block[0] == block[1]


def block_of(structure: object) -> tuple[int, int] | None:
    """Height and width of blocks as a folder says them; None if it does not."""
    if isinstance(structure, list) and len(structure) == 2 and all(map(_is_size, structure)):
        return structure[0], structure[1]
    return None


def _is_size(size: object) -> bool:
    return type(size) is int and size > 0


def _scheme(number_format: NumberFormat, weights: Mapping[str, Any]) -> Scheme:
    granularity = _STRATEGIES[weights["strategy"]]
    if granularity == "block":
        return Scheme(number_format, Sharing(granularity, weights["block_structure"][0]))
    return Scheme(number_format, Sharing(granularity, weights["group_size"] if granularity == "group" else None))


def targets_of(modules: Sequence[str], targets: Mapping[str, _T]) -> dict[str, _T | None]:
    """The entry that compressed-tensors picks for each module: by exact name, else regular expression, else class.

    If several expressions match, the first one in alphabetical order counts, wherever it stands in config.json.

    Raises:
        CheckpointError: an expression is malformed, or takes too long.
    """
    expressions = sorted(target for target in targets if target.startswith("re:"))
    unnamed = [module for module in modules if module not in targets]
    matched = match_modules([expression.removeprefix("re:") for expression in expressions], unnamed)
    indices = dict(zip(unnamed, matched, strict=True))
    picked = (module if (i := indices.get(module)) is None else expressions[i] for module in modules)
    of_class = targets.get("Linear")
    return {module: targets.get(name, of_class) for module, name in zip(modules, picked, strict=True)}


def match_modules(expressions: Sequence[str], modules: Sequence[str]) -> list[int | None]:
    """The index of the first of quantization_config's regular expressions that each module's name begins with, or None.

    Raises:
        CheckpointError: an expression is malformed, or takes too long.
    """
    try:
        return first_matches(expressions, modules)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}; correct its quantization_config") from error
