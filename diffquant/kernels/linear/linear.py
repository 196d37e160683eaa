"""Linear layers y = x · Wᵀ + bias with a packed weight: the choice of a backend, and the op torch.compile sees."""

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.kernels.arguments import HALF_TYPES
from diffquant.kernels.gpu import device_refusal, unpacked_product_refusal
from diffquant.kernels.linear.repack import PackedWeight, dequantize_weight

BACKENDS = ("auto", "triton", "dequantize")
# More tokens than this repay writing W out once for the library's matmul: an estimate, from bytes and arithmetic.
_MOST_TOKENS = 1024


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Product x · Wᵀ + bias [..., N] in x's dtype, summed in float32.

    Args:
        x: activations [..., K].
        weight: packed weight [N, K] on x's device, its group scales in x's dtype.
        bias: bias [N] in x's dtype.
        backend: name of a backend: "triton" unpacks the weight inside its kernels; "dequantize" writes it out first
            and is what other devices than CUDA and float32 have; "auto" takes whichever serves.

    Raises:
        UsageError: arguments disagree, or the backend is unknown or refuses them.
    """
    _check(x, weight, bias, backend)
    if backend == "triton" and (reason := linear_refusal(x)):
        raise UsageError(f"linear backend 'triton': {reason}; use auto")
    if not torch.compiler.is_compiling():
        # The op's bookkeeping takes longer than a launch; only a trace needs it.
        return _apply(x, weight, bias, backend)
    parts = weight.low, weight.high, weight.scales, weight.row_scale
    y: Tensor = packed_linear(x, *parts, bias, weight.bits, weight.group, weight.shape[0], backend)
    return y


def linear_refusal(x: Tensor) -> str | None:
    """Reason why the Triton kernels cannot serve these activations, or None."""
    if x.dtype not in HALF_TYPES:
        return f"x is {x.dtype}; the kernels take float16 and bfloat16"
    return device_refusal(x.device)


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
    backend: str,
) -> Tensor:
    """Product that `linear` computes, on the parts of a `PackedWeight`."""
    weight = PackedWeight(low, high, scales, row_scale, bits, group, (rows, x.shape[-1]))
    return _apply(x, weight, bias, backend)


@packed_linear.register_fake
def _(
    x: Tensor,
    low: Tensor,
    high: Tensor | None,
    scales: Tensor | None,
    row_scale: Tensor,
    bias: Tensor | None,
    bits: int,
    group: int,
    rows: int,
    backend: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _apply(x: Tensor, weight: PackedWeight, bias: Tensor | None, backend: str) -> Tensor:
    rows, width = weight.shape
    if backend == "dequantize" or linear_refusal(x) is not None:
        return torch.nn.functional.linear(x, dequantize_weight(weight, x.dtype), bias)
    flat = x.reshape(-1, width)
    if backend == "auto" and len(flat) > _most_unpacked(x.device):
        return torch.nn.functional.linear(x, _expanded(weight, x.dtype), bias)
    return launch(flat, weight, bias).view(*x.shape[:-1], rows)


def launch(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Product [M, N] of x [M, K] by the kernel for that many tokens.

    Raises:
        UsageError: Triton would compile the kernel for more tokens than a GEMV takes wrongly.
    """
    from diffquant.kernels.linear.gemm import launch_gemm
    from diffquant.kernels.linear.gemv import MOST_TOKENS, launch_gemv

    if len(x) == 0:
        return x.new_empty(0, weight.shape[0])
    if len(x) > MOST_TOKENS and (reason := unpacked_product_refusal(x.device)):
        raise UsageError(f"linear with {len(x)} tokens: {reason}; use auto, which writes the weight out first")
    x = x if x.stride(1) == 1 else x.contiguous()
    # Of several devices, Triton would launch on the current one.
    with torch.cuda.device_of(x):
        return (launch_gemv if len(x) <= MOST_TOKENS else launch_gemm)(x, weight, bias)


def _most_unpacked(device: torch.device) -> int:
    """Largest number of tokens whose product has its weights unpacked within the kernel."""
    from diffquant.kernels.linear.gemv import MOST_TOKENS

    return MOST_TOKENS if unpacked_product_refusal(device) else _MOST_TOKENS


def _expanded(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    from diffquant.kernels.linear.expand import launch_expand

    with torch.cuda.device_of(weight.low):
        return launch_expand(weight, dtype)


def _check(x: Tensor, weight: PackedWeight, bias: Tensor | None, backend: str) -> None:
    rows, width = weight.shape
    problems = []
    if backend not in BACKENDS:
        problems.append(f"unknown backend {backend!r}; known are {', '.join(BACKENDS)}")
    if x.dim() == 0 or x.shape[-1] != width:
        problems.append(f"x is {list(x.shape)}, not [..., {width}]")
    if weight.scales is not None and not weight.holds_floats and weight.scales.dtype != x.dtype:
        problems.append(f"x is {x.dtype} and the weight's scales are {weight.scales.dtype}")
    if bias is not None and (bias.shape != (rows,) or bias.dtype != x.dtype):
        problems.append(f"bias is {bias.dtype} {list(bias.shape)}, not {x.dtype} [{rows}]")
    placed = {"weight": weight.low, "bias": bias}
    problems += [
        f"{n} is on {t.device}, x on {x.device}" for n, t in placed.items() if t is not None and t.device != x.device
    ]
    if problems:
        raise UsageError(f"linear with a packed weight {[rows, width]}: {'; '.join(problems)}")
