"""Folders of compressed-tensors whose engines round more than weights, or weights otherwise than diffquant writes them.

Weights under symmetric scales alone are read packed (`formats.compressed_tensors`). Here are read as floats: weights
beside quantized activations or caches, FP8 in blocks that are not square, `naive-quantized` and `int-quantized`,
integers with zero points, and groups in any order (weight_g_idx). A module has weight_packed or weight, weight_scale,
weight_global_scale (a divisor), weight_zero_point (int8, or packed along the outputs), and scales of its inputs and
outputs.

Source: compressed-tensors 0.20, compressors; quantization/lifecycle/forward.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.formats.compressed_config import REORDERED, block_of, has_targets, is_square, targets_of
from diffquant.formats.compressed_tensors import GLOBAL, PACKED, SCALE, SHAPE
from diffquant.formats.dequantized.base import Contents, Parts, RoundedMatrix, modules_with, register
from diffquant.formats.dequantized.floats import float_matrix, model_dtype, spreading, without_scales
from diffquant.formats.reader import Checkpoint
from diffquant.numbers.packing import packed_words, unpack

_ZERO, _ORDER = ".weight_zero_point", ".weight_g_idx"
_FORMATS = (
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_ROUNDED_ALSO = {"input_activations": "inputs", "output_activations": "outputs"}
_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_OF_CACHES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")

# Where a transform changes weights before they are stored.
_OF_WEIGHTS = ("weight_input", "weight_output")

Groups = Mapping[str, Mapping[str, Any]]


@register("compressed-tensors")
def read_compressed_tensors(entry: Mapping[str, Any], stored: Checkpoint) -> Contents | None:
    """The matrices of a compressed-tensors folder; None if it is read packed.

    Raises:
        CheckpointError: tensors or settings are not what the layouts have; the first are named.
    """
    if online := _online_transforms(entry.get("transform_config")):
        raise CheckpointError(
            f"{stored.path}: transform_config of quantization_config turns activations while the model runs "
            f"({', '.join(online)}), which is not computed here"
        )
    groups = entry.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        return None
    if not entry.get("kv_cache_scheme") and not any(
        map(_is_read_here, [{"format": entry.get("format")}, *groups.values()])
    ):
        return None
    parts = Parts(stored)
    formats = [entry.get("format"), *(group["format"] for group in groups.values() if group.get("format"))]
    parts.problems += [f"its format is {each!r}" for each in formats if each not in _FORMATS]
    parts.problems += [f"{name} has no list of targets" for name, group in groups.items() if not has_targets(group)]
    parts.check("compressed-tensors")
    targets = {
        target: weights
        for group in groups.values()
        if isinstance(weights := group.get("weights"), Mapping)
        for target in group["targets"]
    }
    kinds: list[str] = []
    matrices: dict[str, RoundedMatrix] = {}
    for module, weights in targets_of(modules_with(stored, SCALE), targets).items():
        if weights is None:
            parts.problems.append(f"no group of quantization_config covers {module}")
        elif read := _matrix(stored, parts, module, weights):
            kinds.append(read[0])
            matrices[f"{module}.weight"] = read[1]
    parts.problems += without_scales(stored, matrices)
    parts.check("compressed-tensors")
    caches = tuple(name for name in stored.tensors if name.endswith(_OF_CACHES))
    kind = f"compressed-tensors {'/'.join(dict.fromkeys(kinds))}"
    return Contents(kind, matrices, caches, _note(entry, groups))


def _online_transforms(config: Any) -> list[str]:
    """Names of transforms that an engine has to compute; those of weights alone stand in the weights as stored."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else config
    if not isinstance(groups, Mapping):
        return ["no groups of transforms"] if groups else []
    return [str(name) for name, group in groups.items() if not _is_offline(group)]


def _is_offline(group: Any) -> bool:
    applied = group.get("apply") if isinstance(group, Mapping) else None
    return isinstance(applied, list) and all(
        isinstance(each, Mapping) and each.get("location") in _OF_WEIGHTS for each in applied
    )


def _is_read_here(group: Mapping[str, Any]) -> bool:
    """Whether a group is of a kind that is not read packed."""
    weights = group.get("weights")
    return (
        any(group.get(key) for key in _ROUNDED_ALSO)
        or group.get("format") in ("int-quantized", "naive-quantized")
        or (
            isinstance(weights, Mapping)
            and (
                weights.get("symmetric") is False
                or (weights.get("strategy") == "block" and not is_square(weights.get("block_structure")))
                or weights.get("actorder") in REORDERED
            )
        )
    )


