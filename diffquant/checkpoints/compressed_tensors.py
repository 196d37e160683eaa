"""Packed weights as compressed-tensors stores them: tensors of codes and scales.

A Linear at prefix P is stored as P.weight_packed ([out, w], with a row's `in` codes in w words, int32 for integers),
P.weight_scale ([out, in/g], [out, 1], [1] or, for blocks of floats, [⌈out/b⌉, ⌈in/b⌉], in 16 bits) and P.weight_shape
(int64 [2]).
For experts in one tensor [experts, out, in], the first two have a leading axis of experts, and weight_shape is [3].
Codes are computed with the stored scale, that is, after the scale was rounded to float16 or bfloat16.

Integers use compressed-tensors' layout pack-quantized. Its float layouts have no weight_shape, and 8-bit floats are
stored as P.weight, as are 8-bit integers of Linears with rounded inputs (int-quantized). The number format determines
the dtype of the scales; nvfp4 also has P.weight_global_scale (float32 [1]). Number formats that compressed-tensors
lacks are stored in the same tensors, under a layout name of diffquant's, which compressed-tensors refuses.

Where config.json has a `kv_cache_scheme`, attention has the scales of a calibrated float cache: self_attn.k_scale and
v_scale, one for a layer's keys and one for its values. A scale is a power of two, so that quotients are exact in every
dtype.

Source: compressed-tensors 0.20, compressors.
"""

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_config import has_own_kv_cache_scheme
from diffquant.checkpoints.reader import Checkpoint, TensorInfo
from diffquant.errors import CheckpointError
from diffquant.model.adapters import Adapter
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.scheme import Scheme

PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
# Suffixes of codes in an 8-bit dtype, and of the number by which all scales of a weight are divided.
NATIVE, GLOBAL = ".weight", ".weight_global_scale"
# Divisor of the block scales of rounded inputs in nvfp4; it is always 1, since no calibration data is read for it.
INPUT_GLOBAL = ".input_global_scale"


