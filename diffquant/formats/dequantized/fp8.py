"""FP8 as DeepSeek's releases and transformers have it: e4m3 under scales of blocks, or one of the tensor.

A module has weight float8_e4m3fn and weight_scale_inv, which multiplies despite its name, [⌈out/128⌉, ⌈in/128⌉] for
`weight_block_size` [128, 128]. Experts in one tensor T have T_scale_inv. A static `activation_scheme` adds
activation_scale. AutoFP8 calls the two weight_scale, one number, and input_scale.

Source: transformers 5.23, integrations/finegrained_fp8.py.
"""

from collections.abc import Mapping
from typing import Any

from diffquant.formats.dequantized.base import Contents, Parts, RoundedMatrix, register
from diffquant.formats.dequantized.floats import float_matrix, without_scales
from diffquant.formats.reader import Checkpoint

_SCALES = ("_scale_inv", ".weight_scale")


@register("fp8")
def read_fp8(entry: Mapping[str, Any], stored: Checkpoint) -> Contents:
    """The matrices of an fp8 folder.

    Raises:
        CheckpointError: tensors or settings are not what the layout has; the first are named.
    """
    parts = Parts(stored)
    block = _block(entry, parts)
    parts.check("fp8")
    found: dict[str, tuple[str, RoundedMatrix]] = {}
    for scale in [name for name in stored.tensors if name.endswith(_SCALES)]:
        codes = scale.removesuffix("_inv").removesuffix("_scale")
        if codes not in stored.tensors:
            parts.problems.append(f"{scale} is there without {codes}")
        elif matrix := float_matrix(stored, parts, codes, scale, block=block):
            found[codes] = matrix
    parts.problems += without_scales(stored, found)
    parts.check("fp8")
    unused = tuple(name for name in stored.tensors if name.endswith(("activation_scale", "input_scale")))
    matrices = {name: matrix for name, (_, matrix) in found.items()}
    note = "its engines also round inputs of packed weights to eight bits, which is not computed here"
    return Contents(f"FP8{f' in blocks of {block[0]}x{block[1]}' if block else ''}", matrices, unused, note)


def _block(entry: Mapping[str, Any], parts: Parts) -> tuple[int, int] | None:
    """The `weight_block_size`, where there is one."""
    size = entry.get("weight_block_size")
    if size is None:
        return None
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    parts.problems.append(f"weight_block_size of quantization_config is {size!r}, and read are two numbers from 1 on")
    return None
