"""Expansion of a packed weight to half precision, for products so large that a library's matmul is faster (Triton)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.kernels.linear.repack import FRAGMENT, PackedWeight, fields_in_word
from diffquant.kernels.linear.unpacking import chunk_weights, join_fields

_ROW_BLOCKS = 8


def launch_expand(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Weight W [N, K] written out in `dtype`, float16 or bfloat16."""
    rows, width = weight.shape
    blocks, chunks, _ = weight.low.shape
    w = weight.low.new_empty(rows, width, dtype=dtype)
    _expand[(chunks, triton.cdiv(blocks, _ROW_BLOCKS))](
        weight.low, weight.high, weight.scales, weight.row_scale, w,
        rows, width, blocks, chunks, int(len(weight.row_scale) > 1),
        BITS=weight.bits, FLOATS=weight.holds_floats, FIELDS=fields_in_word(weight.bits), GROUP=weight.group,
        SPAN=gcd(weight.group // FRAGMENT, fields_in_word(weight.bits)), BLOCKS=_ROW_BLOCKS, enable_fp_fusion=True,
    )  # fmt: skip
    return w


@triton.jit(do_not_specialize=["row_scale_stride"])
def _expand(
    low, high, scales, row_scale, w, N, K, blocks, chunks, row_scale_stride,
    BITS: tl.constexpr, FLOATS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    a0, a1, a2, a3 = chunk_weights(
        low, high, scales, block, blocks, chunk, chunks, K, w.dtype.element_ty, BITS, FLOATS, FIELDS, GROUP, SPAN
    )
    n = tl.program_id(1) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    k = chunk * (16 * FIELDS) + tl.arange(0, 16 * FIELDS)
    row_scales = tl.load(row_scale + n * row_scale_stride, mask=n < N, other=0.0).to(tl.float32)
    values = join_fields(a0, a1, a2, a3, FIELDS).to(tl.float32) * row_scales[:, None]
    live = (n < N)[:, None] & (k < K)[None, :]
    tl.store(w + n.to(tl.int64)[:, None] * K + k[None, :], values.to(w.dtype.element_ty), mask=live)
