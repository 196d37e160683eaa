"""The kernel that appends new tokens to pages: `append_tokens` where a table says which fragment is whose."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.append_tokens import store_step
from diffquant.kernels.cache.kv_layout import stored_head
from diffquant.kernels.cache.paged_rows import PAGE


# Lengths change from call to call: a kernel for each that is or is not a multiple of 16 would gain nothing.
@triton.jit(do_not_specialize=["tokens", "capacity", "steps"])
def append_pages(
    K, k_stride, KCodes, KTop, KScales, KRecent, V, v_stride, VCodes, VTop, VScales, VRecent,
    Table, table_stride, Lengths, Places, tokens, capacity, steps, k_heads, v_heads,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr,
    V_BITS: tl.constexpr, V_RING: tl.constexpr, RESIDUAL: tl.constexpr, K_LIMIT: tl.constexpr, V_LIMIT: tl.constexpr,
    PACKS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Append one step of a sequence's newest tokens to one head; heads of K come before those of V."""
    index = tl.program_id(0) % steps
    row = tl.program_id(0) // steps
    sequence = (row // (k_heads + v_heads)).to(tl.int64)
    head = row % (k_heads + v_heads)
    length = tl.load(Lengths + sequence)
    total = tl.minimum(length, capacity)
    table = Table + sequence * table_stride
    place = tl.load(Places + sequence).to(tl.int64) if K_RING or V_RING else sequence
    if head < k_heads:
        codes, top, scales = stored_head(KCodes, KTop, KScales, head.to(tl.int64), PAGE, K_BITS, K_BLOCK, WIDTH)
        store_step(
            K + sequence * k_stride[0] + head * k_stride[1], k_stride[2], k_stride[3],
            codes, top, scales, KRecent + (place * k_heads + head) * K_RING * WIDTH, table, k_heads,
            index, length - tokens, total, tokens, 0,
            K_BITS, K_BLOCK, K_RING, RESIDUAL, WIDTH, K_LIMIT, False, PACKS, KEEPS,
        )  # fmt: skip
    else:
        head -= k_heads
        codes, top, scales = stored_head(VCodes, VTop, VScales, head.to(tl.int64), PAGE, V_BITS, 1, VALUE_WIDTH)
        store_step(
            V + sequence * v_stride[0] + head * v_stride[1], v_stride[2], v_stride[3],
            codes, top, scales, VRecent + (place * v_heads + head) * V_RING * VALUE_WIDTH, table, v_heads,
            index, length - tokens, total, tokens, 0,
            V_BITS, 1, V_RING, RESIDUAL, VALUE_WIDTH, V_LIMIT, True, PACKS, KEEPS,
        )  # fmt: skip
