"""Packed weights as compressed-tensors stores them: packed codes and scales, and their entry in config.json.

A Linear at prefix P is stored as P.weight_packed ([out, words of in codes], int32 for integers),
P.weight_scale ([out, in/g], [out, 1] or [1], in 16 bits) and P.weight_shape (int64 [2]).
Experts in one tensor [experts, out, in] have a leading axis more in the first two, and weight_shape [3].
Codes are computed against the scale as stored, after its rounding to a half type.

Integers are compressed-tensors' pack-quantized. A number format that it does not have is stored in the same three
tensors under a format's name of ours, which its readers refuse.

Source: compressed-tensors 0.20, compressors/pack_quantized.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.numbers.formats import FORMATS, NumberFormat
from diffquant.numbers.formats.integer import PACK_QUANTIZED
from diffquant.numbers.sharing import Sharing
from diffquant.scheme import Scheme

PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"

# The version whose layout this is; from 0.17 on 6-bit codes are dense.
_LAYOUT_VERSION = "0.20.0"
_STRATEGIES = {"group": "group", "channel": "row", "tensor": "tensor"}
_STRATEGY_OF = {ours: theirs for theirs, ours in _STRATEGIES.items()}


def pack_weight(weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """The packed form of a weight, at its nearest codes under absmax scales.

    Args:
        weight: [out, in] finite values in float16, bfloat16 or float32.
        scheme: granularity tensor, row or group.

    Returns:
        "weight_packed", "weight_scale" and "weight_shape", as in the module's docstring.
    """
    values = weight.float()
    scale = weight_scale(values, scheme, scheme.format.scale_dtype(weight.dtype))
    return {
        "weight_packed": scheme.format.pack(weight_codes(values, scale, scheme)),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def unpack_weight(packed: Tensor, scale: Tensor, shape: Tensor, scheme: Scheme) -> Tensor:
    """Inverse of `pack_weight`: levels * scale, [out, in] or [experts, out, in], as `decode_codes` gives them."""
    sizes = shape.tolist()
    words = packed.reshape(-1, packed.shape[-1])
    codes = scheme.format.unpack(words, sizes[-1])
    return decode_codes(codes, scale.reshape(scheme.sharing.scale_shape(codes.shape)), scheme).reshape(sizes)


def weight_scale(values: Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> Tensor:
    """Absmax scale of a weight as it is stored: [out, in/g], [out, 1] or [1].

    Args:
        values: [out, in] finite floats.
        scheme: granularity tensor, row or group.
        dtype: dtype of the scale, as the format's `scale_dtype` gives it; that of `values` by default.
    """
    view, dim = scheme.sharing.view(values)
    scale = scheme.format.scale(view, dim, dtype or values.dtype)
    return scale.reshape(scheme.sharing.scale_shape(values.shape))


def weight_codes(values: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Codes int8 [rows, in] of some rows against their stored scale.

    Args:
        values: [rows, in]; float32 is fastest.
        scale: stored scale of these rows, as `weight_scale` gives it.
    """
    view, _ = scheme.sharing.view(values)
    wide = scale.to(torch.promote_types(values.dtype, torch.float32))
    return scheme.format.codes(view, scheme.sharing.spread(wide)).reshape(values.shape)


def decode_codes(codes: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """levels * scale of codes [rows, in] and their stored scale, in float32 (float64 for such a scale).

    Products of codes and 16-bit scales are exact there. A reader that runs in a half type, as transformers does,
    multiplies in that: the same numbers, once rounded.
    """
    view, _ = scheme.sharing.view(codes)
    wide = scale.to(torch.promote_types(scale.dtype, torch.float32))
    return scheme.format.decode(view, scheme.sharing.spread(wide)).reshape(codes.shape)


def packed_shapes(shape: tuple[int, ...], scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """Shapes of the three tensors of a packed weight [out, in] or [experts, out, in], by the suffix of their names."""
    *rows, width = shape
    packed = (*rows, scheme.format.stored_width(width))
    return {PACKED: packed, SCALE: scheme.sharing.scale_shape(shape), SHAPE: (len(shape),)}


def quantization_config(schemes: Mapping[str, Scheme], linears: Iterable[str]) -> dict[str, Any]:
    """The entry `quantization_config` of config.json.

    Args:
        schemes: scheme of each packed module by name.
        linears: every Linear of the model by module name, packed or not.
    """
    unpacked = [name for name in linears if name not in schemes]
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    plain = len(groups) == 1 and set(schemes) <= set(linears)
    # A name that other readers do not know stands where all of them look first.
    own = [scheme.format.layout for scheme in groups if not scheme.format.is_standard]
    return {
        "quant_method": "compressed-tensors",
        "format": own[0] if own else PACK_QUANTIZED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if plain else name_patterns(names),
                "weights": _weights_entry(scheme),
                **({"format": scheme.format.layout} if own else {}),
            }
            for i, (scheme, names) in enumerate(groups.items())
        },
        "ignore": name_patterns(unpacked),
        "version": _LAYOUT_VERSION,
    }


