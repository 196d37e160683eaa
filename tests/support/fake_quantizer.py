"""Quantization and its inverse in one step, as the expected value of what caches and logits compute."""

from torch import Tensor

from diffquant.numbers import absmax_scale, dequantize, quantize, sharing_view


def fake_quantize(x: Tensor, bits: int, granularity: str, size: int | None = None) -> Tensor:
    """x [..., rows, columns] read back from codes of `bits`, in its own dtype; see `sharing_view` for the rest."""
    view, dim = sharing_view(x, granularity, size)
    scale = absmax_scale(view, bits, dim)
    return dequantize(quantize(view, scale, bits), scale).to(x.dtype).reshape(x.shape)
