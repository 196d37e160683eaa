"""The kernels' layout of weights: nothing lost, nothing added, and each thread's eight values where it looks."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffquant.errors import UsageError
from diffquant.kernels.linear import repack as module
from diffquant.kernels.linear.repack import dequantize_weight, join_rows, repack
from tests.support.packed_weights import exact_weight, random_case, random_floats, random_scale, random_words
from tests.support.tables import in_one_test


@settings(max_examples=50)
@given(
    rows=st.integers(1, 70),
    sixteens=st.integers(1, 12),
    bits=st.integers(2, 8),
    kind=st.sampled_from(["row", "tensor", "groups"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_dequantizes_to_codes_times_scales(rows, sixteens, bits, kind, seed, data):
    width = 16 * sixteens
    group = kind
    if kind == "groups":
        group = 16 * data.draw(st.sampled_from([n for n in range(1, sixteens + 1) if sixteens % n == 0]))
    words = random_words(rows, width, bits, seed=seed)
    scale = random_scale(rows, width, group, torch.float32, seed=seed)
    strided = torch.stack([words, words], -1)[..., 0], torch.stack([scale, scale], -1)[..., 0]
    packed = repack(*strided, bits, width)
    assert torch.equal(dequantize_weight(packed, torch.float32), exact_weight(words, scale, bits, width).float())


@in_one_test("bits", [2, 5, 8])
def test_widths_that_fill_no_fragment(bits):
    packed, exact = random_case(5, 37, bits, "row", torch.float32)
    assert torch.equal(dequantize_weight(packed, torch.float32), exact.float())


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group", [32, "row", "tensor"])
def test_two_weights_joined_are_their_rows_below_each_other(bits, group):
    (first, exact_first), (second, exact_second) = (random_case(rows, 96, bits, group, seed=rows) for rows in (48, 21))
    joined = join_rows(first, second)
    assert joined.shape == (69, 96)
    assert torch.equal(dequantize_weight(joined, torch.float64), torch.cat([exact_first, exact_second]))


@in_one_test(
    ("first", "second", "message"),
    [
        ((40, 96, 4, 32), (48, 96, 4, 32), "the first has 40 rows, which is not a multiple of 16"),
        ((48, 96, 4, 32), (48, 96, 6, 32), r"\(4, 32, 96, torch.float16\) and \(6, 32, 96, torch.float16\)"),
        ((48, 96, 4, 32), (48, 96, 4, 48), "differ: .* and "),
        ((48, 96, 4, 32), (48, 64, 4, 32), "differ: .* and "),
        ((48, 96, 4, 32), (48, 96, 4, "row"), "differ: .* and "),
    ],
)
def test_weights_packed_apart_are_not_joined(first, second, message):
    with pytest.raises(UsageError, match=f"two packed weights cannot be joined: .*{message}"):
        join_rows(random_case(*first)[0], random_case(*second)[0])


def test_large_weights_go_in_slabs(monkeypatch):
    whole, _ = random_case(100, 96, 6, 32)
    monkeypatch.setattr(module, "_SLAB", 3 * 16 * 96)
    slabs, _ = random_case(100, 96, 6, 32)
    for name in ("low", "high", "scales", "row_scale"):
        assert torch.equal(getattr(whole, name), getattr(slabs, name)), name


def test_a_weight_is_given_once_its_codes_are_in_memory(monkeypatch):
    """A GEMV reads them before it waits for the kernel ahead, which may be the one that wrote them."""
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("for the stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    module._finish_writing(torch.device("cuda"))
    assert waited == ["for the stream"]
    monkeypatch.setattr(module, "_finish_writing", waited.append)
    packed, _ = random_case(32, 96, 4, 32)
    join_rows(packed, packed)
    random_floats(32, 96, "nvfp4")
    assert waited[1:] == [torch.device("cpu")] * 3


@in_one_test("bits", [4, 6, 8])
def test_a_threads_words_hold_its_elements_of_the_fragments(bits):
    """By the table of mma.m16n8k16's left side in the PTX manual: rows g, g + 8; columns 2t + {0, 1}, + 8."""
    packed, exact = random_case(32, 256, bits, "tensor", torch.float32)
    stored = (exact / packed.row_scale.double()).round().to(torch.int64) + (1 << (bits - 1))
    fields = 2 if bits == 8 else 4
    for block, chunk, thread, element, field in [(0, 0, 0, 0, 0), (1, 1, 13, 3, 1), (0, 2, 31, 7, fields - 1)]:
        g, t = divmod(thread, 4)
        row = block * 16 + g + 8 * (element // 2 % 2)
        column = (chunk * fields + field) * 16 + 2 * t + element % 2 + 8 * (element // 4)
        index = thread * 8 + element
        word = int(packed.low[block, chunk, index]) & 0xFFFF
        value = word >> (8 * field) & 255 if bits == 8 else word >> (4 * field) & 15
        if bits == 6:
            byte = int(packed.high[block, chunk].view(torch.uint8)[index])
            value |= (byte >> (2 * field) & 3) << 4
        assert value == stored[row, column]


def test_four_bits_take_four_bits():
    for rows, width, group in [(3072, 8192, 128), (576, 1536, 32)]:
        words = torch.zeros(rows, width // 8, dtype=torch.int32)
        packed = repack(words, torch.ones(rows, width // group, dtype=torch.float16), 4, width)
        assert packed.nbytes == rows * width // 2 + 2 * rows * width // group + 4


def test_zero_scales_are_kept():
    packed = repack(random_words(16, 64, 4), torch.zeros(16, 2, dtype=torch.float16), 4, 64)
    assert not dequantize_weight(packed, torch.float32).any()


def test_what_does_not_fit_is_refused():
    words = random_words(8, 48, 4)
    with pytest.raises(UsageError, match=r"words must be int32 \[N, 12\] for 96 codes"):
        repack(words, torch.ones(8, 3), 4, 96)
    with pytest.raises(UsageError, match=r"scale \[8, 5\] is not"):
        repack(words, torch.ones(8, 5), 4, 48)
    with pytest.raises(UsageError, match="groups of 24 are not a multiple of 16"):
        repack(words, torch.ones(8, 2), 4, 48)
