"""Linear layers y = x · Wᵀ + bias with a packed weight: choice of a kernel, and the operator for torch.compile."""

from typing import Any

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.kernels.arguments import HALF_TYPES
from diffquant.kernels.gpu import device_refusal, warpgroup_refusal
from diffquant.kernels.linear.repack import PackedWeight, dequantize_weight

# For more tokens than this, dequantizing W to memory for the library's matmul is faster; the smaller limit is for
# Hopper without warpgroup products. Both are estimates from bytes and arithmetic.
_MOST_TOKENS, _MOST_TOKENS_BY_WARPS = 1024, 256


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute the product x · Wᵀ + bias [..., N] in x's dtype, summed in float32.

    Where the Triton kernels do not support x, and for many tokens, W is dequantized first.

    Args:
        x: activations [..., K].
        weight: packed weight [N, K] on x's device, its group scales in x's dtype.
        bias: bias [N] in x's dtype.

    Raises:
        UsageError: arguments disagree.
    """
    _check(x, weight, bias)
    if not torch.compiler.is_compiling():
        # The torch operator is called only while tracing, since its overhead is longer than a launch.
        return _apply(x, weight, bias)
    parts = weight.low, weight.high, weight.scales, weight.row_scale
    y: Tensor = packed_linear(x, *parts, bias, weight.bits, weight.group, weight.shape[0])
    return y


@torch.library.custom_op("diffquant::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor,
    low: Tensor,
    high: Tensor | None,
    scales: Tensor | None,
    row_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    group: int,
    rows: int,
) -> Tensor:
    """Compute x · Wᵀ + bias as a torch operator: `linear` with the attributes of a `PackedWeight` as arguments.

    `rows` is N, the number of rows of W.
    """
    weight = PackedWeight(low, high, scales, row_scale, bits, group, (rows, x.shape[-1]))
    return _apply(x, weight, bias)


@packed_linear.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], rest[-1])


def _apply(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    rows, width = weight.shape
    if x.dtype not in HALF_TYPES or device_refusal(x.device):
        return torch.nn.functional.linear(x, dequantize_weight(weight, x.dtype), bias)
    flat = x.reshape(-1, width)
    if len(flat) > _most_unpacked(x.device):
        return torch.nn.functional.linear(x, _write_out(weight, x.dtype), bias)
    return launch_matmul(flat, weight, bias).view(*x.shape[:-1], rows)


def launch_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Compute x · Wᵀ + bias [M, N] of x [M, K] by the GEMV kernel, or for many tokens M by the GEMM kernel."""
    from diffquant.kernels.linear.gemm import launch_gemm
    from diffquant.kernels.linear.gemv import MOST_TOKENS, launch_gemv

    if len(x) == 0:
        return x.new_empty(0, weight.shape[0])
    x = x if x.stride(1) == 1 else x.contiguous()
    # Triton launches on the current device, which may not be x's.
    with torch.cuda.device_of(x):
        return (launch_gemv if len(x) <= MOST_TOKENS else launch_gemm)(x, weight, bias)


def _most_unpacked(device: torch.device) -> int:
    """Return the largest number of tokens for which weights are unpacked inside the kernel."""
    return _MOST_TOKENS_BY_WARPS if warpgroup_refusal(device) else _MOST_TOKENS


def _write_out(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    from diffquant.kernels.linear.gemm import launch_dequantize

    with torch.cuda.device_of(weight.low):
        return launch_dequantize(weight, dtype)


def _check(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    rows, width = weight.shape
    problems = []
    if x.dim() == 0 or x.shape[-1] != width:
        problems.append(f"x is {list(x.shape)}, not [..., {width}]")
    if weight.scales is not None and not weight.has_float_codes and weight.scales.dtype != x.dtype:
        problems.append(f"x is {x.dtype} and the weight's scales are {weight.scales.dtype}")
    if bias is not None and (bias.shape != (rows,) or bias.dtype != x.dtype):
        problems.append(f"bias is {bias.dtype} {list(bias.shape)}, not {x.dtype} [{rows}]")
    placed = {"weight": weight.low, "bias": bias}
    problems += [
        f"{n} is on {t.device}, x on {x.device}" for n, t in placed.items() if t is not None and t.device != x.device
    ]
    if problems:
        raise UsageError(f"linear with a packed weight {[rows, width]}: {'; '.join(problems)}")
