"""GPTQ's and AWQ's layouts.

GPTQ has codes packed along the input, zero points along the output, and the group of each input.

A module has qweight int32 [in·bits/32, out], qzeros int32 [groups, out·bits/32], scales [groups, out] and g_idx int32
[in]; int32 words form a dense bit string, lowest bits first. w[o, i] = scales[g, o] · (q[i, o] − z[g, o]) with
g = g_idx[i]. With desc_act, g_idx is in any order. "gptq", version 1, stores z − 1 in the bits of a code, and "gptq_v2"
stores z.

Version 1 cannot store a zero point of 0. In AutoGPTQ its −1 overflows into the zero points beside it, GPTQModel borrows
from them, and each misreads the other's files; folders with such a zero point are refused.

Source: AutoGPTQ 0.7.1, nn_modules/qlinear; GPTQModel 7.7, utils/model.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_targets import match_modules
from diffquant.checkpoints.dequantized import EncodedMatrix, QuantizedMatrices, register
from diffquant.checkpoints.dequantized.checker import LayoutChecker
from diffquant.checkpoints.reader import Checkpoint
from diffquant.recipe.numbers.packing import packed_words, unpack

_VERSIONS = {"gptq": 1, "gptq_v2": 0}


@register("gptq")
def read_gptq(entry: Mapping[str, Any], stored: Checkpoint) -> QuantizedMatrices:
    """Read the matrices of a GPTQ folder.

    Raises:
        CheckpointError: tensors or settings do not match the layout; the message names the first.
    """
    checker = LayoutChecker(stored, "gptq")
    # Libraries write either key.
    formats = {key: tuple(_VERSIONS) for key in ("checkpoint_format", "format")}
    checker.check_settings(entry, formats | {"pack_dtype": ("int32",), "is_marlin_format": (False,)})
    if not isinstance(entry.get("dynamic") or {}, Mapping):
        checker.problems.append("dynamic of quantization_config is not a mapping from expressions to settings")
    _bits_and_size(entry, checker)
    checker.require_valid()
    offset = _VERSIONS[entry.get("checkpoint_format") or entry.get("format") or "gptq"]
    matrices: dict[str, EncodedMatrix] = {}
    kinds: list[str] = []
    for module, own in _settings(entry, checker.modules_with(".qweight")).items():
        bits, size = _bits_and_size(own, checker)
        if matrix := _read_gptq_matrix(checker, module, bits, size, offset):
            matrices[f"{module}.weight"] = matrix
            kinds.append(f"{bits}{'' if size == -1 else f':g{size}'}")
            if offset and own.get("sym") is not True:
                _refuse_zero_points_of_zero(checker, module, bits)
    checker.require_valid()
    return QuantizedMatrices(f"GPTQ {'/'.join(dict.fromkeys(kinds))}", matrices)


def _settings(entry: Mapping[str, Any], modules: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return each module's settings; the first matching expression of `dynamic` overrides the folder's.

    An expression after "-:" matches modules that are not quantized.

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


def _bits_and_size(entry: Mapping[str, Any], checker: LayoutChecker) -> tuple[int, int]:
    return checker.read_bits(entry, range(2, 9)), checker.read_group_size(entry)


def _read_gptq_matrix(checker: LayoutChecker, module: str, bits: int, size: int, offset: int) -> EncodedMatrix | None:
    """Read a module's matrix; return None if part of it is wrong, which `checker` then lists.

    Args:
        size: number of inputs in a group, -1 for all of them.
        offset: number that was subtracted from the stored zero points.
    """
    stored = checker.stored
    qweight, qzeros, scales, g_idx = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    words = checker.check_shape(qweight, 2, torch.int32)
    if words is None:
        return None
    width, outputs = words[0] * 32 // bits, words[1]
    has_order = g_idx in stored.tensors
    if has_order:
        stated = checker.check_shape(g_idx, 1, torch.int32, torch.int64)
        width = stated[0] if stated else width
    if words[0] != packed_words(width, bits):
        checker.problems.append(
            f"{qweight} is {list(words)}, not {[packed_words(width, bits), outputs]}: {width} inputs of {bits} bits"
        )
    groups = 1 if size == -1 else -(-width // size)
    fits = [
        checker.check_tensor(qzeros, (groups, packed_words(outputs, bits)), torch.int32),
        checker.check_tensor(scales, (groups, outputs)),
    ]
    order = stored.read(g_idx).long() if has_order else torch.arange(width) // (width if size == -1 else size)
    outside = order[(order < 0) | (order >= groups)]
    if len(outside):
        checker.problems.append(f"{g_idx} refers to group {int(outside[0])} of only {groups}")
    if not all(fits) or len(outside):
        return None

    def rows(indices: Tensor) -> Tensor:
        codes = _unpack_codes(stored.read(qweight)[:, indices].T, bits, width)
        zeros = _unpack_codes(stored.read(qzeros), bits, outputs)[:, indices] + offset & (1 << bits) - 1
        scale = stored.read(scales)[:, indices].float()
        return (codes - zeros.T[:, order]) * scale.T[:, order]

    names = (qweight, qzeros, scales, *([g_idx] if has_order else []))
    return EncodedMatrix((outputs, width), names, stored.tensors[scales].dtype, rows)


def _unpack_codes(words: Tensor, bits: int, length: int) -> Tensor:
    """Unpack unsigned codes, int16 [..., length]."""
    return unpack(words.contiguous(), bits, length).to(torch.int16) + (1 << bits - 1)


def _refuse_zero_points_of_zero(checker: LayoutChecker, module: str, bits: int) -> None:
    """Add a problem if a module of version 1 has a zero point of 0, which overflowed to −1."""
    name, stored = f"{module}.qzeros", checker.stored
    zeros = _unpack_codes(stored.read(name), bits, stored.tensors[f"{module}.scales"].shape[1])
    if (zeros == (1 << bits) - 1).any():
        checker.problems.append(
            f"{name} has zero points of 0, which version 1 cannot store and libraries read differently: write "
            "it as gptq_v2 with the library that made it"
        )


_AWQ_BITS = 4
_IN_A_WORD = 32 // _AWQ_BITS
# Position in a word of each of its eight outputs.
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


@register("awq")
def read_awq(entry: Mapping[str, Any], stored: Checkpoint) -> QuantizedMatrices:
    """Read the matrices of an AWQ folder, version "gemm": eight 4-bit outputs per int32 word, in AWQ's own order.

    A module has qweight int32 [in, out/8], qzeros int32 [groups, out/8] and scales [groups, out]. A group consists of g
    neighbouring inputs: w[o, i] = scales[i // g, o] · (q[i, o] − z[i // g, o]).

    Raises:
        CheckpointError: tensors or settings do not match the layout; the message names the first.

    Source: AutoAWQ 0.2.9, utils/packing_utils.py.
    """
    checker = LayoutChecker(stored, "awq")
    checker.read_bits(entry, range(_AWQ_BITS, _AWQ_BITS + 1))
    # Newer versions of transformers call the version "format".
    checker.check_settings(entry, dict.fromkeys(("version", "format"), ("gemm", "GEMM")))
    if entry.get("backend") == "llm-awq":
        checker.problems.append("backend of quantization_config is 'llm-awq', whose words have another order")
    size = checker.read_group_size(entry)
    checker.require_valid()
    matrices = {
        f"{module}.weight": matrix
        for module in checker.modules_with(".qweight")
        if (matrix := _read_awq_matrix(checker, module, size))
    }
    checker.require_valid()
    return QuantizedMatrices(f"AWQ {_AWQ_BITS}{'' if size == -1 else f':g{size}'}", matrices)


def _read_awq_matrix(checker: LayoutChecker, module: str, size: int) -> EncodedMatrix | None:
    """Read a module's matrix; return None if part of it is wrong, which `checker` then lists."""
    stored = checker.stored
    qweight, qzeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    words = checker.check_shape(qweight, 2, torch.int32)
    if words is None:
        return None
    width, outputs = words[0], words[1] * _IN_A_WORD
    in_group = width if size == -1 else size
    groups = -(-width // in_group)
    fits = [
        checker.check_tensor(qzeros, (groups, words[1]), torch.int32),
        checker.check_tensor(scales, (groups, outputs)),
    ]
    if not all(fits):
        return None
    order = torch.arange(width) // in_group

    def rows(indices: Tensor) -> Tensor:
        scale = stored.read(scales)[:, indices].float()
        zeros, codes = _read_codes(stored.read(qzeros), indices), _read_codes(stored.read(qweight), indices)
        return (codes - zeros[:, order]) * scale.T[:, order]

    return EncodedMatrix((outputs, width), (qweight, qzeros, scales), stored.tensors[scales].dtype, rows)


def _read_codes(words: Tensor, indices: Tensor) -> Tensor:
    """Read the codes of some outputs, int32 [n, inputs or groups]."""
    shifts = _AWQ_BITS * _PLACES[indices % _IN_A_WORD]
    return (words[:, indices // _IN_A_WORD] >> shifts.int() & (1 << _AWQ_BITS) - 1).T
