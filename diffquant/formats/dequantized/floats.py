"""Matrices of small floats under scales, which libraries store alike except for the names of the tensors.

Codes are floats of 8 bits in a dtype of their own, or E2M1, two a byte, the even column low. A scale belongs to the
tensor, an expert, an output channel, a block of both axes, or neighbours along the input: 32 share a power of two
(uint8, E8M0), and 16 share an e4m3 scale, which a float32 of the tensor or expert multiplies (ModelOpt) or divides
(compressed-tensors).

Source: nvidia-modelopt 0.47, torch/quantization/qtensor; compressed-tensors 0.20; transformers 5.23,
integrations/finegrained_fp8.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.formats.dequantized.base import Parts, RoundedMatrix
from diffquant.formats.reader import Checkpoint
from diffquant.numbers.formats import format_named
from diffquant.support.devices import DTYPES

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
POWERS = (torch.uint8, torch.float8_e8m0fnu)
# (the stored scales, int64 indices [n] of rows) -> what multiplies these rows: float32 [n, 1], [n, in] or [].
Spread = Callable[[Tensor, Tensor], Tensor]


def float_matrix(
    stored: Checkpoint,
    parts: Parts,
    codes: str,
    scales: str,
    *,
    multiplier: str | None = None,
    divisor: str | None = None,
    group: int | None = None,
    block: tuple[int, int] | None = None,
    unused: tuple[str, ...] = (),
) -> tuple[str, RoundedMatrix] | None:
    """The kind of a matrix's floats, and the matrix; None if something of it is wrong, which `parts` has then.

    Args:
        codes, scales: names of the tensors.
        multiplier, divisor: name of the tensor of one scale or one per expert above e4m3 scales.
        group: neighbours along the input that share a 16-bit scale, where the folder says so.
        block: height and width of the blocks that share a scale, where the folder says so.
        unused: names of further tensors of the matrix, which nothing here reads.
    """
    info, scale_info = stored.tensors[codes], stored.tensors.get(scales)
    if scale_info is None:
        parts.problems.append(f"{codes} is {info.dtype}, and {scales} is missing")
        return None
    if len(info.shape) not in (2, 3) or 0 in info.shape:
        parts.problems.append(f"{codes} is {list(info.shape)}, and has two axes, or three with experts")
        return None
    is_packed = info.dtype not in FLOAT8
    shape = (*info.shape[:-1], 2 * info.shape[-1]) if is_packed else info.shape
    above = multiplier or divisor
    kind, size = _kind(info.dtype, scale_info.dtype, group, above in stored.tensors)
    spread = spreading(scale_info.shape, shape, size, block) if kind else None
    if spread is None:
        parts.problems.append(
            f"{codes} is {info.dtype} {list(info.shape)}, which no scale {scale_info.dtype} {list(scale_info.shape)} "
            f"{'' if above in stored.tensors else 'alone '}belongs to"
        )
        return None
    has_above = kind == "NVFP4" and above is not None
    over = spreading(stored.tensors[above].shape, shape) if has_above and above else None
    if has_above and over is None:
        parts.problems.append(
            f"{above} is {list(stored.tensors[above or ''].shape)}, and has one number, or one per expert"
        )
        return None

    def rows(indices: Tensor) -> Tensor:
        picked = stored.read(codes).flatten(0, -2)[indices]
        values = _e2m1(picked) if is_packed else picked.float()
        scale = spread(stored.read(scales), indices)
        if over is not None and above is not None:
            whole = over(stored.read(above).float(), indices)
            # In each library's own order, so that products have its bits.
            scale = scale * whole if multiplier else scale / whole
        return values * scale

    names = (codes, scales, *([above] if above and above in stored.tensors else []), *unused)
    return kind, RoundedMatrix(tuple(shape), names, model_dtype(stored.config), rows)


def _kind(codes: torch.dtype, scales: torch.dtype, group: int | None, has_above: bool) -> tuple[str, int | None]:
    """The kind of floats that these dtypes are, and how many neighbours share a scale; "" and None if unknown."""
    if scales in POWERS:
        return ("MXFP8" if codes in FLOAT8 else "MXFP4"), 32
    if codes in FLOAT8:
        return ("FP8", group) if scales.is_floating_point and scales.itemsize > 1 else ("", None)
    return ("NVFP4", 16) if scales == torch.float8_e4m3fn and has_above else ("", None)


def spreading(
    scales: tuple[int, ...], shape: tuple[int, ...], group: int | None = None, block: tuple[int, int] | None = None
) -> Spread | None:
    """How scales of one shape lie over a matrix [..., out, in]; None if they do not."""
    *lead, height, width = shape
    experts, stated = math.prod(lead), tuple(n for n in scales if n != 1)
    if not stated:
        return lambda scale, _indices: _wide(scale).reshape(())
    if block is not None:
        down, across = block
        grid = (*lead, -(-height // down), -(-width // across))
        # ModelOpt keeps an axis of one beside each of the two.
        if stated == tuple(n for n in grid if n != 1):
            tiles = grid[-2]

            def of_blocks(scale: Tensor, indices: Tensor) -> Tensor:
                at = indices // height * tiles + indices % height // down
                return _picked(scale.reshape(experts * tiles, -1), at).repeat_interleave(across, -1)[:, :width]

            return of_blocks
    if lead and stated == (experts,) and scales[0] == experts:
        return lambda scale, indices: _picked(scale.reshape(-1, 1), indices // height)
    if scales in ((*lead, height), (*lead, height, 1)):
        return lambda scale, indices: _picked(scale.reshape(-1, 1), indices)
    if group is not None and scales == (*lead, height, -(-width // group)):

        def of_groups(scale: Tensor, indices: Tensor) -> Tensor:
            return _picked(scale.flatten(0, -2), indices).repeat_interleave(group, -1)[:, :width]

        return of_groups
    return None


def model_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a config.json says its model has, in which a library dequantizes; bfloat16 if it says none."""
    return DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), torch.bfloat16)


def without_scales(stored: Checkpoint, found: Mapping[str, object]) -> list[str]:
    """A problem for each weight of small codes that no scale was found for."""
    small = (torch.uint8, torch.int8, *FLOAT8)
    return [
        f"{name} is {info.dtype}, and no scales are beside it"
        for name, info in stored.tensors.items()
        if name.endswith((".weight", "_proj")) and info.dtype in small and name not in found
    ]


def _picked(scale: Tensor, rows: Tensor) -> Tensor:
    """Some rows of scales in float32; those of all experts would be a gigabyte."""
    return _wide(scale.view(torch.uint8)[rows].view(scale.dtype) if scale.itemsize == 1 else scale[rows])


def _wide(scale: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents."""
    return format_named("mxfp4").unpack_scale(scale) if scale.dtype == torch.uint8 else scale.float()


def _e2m1(packed: Tensor) -> Tensor:
    """Values of E2M1 codes, two a byte."""
    nibbles = format_named("mxfp4")
    return nibbles.values(nibbles.unpack(packed.view(torch.uint8), 2 * packed.shape[-1]), torch.float32)
