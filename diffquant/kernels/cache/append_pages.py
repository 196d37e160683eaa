"""The kernel that packs new tokens into pages: `append_tokens` where a table says which fragment is whose."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.append_tokens import pack_step
from diffquant.kernels.cache.kv_layout import channels_in_word, stored_head
from diffquant.kernels.cache.paged_rows import PAGE


# Lengths change from call to call: a kernel for each that is or is not a multiple of 16 would gain nothing.
@triton.jit(do_not_specialize=["tokens", "capacity", "steps"])
def append_pages(
    K, k_stride, KCodes, KTop, KScales, V, v_stride, VCodes, VTop, VScales, Table, table_stride, Lengths,
    tokens, capacity, steps, k_heads, v_heads,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    K_LIMIT: tl.constexpr, V_LIMIT: tl.constexpr,
):  # fmt: skip
    """Pack what one page gets of a sequence's newest tokens, for one head; heads of K come before those of V."""
    index = tl.program_id(0) % steps
    row = tl.program_id(0) // steps
    sequence = (row // (k_heads + v_heads)).to(tl.int64)
    head = row % (k_heads + v_heads)
    length = tl.load(Lengths + sequence)
    before = length - tokens
    begin = (tl.maximum(before, 0) // PAGE + index) * PAGE
    stop = tl.minimum(length, capacity)
    if begin < stop:
        page = tl.load(Table + sequence * table_stride + begin // PAGE).to(tl.int64)
        if head < k_heads:
            _pack(
                K + sequence * k_stride[0] + head * k_stride[1], k_stride[2], k_stride[3], KCodes, KTop, KScales,
                page * k_heads + head, begin, before, stop, K_BITS, WIDTH, K_LIMIT, False,
            )  # fmt: skip
        else:
            head -= k_heads
            _pack(
                V + sequence * v_stride[0] + head * v_stride[1], v_stride[2], v_stride[3], VCodes, VTop, VScales,
                page * v_heads + head, begin, before, stop, V_BITS, VALUE_WIDTH, V_LIMIT, True,
            )  # fmt: skip


@triton.jit
def _pack(
    New, token_stride, channel_stride, Codes, Top, Scales, head, begin, before, stop,
    BITS: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    codes, top, scales = stored_head(Codes, Top, Scales, head, PAGE, BITS, 1, WIDTH)
    # Where the sequence's first token would stand, were its pages one after another.
    words = begin.to(tl.int64) * (WIDTH // channels_in_word(BITS))
    pack_step(
        New, token_stride, channel_stride, codes - words, top - words // 2, scales - begin, codes,
        begin, before, stop, before, BITS, 1, 0, WIDTH, LIMIT, TRANSPOSED, PAGE,
    )  # fmt: skip