def packed_modules(tensors: Iterable[str]) -> list[str]:
    """Modules whose weight is stored packed."""
    return [name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)]


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
                f"config.json has no quantization_config, yet the weights of {', '.join(modules)} are packed"
            )
        return {}
    groups = _checked_groups(entry)
    schemes = {module: _scheme_of(module, groups) for module in modules}
    uncovered = [module for module, scheme in schemes.items() if scheme is None]
    if uncovered:
        raise CheckpointError(f"no group of quantization_config covers the packed weights of {', '.join(uncovered)}")
    return {module: scheme for module, scheme in schemes.items() if scheme is not None}


def name_patterns(names: Iterable[str]) -> list[str]:
    """Module names as compressed-tensors targets; names that differ in the layer's number become one expression."""
    layers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = re.fullmatch(r"(.*\.layers)\.(\d+)\.(.+)", name)
        key = (match[1], match[3]) if match else (name, "")
        layers.setdefault(key, []).append(match[2] if match else "")
    return [
        f"re:{re.escape(stem)}\\.{_alternatives(numbers)}\\.{re.escape(tail)}$" if tail else stem
        for (stem, tail), numbers in layers.items()
    ]


def _alternatives(numbers: list[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"


def _weights_entry(scheme: Scheme) -> dict[str, Any]:
    return {
        **scheme.format.description,
        "strategy": _STRATEGY_OF[scheme.granularity],
        "group_size": scheme.size,
        "dynamic": False,
    }


def _checked_groups(entry: Any) -> dict[str, Scheme]:
    """Scheme of each target of `quantization_config`.

    Raises:
        CheckpointError: something in the entry is not read; all of it is named.
    """
    if not isinstance(entry, Mapping) or entry.get("quant_method") != "compressed-tensors":
        method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
        raise CheckpointError(
            f"this checkpoint is quantized by {method!r}; read are 16-bit checkpoints and compressed-tensors "
            f"{PACK_QUANTIZED}"
        )
    layout = entry.get("format")
    problems = [] if _in_layout(layout) else [f"its format is {layout!r}"]
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
            f"{PACK_QUANTIZED} with symmetric integer weights of 2 to 8 bits per tensor, channel or group"
        )
    return targets


def _in_layout(layout: object) -> list[NumberFormat]:
    """The number formats that are stored in a layout."""
    return [each for each in FORMATS.values() if each.quantizes and each.layout == layout]


def _format_of(group: Mapping[str, Any], layout: object) -> NumberFormat | None:
    """The number format of a config group, whose own layout goes before the folder's; None for an unknown one."""
    weights = {"type": "int", "symmetric": True, **group["weights"]}
    formats = _in_layout(group.get("format") or layout)
    return next((each for each in formats if each.description.items() <= weights.items()), None)


def _group_problems(group: Any, layout: object) -> list[str]:
    """The problems of a config group: what it asks for that is not read."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return ["does not quantize weights"]
    problems = []
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        problems.append("has no list of targets")
    own = group.get("format") or layout
    if not (formats := _in_layout(own)):
        problems += [f"has format {own!r}"] if own != layout else []
    elif _format_of(group, layout) is None:
        problems += _unknown_codes(weights, formats)
    if not isinstance(weights.get("strategy"), str) or weights["strategy"] not in _STRATEGIES:
        problems.append(f"has strategy {weights.get('strategy')!r}")
    size = weights.get("group_size")
    if weights.get("strategy") == "group" and (type(size) is not int or size < 1):
        problems.append("has no group_size" if size is None else f"has group_size {size!r}")
    if weights.get("actorder") == "group":
        problems.append("reorders columns (actorder)")
    if group.get("input_activations") or group.get("output_activations"):
        problems.append("quantizes activations")
    return problems


def _unknown_codes(weights: Mapping[str, Any], formats: list[NumberFormat]) -> list[str]:
    """What of a group's weights none of its layout's number formats has."""
    problems = []
    if weights.get("type", "int") not in [each.description["type"] for each in formats]:
        problems.append(f"has {weights.get('type', 'int')} codes")
    if not weights.get("symmetric", True):
        problems.append("is asymmetric")
    if weights.get("num_bits") not in [each.description.get("num_bits") for each in formats]:
        problems.append(f"has {weights.get('num_bits')!r} bits")
    return problems


def _scheme(number_format: NumberFormat, weights: Mapping[str, Any]) -> Scheme:
    granularity = _STRATEGIES[weights["strategy"]]
    return Scheme(number_format, Sharing(granularity, weights["group_size"] if granularity == "group" else None))


def _scheme_of(module: str, targets: Mapping[str, Scheme]) -> Scheme | None:
    """The scheme that compressed-tensors picks: by an exact name, else a regular expression, else the class."""
    if module in targets:
        return targets[module]
    for target, scheme in targets.items():
        if target.startswith("re:") and _matches(target.removeprefix("re:"), module):
            return scheme
    return targets.get("Linear")


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except (re.error, RecursionError) as error:
        raise CheckpointError(f"config.json: target {pattern!r} is no regular expression: {error}") from error
