import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given
from hypothesis import strategies as st

from diffquant.recipe.numbers.packing import pack, packed_words, unpack
from tests.support.tables import in_one_test


def random_codes(bits, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, dtype=torch.int8, generator=generator)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 64, 257])
def test_words_equal_compressed_tensors_and_unpack_exactly(bits, length):
    codes = random_codes(bits, 5, length)
    words = pack(codes, bits)
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(unpack(words, bits, length), codes)


@given(st.integers(2, 8), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 70), st.randoms())
def test_any_shape_and_stride_makes_the_round_trip(bits, shape, length, random):
    codes = random_codes(bits, length, *shape, seed=random.randrange(1 << 30)).movedim(0, -1)
    assert torch.equal(unpack(pack(codes, bits), bits, length), codes)


@in_one_test(("bits", "words"), [(4, 4), (6, 6), (8, 8)])
def test_32_codes_fill_exactly_b_words(bits, words):
    assert packed_words(32, bits) == words
    assert pack(random_codes(bits, 3, 32), bits).shape == (3, words)


@in_one_test("bits", range(2, 9))
def test_words_may_have_any_strides(bits):
    codes = random_codes(bits, 6, 32)
    for words in (pack(codes, bits).mT.contiguous().mT, pack(codes, bits).repeat_interleave(2, 1)[:, ::2]):
        for rows in (6, 1):
            assert torch.equal(unpack(words[:rows], bits, 32), codes[:rows])
            first = codes[:rows, : 32 // bits]
            assert torch.equal(unpack(words[:rows, :1], bits, 32 // bits), first)
