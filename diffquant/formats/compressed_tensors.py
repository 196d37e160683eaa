"""Packed weights as compressed-tensors stores them: packed codes and scales, and their entry in config.json.

A Linear at prefix P is stored as P.weight_packed ([out, words of in codes], int32 for integers),
P.weight_scale ([out, in/g], [out, 1], [1] or, for blocks of floats, [⌈out/b⌉, ⌈in/b⌉], in 16 bits) and P.weight_shape
(int64 [2]).
Experts in one tensor [experts, out, in] have a leading axis more in the first two, and weight_shape [3].
Codes are computed against the scale as stored, after its rounding to a half type.

Integers are compressed-tensors' pack-quantized. Its layouts of floats have no weight_shape, and floats of eight bits
are P.weight itself; scales are of the dtype that the number format says, and nvfp4's have P.weight_global_scale
(float32 [1]) beside them. A number format that compressed-tensors does not have is stored likewise under a layout's
name of ours, which its readers refuse.

Source: compressed-tensors 0.20, compressors.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.formats.reader import TensorInfo
from diffquant.numbers.formats import FORMATS, NumberFormat
from diffquant.numbers.formats.integer import PACK_QUANTIZED
from diffquant.numbers.sharing import Sharing
from diffquant.scheme import Scheme

PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
# Codes that are a weight in a dtype of eight bits, and what all scales of a weight are divided by.
NATIVE, GLOBAL = ".weight", ".weight_global_scale"
# The folder's format where its groups have several.
_MIXED = "mixed-precision"

# The version whose layout this is; from 0.17 on 6-bit codes are dense.
_LAYOUT_VERSION = "0.20.0"
_T = TypeVar("_T")
_STRATEGIES = {"group": "group", "tensor_group": "group", "channel": "row", "tensor": "tensor", "block": "block"}


def pack_weight(weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """The packed form of a weight, at its nearest codes under absmax scales.

    Args:
        weight: [out, in] finite values in float16, bfloat16 or float32.
        scheme: granularity tensor, row or group.

    Returns:
        The tensors by their names in the module, "weight_packed" and others, as in the module's docstring.
    """
    values = weight.float()
    scheme = scheme.bound_to(values.abs().amax())
    scale = weight_scale(values, scheme, scheme.format.scale_dtype(weight.dtype))
    parts = packed_rows(weight_codes(values, scale, scheme), scale, scheme) | packed_once(tuple(weight.shape), scheme)
    return {suffix.removeprefix("."): part for suffix, part in parts.items()}


def packed_rows(codes: Tensor, scale: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """Codes int8 [rows, in] and their scale as they are stored, by the suffix of their names."""
    number_format = scheme.format
    scales = number_format.pack_scale(scale)
    if scales.dtype == torch.uint8:
        scales = scales.view(number_format.stored_scale_dtype(scale.dtype))
    return {codes_suffix(scheme): number_format.pack(codes).view(number_format.file_dtype), SCALE: scales}


def packed_once(shape: tuple[int, ...], scheme: Scheme) -> dict[str, Tensor]:
    """Tensors stored once for a weight whose scheme is bound to it, by the suffix of their names."""
    shapes = {SHAPE: torch.tensor(shape, dtype=torch.int64)} if scheme.format.stores_shape else {}
    tensor_scale = scheme.format.tensor_scale
    return shapes if tensor_scale is None else shapes | {GLOBAL: tensor_scale}


def codes_suffix(scheme: Scheme) -> str:
    """The suffix of the tensor that holds a weight's codes."""
    return NATIVE if scheme.format.is_native else PACKED


def unpack_weight(packed: Tensor, scale: Tensor, shape: Tensor, scheme: Scheme) -> Tensor:
    """Weight of its codes, scales and shape as they are stored, where no scale of the tensor stands beside them."""
    return unpack_parts({codes_suffix(scheme): packed, SCALE: scale}, shape.tolist(), scheme)


