"""AWQ's layout, version "gemm": eight outputs of 4 bits in a word, in an order of its own.

A module has qweight int32 [in, out/8], qzeros int32 [groups, out/8] and scales [groups, out]; a group is neighbouring
inputs: w[o, i] = scales[i // g, o] · (q[i, o] − z[i // g, o]).

Source: AutoAWQ 0.2.9, utils/packing_utils.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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

_BITS = 4
_IN_A_WORD = 32 // _BITS
# The place in a word of each of its outputs.
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


@register("awq")
def read_awq(entry: Mapping[str, Any], stored: Checkpoint) -> Contents:
    """The matrices of an AWQ folder.

    Raises:
        CheckpointError: tensors or settings are not what the layout has; the first are named.
    """
    parts = Parts(stored)
    count(entry, "bits", range(_BITS, _BITS + 1), parts.problems)
    # Newer transformers calls it format.
    check_plain(entry, dict.fromkeys(("version", "format"), ("gemm", "GEMM")), parts.problems)
    if entry.get("backend") == "llm-awq":
        parts.problems.append("backend of quantization_config is 'llm-awq', whose words have another order")
    size = group_size(entry, parts.problems)
    parts.check("awq")
    matrices = {
        f"{module}.weight": matrix
        for module in modules_with(stored, ".qweight")
        if (matrix := _matrix(stored, parts, module, size))
    }
    parts.check("awq")
    return Contents(f"AWQ {_BITS}{'' if size == -1 else f':g{size}'}", matrices)


def _matrix(stored: Checkpoint, parts: Parts, module: str, size: int) -> RoundedMatrix | None:
    """A module's matrix; None if something of it is wrong, which `parts` has then."""
    qweight, qzeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    words = parts.shape(qweight, 2, torch.int32)
    if words is None:
        return None
    width, outputs = words[0], words[1] * _IN_A_WORD
    in_group = width if size == -1 else size
    groups = -(-width // in_group)
    fits = [parts.expect(qzeros, (groups, words[1]), torch.int32), parts.expect(scales, (groups, outputs))]
    if not all(fits):
        return None
    order = torch.arange(width) // in_group

    def rows(indices: Tensor) -> Tensor:
        scale = stored.read(scales)[:, indices].float()
        zeros, codes = _outputs(stored.read(qzeros), indices), _outputs(stored.read(qweight), indices)
        return (codes - zeros[:, order]) * scale.T[:, order]

    return RoundedMatrix((outputs, width), (qweight, qzeros, scales), stored.tensors[scales].dtype, rows)


def _outputs(words: Tensor, indices: Tensor) -> Tensor:
    """The codes of some outputs, int32 [n, inputs or groups]."""
    shifts = _BITS * _PLACES[indices % _IN_A_WORD]
    return (words[:, indices // _IN_A_WORD] >> shifts.int() & (1 << _BITS) - 1).T