def pack_rows(codes: Tensor, scale: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors to store for codes int8 [rows, in] and their scale, by the suffix of their names."""
    number_format = scheme.format
    scales = number_format.pack_scale(scale)
    if scales.dtype == torch.uint8:
        scales = scales.view(number_format.stored_scale_dtype(scale.dtype))
    return {codes_suffix(scheme): number_format.pack(codes).view(number_format.file_dtype), SCALE: scales}


def make_shape_and_scale(shape: tuple[int, ...], scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors that are stored once per weight (shape, tensor scale), by the suffix of their names."""
    shapes = {SHAPE: torch.tensor(shape, dtype=torch.int64)} if scheme.format.has_stored_shape else {}
    tensor_scale = scheme.format.tensor_scale
    return shapes if tensor_scale is None else shapes | {GLOBAL: tensor_scale}


def codes_suffix(scheme: Scheme) -> str:
    """Return the suffix of the tensor that holds a weight's codes."""
    return NATIVE if scheme.format.is_native else PACKED


def unpack_weight(packed: Tensor, scale: Tensor, shape: Tensor, scheme: Scheme) -> Tensor:
    """Dequantize a weight without a tensor scale from its stored codes, scales and shape."""
    return unpack_parts({codes_suffix(scheme): packed, SCALE: scale}, shape.tolist(), scheme)


def unpack_parts(parts: Mapping[str, Tensor], shape: Sequence[int], scheme: Scheme) -> Tensor:
    """Dequantize a weight [out, in] or [experts, out, in].

    Args:
        parts: the stored tensors by the suffix of their names.
        shape: shape of the weight.
    """
    packed = parts[codes_suffix(scheme)]
    codes = scheme.format.unpack(packed.reshape(-1, packed.shape[-1]), shape[-1])
    scale = scheme.format.unpack_scale(parts[SCALE], parts.get(GLOBAL))
    return decode_codes(codes, scale.reshape(scheme.sharing.scale_shape(codes.shape)), scheme).reshape(*shape)


def weight_scale(values: Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the stored absmax scales of a weight.

    Their shape is [out, in/g] for groups of g values, [⌈out/b⌉, ⌈in/b⌉] for blocks of b x b values, [out, 1] for rows,
    and [1] for a tensor.

    Args:
        values: [out, in] finite floats.
        scheme: granularity tensor, row, group or block.
        dtype: dtype of the scale, from the format's `scale_dtype`; by default that of `values`.
    """
    view, dim = scheme.sharing.view(values)
    scale = scheme.format.compute_scale(view, dim, dtype or values.dtype)
    return scale.reshape(scheme.sharing.scale_shape(values.shape))


def weight_codes(values: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Compute the codes int8 [rows, in] of some rows under their stored scale.

    Args:
        values: [rows, in]; float32 is fastest.
        scale: stored scale of these rows, from `weight_scale`.
    """
    view, _ = scheme.sharing.view(values)
    wide = scale.to(torch.promote_types(values.dtype, torch.float32))
    return scheme.sharing.undo_view(scheme.format.encode(view, scheme.sharing.reshape_scale(wide)), values.shape)


def decode_codes(codes: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Dequantize codes [rows, in] with their stored scale; the result is float32, or float64 if the scale is float64.

    Products of codes and 16-bit scales are exact in float32. A reader that runs in float16 or bfloat16, as transformers
    does, multiplies in that dtype: the same numbers, rounded once.
    """
    view, _ = scheme.sharing.view(codes)
    wide = scale.to(torch.promote_types(scale.dtype, torch.float32))
    return scheme.sharing.undo_view(scheme.format.decode(view, scheme.sharing.reshape_scale(wide)), codes.shape)


def packed_shapes(shape: tuple[int, ...], scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that store a packed weight, by the suffix of their names.

    Args:
        shape: [out, in] or [experts, out, in], the shape of the weight.
    """
    *rows, width = shape
    packed = (*rows, scheme.format.packed_width(width))
    shapes = {codes_suffix(scheme): packed, SCALE: scheme.sharing.scale_shape(shape)}
    if scheme.format.spans_tensor:
        shapes[GLOBAL] = (1,)
    return shapes | ({SHAPE: (len(shape),)} if scheme.format.has_stored_shape else {})


def packed_dtypes(scheme: Scheme, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors that store a packed weight, by the suffix of their names.

    Args:
        dtype: dtype of the unpacked weight.
    """
    types = {codes_suffix(scheme): scheme.format.file_dtype, SCALE: scheme.format.stored_scale_dtype(dtype)}
    if scheme.format.spans_tensor:
        types[GLOBAL] = torch.float32
    return types | ({SHAPE: torch.int64} if scheme.format.has_stored_shape else {})


def list_packed_modules(tensors: Mapping[str, TensorInfo | Tensor]) -> list[str]:
    """List modules whose weight is stored packed, or as 8-bit floats or integers with a scale."""
    return [
        name.removesuffix(suffix)
        for name, info in tensors.items()
        for suffix in (PACKED, NATIVE)
        if name.endswith(suffix) and (suffix == PACKED or _is_native(name.removesuffix(suffix), info.dtype, tensors))
    ]


def _is_native(module: str, dtype: torch.dtype, tensors: Container[str]) -> bool:
    return dtype.itemsize == 1 and dtype.is_signed and module + SCALE in tensors


_CACHE = Scheme.parse("e4m3:static")
_LARGEST = format_named("e4m3").largest


def can_engines_use_cache(recipe: Recipe) -> bool:
    """Return whether engines can use a recipe's cache: `e4m3:static` for all keys and values, and no residual."""
    return recipe.schemes_of("k") == recipe.schemes_of("v") == {_CACHE} and not recipe.residual


def scale_names(adapter: Adapter) -> dict[str, str]:
    """Return the tensor names of a checkpoint's cache scales, by name of the calibrated range, such as "layers.0.k"."""
    layers = range(adapter.architecture.num_hidden_layers)
    modules = {n: adapter.source_name(f"model.layers.{n}.self_attn.k_proj.weight").rsplit(".", 2)[0] for n in layers}
    return {f"layers.{n}.{target}": f"{modules[n]}.{target}_scale" for n in layers for target in ("k", "v")}


def compute_scales(adapter: Adapter, ranges: Mapping[str, Tensor]) -> dict[str, float]:
    """Return cache scales for calibrated ranges, by tensor name: the least power of two not below largest / 448."""
    names = scale_names(adapter)
    exponents = {names[key]: torch.log2(tensor.max().double() / _LARGEST).ceil() for key, tensor in ranges.items()}
    return {name: float(2.0**exponent) for name, exponent in exponents.items()}


def read_stored_ranges(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, Tensor]:
    """Return the calibrated ranges that follow from a checkpoint's cache scales; empty if it has no such scales.

    Raises:
        CheckpointError: a scale is not finite and above zero.
    """
    if not has_own_kv_cache_scheme(checkpoint.config):
        return {}
    rows, ranges = adapter.architecture.cached_shapes, dict[str, Tensor]()
    for key, name in scale_names(adapter).items():
        scale = checkpoint.read(name).float()
        if not bool(torch.isfinite(scale) & (scale > 0)):
            raise CheckpointError(f"{checkpoint.path}: {name} is {scale.item()}; a scale must be a number above zero")
        _, layer, target = key.split(".")
        shape = rows[int(layer)].keys if target == "k" else rows[int(layer)].values
        ranges[key] = (scale * _LARGEST).expand(shape)
    return ranges
