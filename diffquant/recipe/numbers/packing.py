"""Dense packing of b-bit codes: code i of a row starts at bit i*b, so 32 codes fill b words of 32 bits.

The stored value is code + 2^(b-1). This is the layout of compressed-tensors' pack-quantized format. Eight codes are
placed in the eight bytes of an int64 and compacted in three doubling steps. This takes about a dozen integer operations
for eight codes at any width. There are shorter paths for 8 and 4 bits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_words(length: int, bits: int) -> int:
    """Return the number of 32-bit words that hold `length` codes of `bits` bits."""
    return -(-length * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis.

    Args:
        codes: [..., n] int8, from -(2^(bits-1)) to 2^(bits-1) - 1.
        bits: 2 to 8.

    Returns:
        int32 [..., packed_words(n, bits)]; unused bits are zero.
    """
    length = codes.shape[-1]
    unsigned = codes.view(torch.uint8) + (1 << (bits - 1))
    if length % 32:
        unsigned = pad(unsigned, (0, -length % 32))
    # Flattened, because axes of size 1 may have strides that `view` with another dtype refuses.
    flat = unsigned.reshape(-1)
    stored = flat if bits == 8 else _join_halves(flat) if bits == 4 else _squeeze(flat, bits)
    words = stored.view(torch.int32).view(*codes.shape[:-1], packed_words(unsigned.shape[-1], bits))
    return words[..., : packed_words(length, bits)].contiguous()


def _join_halves(unsigned: Tensor) -> Tensor:
    """Pack two 4-bit codes per byte, in fewer operations than `_squeeze`."""
    neighbours = unsigned.view(torch.int16)
    return (neighbours >> 4).bitwise_or_(neighbours).to(torch.uint8)


def _squeeze(unsigned: Tensor, bits: int) -> Tensor:
    """Pack codes of any width from one byte each; the number of codes must be a multiple of 32."""
    lanes = unsigned.view(torch.int64)
    for width, shift, mask in _doublings(bits):
        lanes = (lanes & mask) | (((lanes >> width) & mask) << shift)
    return lanes.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)


def unpack(words: Tensor, bits: int, length: int) -> Tensor:
    """Unpack codes along the last axis; the inverse of `pack`.

    Args:
        words: int32 [..., packed_words(length, bits)].
        bits: 2 to 8.
        length: number of codes along the last axis.

    Returns:
        int8 [..., length].
    """
    if 32 % bits:
        words = pad(words, (0, packed_words(-(-length // 32) * 32, bits) - words.shape[-1]))
    # Copied, because an axis of size 1 may have a stride that `view` with another dtype refuses.
    stored = words.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    unsigned = stored if bits == 8 else _split_halves(stored) if bits == 4 else _spread(stored, bits)
    codes = unsigned.view(*words.shape[:-1], words.shape[-1] * 32 // bits)[..., :length]
    return (codes - (1 << (bits - 1))).view(torch.int8)


def _split_halves(stored: Tensor) -> Tensor:
    """Inverse of `_join_halves`."""
    halves = stored.to(torch.int16)
    return (halves << 4).bitwise_or_(halves).bitwise_and_(0x0F0F).view(torch.uint8)


def _spread(stored: Tensor, bits: int) -> Tensor:
    """Inverse of `_squeeze`."""
    lanes = pad(stored.view(-1, bits), (0, 8 - bits)).view(torch.int64).view(-1)
    for width, shift, mask in reversed(list(_doublings(bits))):
        lanes = (lanes & mask) | (((lanes >> shift) & mask) << width)
    return lanes.view(torch.uint8)


def _doublings(bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each doubling step the lane width before it, the bits used, and the mask of every other lane."""
    for doubling, every_other in enumerate((0x0001000100010001, 0x0000000100000001, 1)):
        used = bits << doubling
        yield 8 << doubling, used, every_other * ((1 << used) - 1)
