"""GPTQ's layout: codes packed along the input, zero points along the output, and the group of each input.

A module has qweight int32 [in·bits/32, out], qzeros int32 [groups, out·bits/32], scales [groups, out] and g_idx int32
[in]; words are a dense bit string, lowest bits first. w[o, i] = scales[g, o] · (q[i, o] − z[g, o]) with g = g_idx[i],
which with desc_act is in any order. "gptq", version 1, stores z − 1 in the bits of a code, and "gptq_v2" stores z.

A zero point of 0 has no place in version 1. AutoGPTQ lets its −1 run over the zero points beside it, GPTQModel borrows
from them, and each reads the other's wrongly; a folder that has such a one is refused.

Source: AutoGPTQ 0.7.1, nn_modules/qlinear; GPTQModel 7.7, utils/model.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.formats.compressed_config import match_modules
from diffquant.formats.dequantized.base import (
    Contents,
    Parts,
    RoundedMatrix,
    check_plain,
    count,
    group_size,
    modules_with,
    register,
)
from diffquant.formats.reader import Checkpoint
from diffquant.numbers.packing import packed_words, unpack

_VERSIONS = {"gptq": 1, "gptq_v2": 0}


@register("gptq")
def read_gptq(entry: Mapping[str, Any], stored: Checkpoint) -> Contents:
    """The matrices of a GPTQ folder.

    Raises:
        CheckpointError: tensors or settings are not what the layout has; the first are named.
    """
    parts = Parts(stored)
    # Libraries write either key.
    formats = {key: tuple(_VERSIONS) for key in ("checkpoint_format", "format")}
    check_plain(entry, formats | {"pack_dtype": ("int32",), "is_marlin_format": (False,)}, parts.problems)
    if not isinstance(entry.get("dynamic") or {}, Mapping):
        parts.problems.append("dynamic of quantization_config is no mapping from expressions to settings")
    _bits_and_size(entry, parts)
    parts.check("gptq")
    offset = _VERSIONS[entry.get("checkpoint_format") or entry.get("format") or "gptq"]
    matrices: dict[str, RoundedMatrix] = {}
    kinds: list[str] = []
    for module, own in _settings(entry, modules_with(stored, ".qweight")).items():
        bits, size = _bits_and_size(own, parts)
        if matrix := _matrix(stored, parts, module, bits, size, offset):
            matrices[f"{module}.weight"] = matrix
            kinds.append(f"{bits}{'' if size == -1 else f':g{size}'}")
            if offset and own.get("sym") is not True:
                _refuse_zero_points_of_zero(stored, parts, module, bits)
    parts.check("gptq")
    return Contents(f"GPTQ {'/'.join(dict.fromkeys(kinds))}", matrices)


def _settings(entry: Mapping[str, Any], modules: list[str]) -> dict[str, Mapping[str, Any]]:
    """The settings of each module; the first expression of `dynamic` that its name begins with changes the folder's.

    An expression after "-:" is of modules that stay plain.

    Source: GPTQModel 7.7, quantization/config.py, dynamic_get.
    """
    changes = [
        (expression.removeprefix("+:"), changed)
        for expression, changed in (entry.get("dynamic") or {}).items()
        if isinstance(changed, Mapping) and not expression.startswith("-:")
    ]
    matched = match_modules([expression for expression, _ in changes], modules)
    return {
        module: entry if index is None else {**entry, **changes[index][1]}
        for module, index in zip(modules, matched, strict=True)
    }


def _bits_and_size(entry: Mapping[str, Any], parts: Parts) -> tuple[int, int]:
    return count(entry, "bits", range(2, 9), parts.problems), group_size(entry, parts.problems)


def _matrix(stored: Checkpoint, parts: Parts, module: str, bits: int, size: int, offset: int) -> RoundedMatrix | None:
    """A module's matrix; None if something of it is wrong, which `parts` has then.

    Args:
        size: inputs in a group, -1 for all of them.
        offset: number that was taken off the zero points.
    """
    qweight, qzeros, scales, g_idx = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    words = parts.shape(qweight, 2, torch.int32)
    if words is None:
        return None
    width, outputs = words[0] * 32 // bits, words[1]
    has_order = g_idx in stored.tensors
    if has_order:
        stated = parts.shape(g_idx, 1, torch.int32, torch.int64)
        width = stated[0] if stated else width
    if words[0] != packed_words(width, bits):
        parts.problems.append(
            f"{qweight} is {list(words)}, not {[packed_words(width, bits), outputs]}: {width} inputs of {bits} bits"
        )
    groups = 1 if size == -1 else -(-width // size)
    fits = [
        parts.expect(qzeros, (groups, packed_words(outputs, bits)), torch.int32),
        parts.expect(scales, (groups, outputs)),
    ]
    order = stored.read(g_idx).long() if has_order else torch.arange(width) // (width if size == -1 else size)
    outside = order[(order < 0) | (order >= groups)]
    if len(outside):
        parts.problems.append(f"{g_idx} names group {int(outside[0])} of {groups}")
    if not all(fits) or len(outside):
        return None

    def rows(indices: Tensor) -> Tensor:
        codes = _unsigned(stored.read(qweight)[:, indices].T, bits, width)
        zeros = _unsigned(stored.read(qzeros), bits, outputs)[:, indices] + offset & (1 << bits) - 1
        scale = stored.read(scales)[:, indices].float()
        return (codes - zeros.T[:, order]) * scale.T[:, order]

    names = (qweight, qzeros, scales, *([g_idx] if has_order else []))
    return RoundedMatrix((outputs, width), names, stored.tensors[scales].dtype, rows)


def _unsigned(words: Tensor, bits: int, length: int) -> Tensor:
    """Codes from 0 up, int16 [..., length]."""
    return unpack(words.contiguous(), bits, length).to(torch.int16) + (1 << bits - 1)


def _refuse_zero_points_of_zero(stored: Checkpoint, parts: Parts, module: str, bits: int) -> None:
    """Add a problem if a module of version 1 has a zero point whose −1 ran over."""
    name = f"{module}.qzeros"
    zeros = _unsigned(stored.read(name), bits, stored.tensors[f"{module}.scales"].shape[1])
    if (zeros == (1 << bits) - 1).any():
        parts.problems.append(
            f"{name} has zero points of 0, which version 1 has no place for and libraries read differently: write "
            "it as gptq_v2 with the library that made it"
        )