def _matrix(
    stored: Checkpoint, parts: Parts, module: str, weights: Mapping[str, Any]
) -> tuple[str, RoundedMatrix] | None:
    """The kind of a module's codes, and its matrix; None if something of it is wrong, which `parts` has then."""
    codes = module + (PACKED if module + PACKED in stored.tensors else ".weight")
    if codes not in stored.tensors:
        parts.problems.append(f"{codes} is missing")
        return None
    size = weights.get("group_size")
    group = size if type(size) is int and size > 0 else None
    unused = tuple(f"{module}.{each}" for each in _UNUSED if f"{module}.{each}" in stored.tensors)
    if weights.get("type") == "float":
        structure = weights.get("block_structure")
        in_blocks = weights.get("strategy") == "block"
        block = block_of(structure) if in_blocks else None
        if in_blocks and block is None:
            parts.problems.append(f"block_structure of {module} is {structure!r}, and read are two numbers from 1 on")
            return None
        return float_matrix(
            stored, parts, codes, module + SCALE, divisor=module + GLOBAL, group=group, block=block, unused=unused
        )
    return _integers(stored, parts, module, codes, weights, group, unused)


def _integers(
    stored: Checkpoint,
    parts: Parts,
    module: str,
    codes: str,
    weights: Mapping[str, Any],
    group: int | None,
    unused: tuple[str, ...],
) -> tuple[str, RoundedMatrix] | None:
    bits, is_packed = weights.get("num_bits"), codes.endswith(PACKED)
    if weights.get("type", "int") != "int" or type(bits) is not int or not 2 <= bits <= 8:
        parts.problems.append(f"{module} has {bits!r} bits of type {weights.get('type')!r}, and 2 to 8 bits are read")
        return None
    words = parts.shape(codes, 2, torch.int32 if is_packed else torch.int8)
    if words is None or (is_packed and not parts.expect(module + SHAPE, (2,), torch.int64, torch.int32)):
        return None
    outputs, width = stored.read(module + SHAPE).tolist() if is_packed else words
    if is_packed and words != (outputs, packed_words(width, bits)):
        parts.problems.append(f"{codes} is {list(words)}, not {[outputs, packed_words(width, bits)]}")
        return None
    scale_shape = parts.shape(module + SCALE, len(stored.tensors[module + SCALE].shape))
    if scale_shape is None:
        return None
    order = _order(stored, parts, module, width, scale_shape[-1] if scale_shape else 1)
    spread = spreading(scale_shape, (outputs, width), group)
    if order is not None and len(scale_shape) == 2 and scale_shape[0] == outputs:

        def spread(scale: Tensor, indices: Tensor) -> Tensor:
            return scale[indices][:, order]

    if spread is None:
        parts.problems.append(f"{module + SCALE} is {list(scale_shape)}, which belongs to no matrix {[outputs, width]}")
        return None
    has_zeros = weights.get("symmetric") is False or module + _ZERO in stored.tensors
    # Those of a whole tensor stay as they are.
    packs_zeros = is_packed and weights.get("strategy") in ("group", "channel")
    if has_zeros and not _expect_zeros(parts, module + _ZERO, scale_shape, outputs, bits, packs_zeros):
        return None

    def rows(indices: Tensor) -> Tensor:
        picked = stored.read(codes)[indices]
        values = (unpack(picked, bits, width) if is_packed else picked).float()
        if has_zeros:
            zeros = stored.read(module + _ZERO)
            plain = unpack(zeros.T.contiguous(), bits, outputs).T if packs_zeros else zeros
            values = values - spread(plain.reshape(scale_shape).float(), indices)
        return values * spread(stored.read(module + SCALE).float(), indices)

    parts_read = (SCALE, SHAPE, _ZERO, _ORDER)
    names = (codes, *(module + each for each in parts_read if module + each in stored.tensors), *unused)
    sharing = weights.get("strategy")
    kind = f"int{bits} per {f'group of {group}' if sharing == 'group' else sharing}"
    return kind, RoundedMatrix((outputs, width), names, model_dtype(stored.config), rows)


def _order(stored: Checkpoint, parts: Parts, module: str, width: int, groups: int) -> Tensor | None:
    """The group of each input, if a folder stores it; None if groups are of neighbours, or it is wrong."""
    name = module + _ORDER
    if name not in stored.tensors or not parts.expect(name, (width,), torch.int32, torch.int64):
        return None
    order = stored.read(name).long()
    # An order that was never made is stored as -1 throughout.
    if (order == -1).all():
        return None
    if len(outside := order[(order < 0) | (order >= groups)]):
        parts.problems.append(f"{name} names group {int(outside[0])} of {groups}")
        return None
    return order


def _expect_zeros(parts: Parts, name: str, scales: tuple[int, ...], outputs: int, bits: int, is_packed: bool) -> bool:
    if not is_packed:
        return parts.expect(name, scales, torch.int8)
    if len(scales) != 2 or scales[0] != outputs:
        parts.problems.append(f"{name} is packed along {outputs} outputs, and its scales are {list(scales)}")
        return False
    return parts.expect(name, (packed_words(outputs, bits), scales[1]), torch.int32)


def _note(entry: Mapping[str, Any], groups: Groups) -> str:
    rounded = [what for key, what in _ROUNDED_ALSO.items() if any(group.get(key) for group in groups.values())] + (
        ["keys and values"] if entry.get("kv_cache_scheme") else []
    )
    return f"its engines also round {' and '.join(rounded)}, which is not computed here" if rounded else ""
