"""Packed weights as compressed-tensors stores them: tensors of codes and scales.

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

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from diffquant.formats.reader import TensorInfo
from diffquant.scheme import Scheme

PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
# Codes that are a weight in a dtype of eight bits, and what all scales of a weight are divided by.
NATIVE, GLOBAL = ".weight", ".weight_global_scale"


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