def unpack_parts(parts: Mapping[str, Tensor], shape: Sequence[int], scheme: Scheme) -> Tensor:
    """Inverse of `pack_weight`: levels * scale, [out, in] or [experts, out, in], as `decode_codes` gives them.

    Args:
        parts: the stored tensors by the suffix of their names.
        shape: the weight's.
    """
    packed = parts[codes_suffix(scheme)]
    codes = scheme.format.unpack(packed.reshape(-1, packed.shape[-1]), shape[-1])
    scale = scheme.format.unpack_scale(parts[SCALE], parts.get(GLOBAL))
    return decode_codes(codes, scale.reshape(scheme.sharing.scale_shape(codes.shape)), scheme).reshape(*shape)


def weight_scale(values: Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> Tensor:
    """Absmax scale of a weight as it is stored: [out, in/g], [out, 1], [1] or, of blocks, [⌈out/b⌉, ⌈in/b⌉].

    Args:
        values: [out, in] finite floats.
        scheme: granularity tensor, row, group or block.
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
    return scheme.sharing.unviewed(scheme.format.codes(view, scheme.sharing.spread(wide)), values.shape)


def decode_codes(codes: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """levels * scale of codes [rows, in] and their stored scale, in float32 (float64 for such a scale).

    Products of codes and 16-bit scales are exact there. A reader that runs in a half type, as transformers does,
    multiplies in that: the same numbers, once rounded.
    """
    view, _ = scheme.sharing.view(codes)
    wide = scale.to(torch.promote_types(scale.dtype, torch.float32))
    return scheme.sharing.unviewed(scheme.format.decode(view, scheme.sharing.spread(wide)), codes.shape)


def packed_shapes(shape: tuple[int, ...], scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a packed weight [out, in] or [experts, out, in], by the suffix of their names."""
    *rows, width = shape
    packed = (*rows, scheme.format.stored_width(width))
    shapes = {codes_suffix(scheme): packed, SCALE: scheme.sharing.scale_shape(shape)}
    if scheme.format.spans_tensor:
        shapes[GLOBAL] = (1,)
    return shapes | ({SHAPE: (len(shape),)} if scheme.format.stores_shape else {})


def packed_types(scheme: Scheme, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtypes of the tensors of a packed weight that would be stored in `dtype`, by the suffix of their names."""
    types = {codes_suffix(scheme): scheme.format.file_dtype, SCALE: scheme.format.stored_scale_dtype(dtype)}
    if scheme.format.spans_tensor:
        types[GLOBAL] = torch.float32
    return types | ({SHAPE: torch.int64} if scheme.format.stores_shape else {})


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
        "ignore": name_patterns(unpacked),
        "version": _LAYOUT_VERSION,
    }


def packed_modules(tensors: Mapping[str, TensorInfo | Tensor]) -> list[str]:
    """Modules whose weight is stored packed, or as floats of eight bits with a scale beside them."""
    return [
        name.removesuffix(suffix)
        for name, info in tensors.items()
        for suffix in (PACKED, NATIVE)
        if name.endswith(suffix) and (suffix == PACKED or _is_native(name.removesuffix(suffix), info.dtype, tensors))
    ]


def _is_native(module: str, dtype: torch.dtype, tensors: Container[str]) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1 and module + SCALE in tensors


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
    schemes = {module: target_of(module, groups) for module in modules}
    uncovered = [module for module, scheme in schemes.items() if scheme is None]
    if uncovered:
        raise CheckpointError(f"no group of quantization_config covers the packed weights of {', '.join(uncovered)}")
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
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
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
    if weights.get("actorder") == "group":
        problems.append("reorders columns (actorder)")
    if group.get("input_activations") or group.get("output_activations"):
        problems.append("quantizes activations")
    return problems


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


def target_of(module: str, targets: Mapping[str, _T]) -> _T | None:
    """The entry that compressed-tensors picks for a module: by exact name, else regular expression, else class."""
    if module in targets:
        return targets[module]
    for target, chosen in targets.items():
        if target.startswith("re:") and _matches(target.removeprefix("re:"), module):
            return chosen
    return targets.get("Linear")


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except (re.error, RecursionError) as error:
        raise CheckpointError(f"config.json: target {pattern!r} is not a regular expression: {error}") from error
