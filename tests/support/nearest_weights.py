"""A weight quantized by the simplest rule, in a checkpoint's tensors; shared by tests and the research's deltas."""

from torch import Tensor

from diffquant.checkpoints.compressed_tensors import make_shape_and_scale, pack_rows, weight_codes, weight_scale
from diffquant.recipe.scheme import Scheme


def pack_weight(weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """Quantize a weight by rounding to nearest with absmax scales, and pack its codes.

    Args:
        weight: [out, in] finite values in float16, bfloat16 or float32.
        scheme: granularity tensor, row or group.

    Returns:
        The tensors by their names in the module, "weight_packed" and others.
    """
    values = weight.float()
    scheme = scheme.with_tensor_scale(values.abs().amax())
    scale = weight_scale(values, scheme, scheme.format.scale_dtype(weight.dtype))
    parts = pack_rows(weight_codes(values, scale, scheme), scale, scheme) | make_shape_and_scale(
        tuple(weight.shape), scheme
    )
    return {suffix.removeprefix("."): part for suffix, part in parts.items()}
