"""Repacks weights for the linear kernels: codes in the register order of tensor cores.

A fragment is 16 rows by 16 columns, 8 values in each of 32 threads: thread 4g + t holds rows g and g + 8 and columns
2t, 2t + 1, 2t + 8 and 2t + 9. A 16-bit word contains one value from each of several adjacent fragments. These are its
fields, lowest bits first: 4 of 4 bits, or 2 of 8. So a thread reads 16 contiguous bytes and unpacks two values with
each operation. 6-bit codes are stored as words of their low 4 bits and bytes of their high 2 bits. Stored numbers are
code + 2^(bits-1). Codes of 2 and 3 bits are stored in 4 bits, 5 in 6, and 7 in 8. E2M1 floats (NVFP4, MXFP4) and their
scales are stored as their format defines them.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffquant.errors import UsageError
from diffquant.recipe.numbers.packing import packed_words, unpack
from diffquant.recipe.scheme import Scheme

FRAGMENT = 16
# Formats of E2M1 floats: with an e4m3 scale per 16 of them, and with a power-of-two scale per 32.
E4M3_SCALED, POWER_SCALED = ("nvfp4", "nvfp4_4over6"), ("mxfp4", "mxfp4_up")
# The largest scale of an MXFP4 weight is stored as this power of two; 31 smaller ones also fit in float16.
_TOP_POWER = 8
# Number of codes repacked at a time, so that temporary memory stays well below that of a 16-bit weight.
_SLAB = 1 << 22
# Values of the 16 codes of E2M1.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight W [N, K] = codes · scales · row_scale.

    Codes are stored in blocks of 16 rows, and within them in chunks of 16·F columns, where F is `codes_per_word`.

    Attributes:
        low: words of codes, or of the low 4 bits of 6-bit codes, int16 [N/16, K/(16·F), 256], with sizes rounded up.
        high: high 2 bits of 6-bit codes, int16 [N/16, K/(16·F), 128], one byte per word of `low`; else None.
        scales: group scales [K/group, N/16, 16], relative to `row_scale`, with a block's rows ordered 0, 8, 1, 9, ...,
            or None if there are no groups. For E2M1 codes they are bytes: e4m3 for groups of 16, E8M0 for groups of 32.
        row_scale: scales of rows, float32 [N], or [1] for all rows. With groups they are powers of two that keep
            `scales` near 1, so that these fit in float16 whatever the magnitude of the weights.
        bits: bits per stored code: 4, 6 or 8.
        group: number of adjacent weights along K that share a scale; 0 without groups.
        shape: N and K.
    """

    low: Tensor
    high: Tensor | None
    scales: Tensor | None
    row_scale: Tensor
    bits: int
    group: int
    shape: tuple[int, int]

    @property
    def has_float_codes(self) -> bool:
        """Whether codes are E2M1 floats."""
        return self.scales is not None and self.scales.dtype == torch.uint8

    @property
    def layout(self) -> dict[str, int | bool]:
        """Compile-time arguments, by name, of kernels that unpack the weight.

        SPAN is the number of codes of a word that share a group's scale.
        """
        fields = codes_per_word(self.bits)
        span = gcd(self.group // FRAGMENT, fields)
        return {"BITS": self.bits, "FLOATS": self.has_float_codes, "FIELDS": fields, "GROUP": self.group, "SPAN": span}

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales included."""
        parts = (self.low, self.high, self.scales, self.row_scale)
        return sum(x.numel() * x.element_size() for x in parts if x is not None)


def container_bits(bits: int) -> int:
    """Return the number of bits in which codes of `bits` bits are stored: 4, 6 or 8."""
    if not 2 <= bits <= 8:
        raise UsageError(f"a packed weight has codes of 2 to 8 bits, got {bits}")
    return max(4, bits + bits % 2)


def codes_per_word(bits: int) -> int:
    """Return the number of codes in a 16-bit word: 2 of 8 bits, or 4 of 4 bits or of the low 4 of 6 bits.

    The codes of a word belong to as many adjacent fragments, one to each.
    """
    return 2 if bits == 8 else 4


def repack_refusal(scheme: Scheme) -> str | None:
    """Return why a weight with this scheme cannot be repacked, or None if it can."""
    if scheme.format.name in (*E4M3_SCALED, *POWER_SCALED):
        return None
    return scheme.format.integer_refusal or group_refusal(scheme.granularity_size or 0)


def group_refusal(group: int) -> str | None:
    """Return why a weight with this group size cannot be repacked, or None if it can; 0 means no groups."""
    if group % FRAGMENT:
        return f"groups of {group} are not a multiple of {FRAGMENT}, as the kernels require"
    return None


def repack(words: Tensor, scale: Tensor, bits: int, width: int, dtype: torch.dtype | None = None) -> PackedWeight:
    """Repack a checkpoint's weight of integer codes for the kernels.

    Args:
        words: packed codes from `numbers.pack`, int32 [N, packed_words(K, bits)], any strides.
        scale: [N, K/group], [N, 1] or [1], any strides.
        bits: bits per code, 2 to 8.
        width: K, number of columns.
        dtype: dtype of the stored group scales; that of `scale` by default.

    Raises:
        UsageError: shapes disagree, or the group is no multiple of 16.
    """
    rows, groups = _count_rows_and_groups(words, scale, bits, width)
    stored_bits = container_bits(bits)
    low, high = _planes(words, bits, width)
    if groups <= 1:
        return PackedWeight(low, high, None, scale.float().flatten(), stored_bits, 0, (rows, width))
    largest = scale.float().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    unit = torch.exp2(largest.log2().round()).reshape(1)
    relative = (scale.float() / unit).to(dtype or scale.dtype)
    return PackedWeight(low, high, _block_scales(relative), unit, stored_bits, width // groups, (rows, width))


def repack_floats(words: Tensor, scale: Tensor, divisor: Tensor | None, width: int) -> PackedWeight:
    """Repack a checkpoint's weight of E2M1 floats for the kernels.

    Args:
        words: uint8 [N, K/2], two floats per byte, as in NVFP4 and MXFP4.
        scale: bytes of scales without NaN: [N, K/16] in e4m3, or [N, K/32] in E8M0.
        divisor: number by which e4m3 scales are divided, float32 [1], or None.
        width: K, number of columns.

    Raises:
        UsageError: shapes disagree.
    """
    rows = len(words)
    group = 16 if scale.shape == (rows, width // 16) else 32
    if words.shape != (rows, width // 2) or scale.shape != (rows, width // group) or width % group:
        raise UsageError(
            f"a weight of E2M1 floats [{rows}, {width}] needs bytes [{rows}, {width // 2}] and a scale per 16 or 32 "
            f"floats of a row, got {list(words.shape)} and scales {list(scale.shape)}"
        )
    scale = scale.view(torch.uint8)
    unit = torch.ones(1, device=scale.device) if divisor is None else 1 / divisor.float().reshape(1)
    if group == 32:
        # Relative to the largest scale, since GEMM kernels store products of codes and scales in float16.
        top = scale.max()
        scale = (scale.int() - top.int() + 127 + _TOP_POWER).clamp(min=0).to(torch.uint8)
        unit = torch.exp2(top.double() - 127 - _TOP_POWER).float().reshape(1)
    low, _ = _planes(words.contiguous().view(torch.int32), 4, width)
    return PackedWeight(low, None, _block_scales(scale), unit, 4, group, (rows, width))


def dequantize_weight(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight W [N, K] in `dtype`: the checkpoint's values, rounded once."""
    rows = weight.shape[0]
    codes = _codes(weight)
    of_floats = torch.tensor(_E2M1, device=codes.device)
    values = of_floats[codes.int() + 8] if weight.has_float_codes else codes.float()
    if weight.scales is not None:
        scale = _read_scales(weight, weight.scales).unflatten(2, (8, 2)).permute(1, 3, 2, 0).flatten(0, 2)[:rows]
        values = (values.unflatten(1, (-1, weight.group)) * scale[..., None]).flatten(1)
    row_scale = weight.row_scale.float()
    return (values * (row_scale if len(row_scale) == 1 else row_scale[:, None])).to(dtype)


def join_refusal(first: PackedWeight, second: PackedWeight) -> str | None:
    """Return why two packed weights cannot be joined along their rows, or None if they can."""
    if first.shape[0] % FRAGMENT:
        return f"the first has {first.shape[0]} rows, which is not a multiple of {FRAGMENT}"
    layouts = [(w.bits, w.group, w.shape[1], None if w.scales is None else w.scales.dtype) for w in (first, second)]
    if layouts[0] != layouts[1]:
        return f"their bits, group, width and scales' dtype differ: {layouts[0]} and {layouts[1]}"
    return None


def join_rows(first: PackedWeight, second: PackedWeight) -> PackedWeight:
    """Join packed weights [N1, K] and [N2, K] to one [N1 + N2, K], so that one launch computes both products.

    Raises:
        UsageError: `join_refusal` gives a reason.
    """
    if reason := join_refusal(first, second):
        raise UsageError(f"two packed weights cannot be joined: {reason}")
    row_scales = [w.row_scale.expand(w.shape[0]) for w in (first, second)]
    high = None if first.high is None or second.high is None else torch.cat([first.high, second.high])
    scales = None if first.scales is None or second.scales is None else torch.cat([first.scales, second.scales], 1)
    shape = first.shape[0] + second.shape[0], first.shape[1]
    low = torch.cat([first.low, second.low])
    _finish_writing(low.device)
    return PackedWeight(low, high, scales, torch.cat(row_scales), first.bits, first.group, shape)


def _count_rows_and_groups(words: Tensor, scale: Tensor, bits: int, width: int) -> tuple[int, int]:
    """Return N and the number of groups per row (0 or 1 without groups).

    Raises:
        UsageError: shapes disagree, or the group is no multiple of 16.
    """
    if words.dim() != 2 or words.shape[1] != packed_words(width, bits) or words.dtype != torch.int32:
        raise UsageError(
            f"words must be int32 [N, {packed_words(width, bits)}] for {width} codes of {bits} bits, "
            f"got {words.dtype} {list(words.shape)}"
        )
    if scale.numel() == 1:
        return len(words), 0
    if scale.dim() != 2 or len(scale) != len(words) or width % scale.shape[1]:
        raise UsageError(f"scale {list(scale.shape)} is not [1], [N, 1] or [N, groups] for W {[len(words), width]}")
    reason = group_refusal(width // scale.shape[1]) if scale.shape[1] > 1 else None
    if reason:
        raise UsageError(f"cannot repack a weight {[len(words), width]}: {reason}")
    return len(words), scale.shape[1]


def _planes(words: Tensor, bits: int, width: int) -> tuple[Tensor, Tensor | None]:
    """Convert a checkpoint's packed words to `low` and `high` of a `PackedWeight`."""
    rows, stored_bits = len(words), container_bits(bits)
    blocks, chunks = -(-rows // FRAGMENT), -(-width // (FRAGMENT * codes_per_word(stored_bits)))
    low = torch.empty(blocks, chunks, 256, dtype=torch.int16, device=words.device)
    high = torch.empty(blocks, chunks, 128, dtype=torch.int16, device=words.device) if stored_bits == 6 else None
    step = max(1, _SLAB // (FRAGMENT * width))
    for first in range(0, blocks, step):
        part = slice(first, first + step)
        codes = unpack(words[first * FRAGMENT : (first + step) * FRAGMENT].contiguous(), bits, width)
        stored = _fragments(codes, stored_bits)
        low[part] = _low(stored, stored_bits)
        if high is not None:
            high[part] = _high(stored)
    _finish_writing(low.device)
    return low, high


def _read_scales(weight: PackedWeight, scales: Tensor) -> Tensor:
    """Return a weight's group scales in float32, in their stored order."""
    if not weight.has_float_codes:
        return scales.float()
    return scales.view(torch.float8_e4m3fn if weight.group == 16 else torch.float8_e8m0fnu).float()


def _finish_writing(device: torch.device) -> None:
    """Wait until codes are in device memory, since the GEMV kernel reads them before its `griddepcontrol.wait`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _fragments(codes: Tensor, bits: int) -> Tensor:
    """Reorder codes int8 [n, K] to stored numbers uint8 [row blocks, chunks, 256, fields]; padding represents 0."""
    rows, width = codes.shape
    count, middle = codes_per_word(bits), 1 << (bits - 1)
    stored = pad(codes.view(torch.uint8) + middle, (0, -width % (FRAGMENT * count), 0, -rows % FRAGMENT), value=middle)
    # Rows are (half h, g), columns (chunk, field, half o, t, parity p); a thread's eight values are (o, h, p).
    split: Tensor = stored.unflatten(0, (-1, 2, 8)).unflatten(3, (-1, count, 2, 4, 2))
    return split.permute(0, 3, 2, 6, 5, 1, 7, 4).flatten(2, 6)


def _low(stored: Tensor, bits: int) -> Tensor:
    """Pack stored numbers to words: all their bits, or the low 4 of 6 bits."""
    octets = stored if bits == 8 else stored[..., 0::2] & 15 | (stored[..., 1::2] & 15) << 4
    return octets.contiguous().view(torch.int16).squeeze(-1)


def _high(stored: Tensor) -> Tensor:
    """Pack the high 2 bits of 6-bit stored numbers to words."""
    first, second, third, fourth = (stored >> 4).unbind(-1)
    return (first | second << 2 | third << 4 | fourth << 6).view(torch.int16)


def _codes(weight: PackedWeight) -> Tensor:
    """Unpack the codes int8 [N, K] of a packed weight."""
    octets = weight.low.unsqueeze(-1).view(torch.uint8)
    stored = octets if weight.bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(-2)
    if weight.high is not None:
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=weight.high.device)
        stored = stored | ((weight.high.view(torch.uint8)[..., None] >> shifts) & 3) << 4
    codes = (stored - (1 << (weight.bits - 1))).view(torch.int8)
    # Back from (block, chunk, g, t, o, h, p, field) to rows (block, h, g) and columns (chunk, field, o, t, p).
    split: Tensor = codes.unflatten(2, (8, 4, 2, 2, 2)).permute(0, 5, 2, 1, 7, 4, 3, 6)
    return split.flatten(0, 2).flatten(1)[: weight.shape[0], : weight.shape[1]]


def _block_scales(scale: Tensor) -> Tensor:
    """Reorder scales [N, groups] to [groups, N/16, 16], rows as 0, 8, 1, 9, ...; a thread's two are then adjacent."""
    blocks: Tensor = pad(scale, (0, 0, 0, -len(scale) % FRAGMENT)).unflatten(0, (-1, 2, 8))
    return blocks.permute(3, 0, 2, 1).flatten(2).contiguous()
