"""The pack-quantized format of compressed-tensors: packed codes and scales, and their entry in config.json.

A Linear at prefix P is stored as P.weight_packed (int32 [out, packed_words(in, bits)]),
P.weight_scale ([out, in/g], [out, 1] or [1], in 16 bits) and P.weight_shape (int64 [2]).
Experts in one tensor [experts, out, in] have a leading axis more in the first two, and weight_shape [3].
Codes are computed against the scale as stored, after its rounding to a half type.

Source: compressed-tensors 0.20, compressors/pack_quantized.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.numbers import absmax_scale, pack, packed_words, quantize, sharing_view, unpack
from diffquant.scheme import Scheme

PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
FORMAT = "pack-quantized"

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
    scale = weight_scale(values, scheme, scale_dtype(weight.dtype))
    return {
        "weight_packed": pack(weight_codes(values, scale, scheme), scheme.bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def unpack_weight(packed: Tensor, scale: Tensor, shape: Tensor, scheme: Scheme) -> Tensor:
    """Inverse of `pack_weight`: codes * scale, [out, in] or [experts, out, in], as `decode_codes` gives them."""
    sizes = shape.tolist()
    words = packed.reshape(-1, packed.shape[-1])
    scale = scale if scheme.granularity == "tensor" else scale.reshape(-1, scale.shape[-1])
    return decode_codes(unpack(words, scheme.bits, sizes[-1]), scale, scheme).reshape(sizes)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which scales are stored of a weight that would itself be stored in `dtype`: 16 bits in any case.

    A half type is its own. For wider types it is bfloat16, which has float32's range, so that no scale is lost, and
    whose numbers float16 and float32 hold exactly: readers turn scales into the dtype in which they run.
    """
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def weight_scale(values: Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> Tensor:
    """Absmax scale of a weight as it is stored: [out, in/g], [out, 1] or [1].

    Args:
        values: [out, in] finite floats.
        scheme: granularity tensor, row or group.
        dtype: dtype of the scale, as `scale_dtype` gives it; that of `values` by default.
    """
    view, dim = sharing_view(values, scheme.granularity, scheme.size)
    scale = absmax_scale(view, scheme.bits, dim, dtype or values.dtype)
    return scale.reshape(1) if scheme.granularity == "tensor" else scale.reshape(len(values), -1)


def weight_codes(values: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Codes int8 [rows, in] of some rows against their stored scale.

    Args:
        values: [rows, in]; float32 is fastest.
        scale: stored scale of these rows, as `weight_scale` gives it.
    """
    view, _ = sharing_view(values, scheme.granularity, scheme.size)
    wide = scale.to(torch.promote_types(values.dtype, torch.float32))
    return quantize(view, _spread(wide, scheme), scheme.bits).reshape(values.shape)


def decode_codes(codes: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """codes * scale of codes [rows, in] and their stored scale, in float32 (float64 for such a scale).

    Products of codes and 16-bit scales are exact there. A reader that runs in a half type, as transformers does,
    multiplies in that: the same numbers, once rounded.
    """
    view, _ = sharing_view(codes, scheme.granularity, scheme.size)
    wide = scale.to(torch.promote_types(scale.dtype, torch.float32))
    return (view * _spread(wide, scheme)).reshape(codes.shape)


def packed_shapes(shape: tuple[int, ...], scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """Shapes of the three tensors of a packed weight [out, in] or [experts, out, in], by the suffix of their names."""
    *rows, width = shape
    per_row = {"group": (*rows, width // (scheme.size or width)), "row": (*rows, 1), "tensor": (1,)}
    return {PACKED: (*rows, packed_words(width, scheme.bits)), SCALE: per_row[scheme.granularity], SHAPE: (len(shape),)}


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
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {"targets": ["Linear"] if plain else name_patterns(names), "weights": _weights_entry(scheme)}
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


def _spread(scale: Tensor, scheme: Scheme) -> Tensor:
    """The stored scale in a shape that broadcasts to the sharing view."""
    return scale.unsqueeze(-1) if scheme.granularity == "group" else scale


def _weights_entry(scheme: Scheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
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
            f"this checkpoint is quantized by {method!r}; read are 16-bit checkpoints and compressed-tensors {FORMAT}"
        )
    problems = [f"its format is {entry.get('format')!r}"] if entry.get("format") != FORMAT else []
    if entry.get("kv_cache_scheme"):
        problems.append("it has a kv_cache_scheme")
    targets: dict[str, Scheme] = {}
    groups = entry.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError("config.json: config_groups of quantization_config must be a mapping")
    for name, group in groups.items():
        group_problems = _group_problems(group)
        problems += [f"{name} {problem}" for problem in group_problems]
        if not group_problems:
            targets |= dict.fromkeys(group["targets"], _scheme(group["weights"]))
    if problems:
        raise CheckpointError(
            f"this checkpoint's quantization_config is not read: {'; '.join(problems)}; read is compressed-tensors "
            f"{FORMAT} with symmetric integer weights of 2 to 8 bits per tensor, channel or group"
        )
    return targets


def _group_problems(group: Any) -> list[str]:
    """The problems of a config group: what it asks for that is not read."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return ["does not quantize weights"]
    problems = []
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        problems.append("has no list of targets")
    if weights.get("type", "int") != "int":
        problems.append(f"has {weights['type']} codes")
    if not weights.get("symmetric", True):
        problems.append("is asymmetric")
    if not isinstance(weights.get("strategy"), str) or weights["strategy"] not in _STRATEGIES:
        problems.append(f"has strategy {weights.get('strategy')!r}")
    if type(weights.get("num_bits")) is not int or weights["num_bits"] not in range(2, 9):
        problems.append(f"has {weights.get('num_bits')!r} bits")
    size = weights.get("group_size")
    if weights.get("strategy") == "group" and (type(size) is not int or size < 1):
        problems.append("has no group_size" if size is None else f"has group_size {size!r}")
    if weights.get("actorder") == "group":
        problems.append("reorders columns (actorder)")
    if group.get("input_activations") or group.get("output_activations"):
        problems.append("quantizes activations")
    if group.get("format") not in (None, FORMAT):
        problems.append(f"has format {group['format']!r}")
    return problems


def _scheme(weights: Mapping[str, Any]) -> Scheme:
    granularity = _STRATEGIES[weights["strategy"]]
    return Scheme(weights["num_bits"], granularity, weights["group_size"] if granularity == "group" else None)


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
