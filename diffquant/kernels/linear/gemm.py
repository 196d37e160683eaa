"""GEMM y = x · Wᵀ with packed weights for many tokens: weights are unpacked in registers (Triton).

A tile is computed transposed, W · xᵀ, since tensor cores read the left operand from registers in the order of `repack`,
so unpacked weights never go through shared memory. If there are fewer tiles than multiprocessors, K is split among
thread blocks (split-K), and a second kernel adds the parts in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.kernels.configs import choose_config
from diffquant.kernels.gpu import device_class, multiprocessors, registers_per_thread, warpgroup_refusal
from diffquant.kernels.linear.repack import FRAGMENT, PackedWeight, codes_per_word
from diffquant.kernels.linear.unpacking import join_fields, load_chunk

_ROW_BLOCKS = 8


def launch_dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight W [N, K] to `dtype`, float16 or bfloat16."""
    rows, width = weight.shape
    blocks, chunks, _ = weight.low.shape
    w = weight.low.new_empty(rows, width, dtype=dtype)
    _expand[(chunks, triton.cdiv(blocks, _ROW_BLOCKS))](
        weight.low, weight.high, weight.scales, weight.row_scale, w,
        rows, width, blocks, chunks, int(len(weight.row_scale) > 1),
        **weight.layout, BLOCKS=_ROW_BLOCKS, enable_fp_fusion=True,
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
    fields = load_chunk(
        low, high, scales, block, blocks, chunk, chunks, K, w.dtype.element_ty, BITS, FLOATS, FIELDS, GROUP, SPAN
    )
    n = tl.program_id(1) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    k = chunk * (16 * FIELDS) + tl.arange(0, 16 * FIELDS)
    row_scales = tl.load(row_scale + n * row_scale_stride, mask=n < N, other=0.0).to(tl.float32)
    values = join_fields(fields, FIELDS).to(tl.float32) * row_scales[:, None]
    live = (n < N)[:, None] & (k < K)[None, :]
    tl.store(w + n.to(tl.int64)[:, None] * K + k[None, :], values.to(w.dtype.element_ty), mask=live)


_ADDED_AT_ONCE = 256
# Up to this number of tokens, products of single warps are used even if warpgroups are available.
_MOST_TOKENS_BY_WARPS = 64
# Least chunks per split of K, since the parts have to be written and read in float32.
_LEAST_CHUNKS = 4


# By the number of tokens: rows of W and tokens of a tile, warps, and steps that are loaded ahead.
# For few tokens there are two warps, which are not a warpgroup, whose products Triton before 3.7 may miscompile. For
# more tokens, 128 rows give each of 4 warps two fragments per step; on Hopper the 4 warps are one warpgroup. On Ampere
# tiles of 128 tokens would spill registers.
TILES = {
    "gemm/sm_90/32": {"rows": 64, "tokens": 32, "warps": 2, "stages": 4},
    "gemm/sm_90/64": {"rows": 64, "tokens": 64, "warps": 2, "stages": 3},
    "gemm/sm_90/128": {"rows": 128, "tokens": 128, "warps": 4, "stages": 3},
    "gemm/sm_80/32": {"rows": 128, "tokens": 32, "warps": 4, "stages": 3},
    "gemm/sm_80/64": {"rows": 128, "tokens": 64, "warps": 4, "stages": 3},
    "gemm/sm_80/128": {"rows": 128, "tokens": 64, "warps": 4, "stages": 3},
}


def launch_gemm(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Compute x · Wᵀ + bias [M, N] of x [M, K], contiguous along K, and a packed weight."""
    tokens, width = x.shape
    rows = weight.shape[0]
    blocks, chunks, _ = weight.low.shape
    device_kind = device_class(x.device)
    by_warpgroup = tokens > _MOST_TOKENS_BY_WARPS and warpgroup_refusal(x.device) is None
    most = 32 if tokens <= 32 else 128 if by_warpgroup or (device_kind == "sm_80" and tokens > 64) else 64
    tile = choose_config(TILES, f"gemm/{device_kind}/{most}")
    tiles = triton.cdiv(tokens, tile["tokens"]), triton.cdiv(rows, tile["rows"])
    # Split K until there are four warps per multiprocessor.
    at_once = multiprocessors(x.device) * 4 // tile["warps"]
    splits = max(1, min(at_once // (tiles[0] * tiles[1]), chunks // _LEAST_CHUNKS))
    y = x.new_empty(tokens, rows)
    parts = y if splits == 1 else x.new_empty(splits, tokens, rows, dtype=torch.float32)
    row_scale_stride = int(len(weight.row_scale) > 1)
    _gemm[(*tiles, splits)](
        x, weight.low, weight.high, weight.scales, weight.row_scale, bias, parts,
        tokens, rows, width, blocks, chunks, triton.cdiv(chunks, splits), x.stride(0), row_scale_stride,
        **weight.layout, BLOCKS=tile["rows"] // FRAGMENT, TOKENS=tile["tokens"], JOINED=by_warpgroup,
        EVEN=width == chunks * FRAGMENT * codes_per_word(weight.bits), FINAL=splits == 1,
        num_warps=tile["warps"], num_stages=tile["stages"], enable_fp_fusion=True,
        # Unless a limit is given, the assembler keeps to 128 registers and spills.
        maxnreg=registers_per_thread(1, tile["warps"]),
    )  # fmt: skip
    if splits > 1:
        _add[(tokens, triton.cdiv(rows, _ADDED_AT_ONCE))](
            parts, weight.row_scale, bias, y, tokens * rows, rows, splits, row_scale_stride, WIDTH=_ADDED_AT_ONCE,
            enable_fp_fusion=True,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "chunks_a_split", "row_scale_stride"])
def _gemm(
    x, low, high, scales, row_scale, bias, y,
    M, N, K, blocks, chunks, chunks_a_split, x_stride, row_scale_stride,
    BITS: tl.constexpr, FLOATS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    BLOCKS: tl.constexpr, TOKENS: tl.constexpr, JOINED: tl.constexpr, EVEN: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of y [M, N]. Unless FINAL, y is [splits, M, N] and gets a split's part, without row scales."""
    split = tl.program_id(2)
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live_token = (m < M)[:, None]
    x_at = x + m.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([BLOCKS * 16, TOKENS], tl.float32)
    for chunk in range(split * chunks_a_split, tl.minimum(chunks, (split + 1) * chunks_a_split)):
        fields = load_chunk(
            low, high, scales, block, blocks, chunk, chunks, K, x.dtype.element_ty, BITS, FLOATS, FIELDS, GROUP, SPAN
        )
        k = chunk * (16 * FIELDS)
        # A warpgroup needs fields joined to one product. For products of single warps, joining would reorder columns.
        if JOINED:
            column = k + tl.arange(0, 16 * FIELDS)[None, :]
            b = tl.load(x_at + column, mask=live_token if EVEN else live_token & (column < K), other=0.0)
            sums = tl.dot(join_fields(fields, FIELDS), b.T, sums)
        else:
            for field in tl.static_range(FIELDS):
                sums = _product(fields[field], x_at, live_token, k + field * 16, K, EVEN, sums)
    n = tl.program_id(1) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    y_at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    live = live_token & (n < N)[None, :]
    if FINAL:
        sums *= tl.load(row_scale + n * row_scale_stride, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if bias is not None:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_at, sums.T.to(y.dtype.element_ty), mask=live)
    else:
        tl.store(y_at + split.to(tl.int64) * M * N, sums.T, mask=live)


@triton.jit
def _product(a, x_at, live, k, K, EVEN: tl.constexpr, sums):
    """Add the product of a field's weights and their 16 columns of x to `sums`."""
    count: tl.constexpr = a.shape[0]
    a = a.reshape(count, 8, 4, 2, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(count * 16, 16)
    column = k + tl.arange(0, 16)[None, :]
    b = tl.load(x_at + column, mask=live if EVEN else live & (column < K), other=0.0)
    return tl.dot(a, b.T, sums)


@triton.jit(do_not_specialize=["part_stride", "splits", "row_scale_stride"])
def _add(parts, row_scale, bias, y, part_stride, N, splits, row_scale_stride, WIDTH: tl.constexpr):
    """Compute y [M, N]: the sum of its parts [splits, M, N], with row scales and bias applied."""
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = n < N
    at = tl.program_id(0).to(tl.int64) * N + n
    total = tl.zeros([WIDTH], tl.float32)
    for _ in range(splits):
        total += tl.load(parts + at, mask=live, other=0.0)
        parts += part_stride
    total *= tl.load(row_scale + n * row_scale_stride, mask=live, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=live)
