"""compressed-tensors folders that also quantize activations or caches, or pack weights in layouts that diffquant lacks.

Folders with only symmetric weight scales are read packed (`checkpoints.compressed_tensors`). Dequantized here are
weights of models with quantized activations or caches, FP8 in blocks that are not square, `naive-quantized`,
`int-quantized`, integers with zero points, and groups in any order (weight_g_idx). A module has weight_packed or
weight, weight_scale, weight_global_scale (a divisor), weight_zero_point (int8, or packed along the outputs), and scales
of its inputs and outputs.

Source: compressed-tensors 0.20, compressors; quantization/lifecycle/forward.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_config import (
    REORDERED,
    block_shape,
    has_input_schemes,
    has_own_kv_cache_scheme,
    has_square_blocks,
    has_targets,
)
from diffquant.checkpoints.compressed_targets import pick_targets
from diffquant.checkpoints.compressed_tensors import GLOBAL, PACKED, SCALE, SHAPE
from diffquant.checkpoints.dequantized import EncodedMatrix, QuantizedMatrices, register
from diffquant.checkpoints.dequantized.checker import LayoutChecker
from diffquant.checkpoints.dequantized.floats import make_scale_picker, model_dtype, read_float_matrix
from diffquant.checkpoints.reader import Checkpoint
from diffquant.errors import CheckpointError
from diffquant.recipe.numbers.packing import packed_words, unpack

_ZERO, _ORDER = ".weight_zero_point", ".weight_g_idx"
_FORMATS = (
    "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized", "mxfp8-quantized",
    "naive-quantized", "nvfp4-pack-quantized", "pack-quantized",
)  # fmt: skip
_ROUNDED_ALSO = {"input_activations": "inputs", "output_activations": "outputs"}
_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_OF_CACHES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")

# Locations of transforms that were applied to weights before they were stored.
_OF_WEIGHTS = ("weight_input", "weight_output")

Groups = Mapping[str, Mapping[str, Any]]


@register("compressed-tensors")
def read_compressed_tensors(entry: Mapping[str, Any], stored: Checkpoint) -> QuantizedMatrices | None:
    """Read the matrices of a compressed-tensors folder, or return None if it is read packed.

    Raises:
        CheckpointError: tensors or settings do not match the layouts; the message names the first.
    """
    if has_input_schemes(stored.config):
        return None
    if online := _online_transforms(entry.get("transform_config")):
        raise CheckpointError(
            f"{stored.path}: transform_config of quantization_config rotates activations while the model runs "
            f"({', '.join(online)}), which is not supported"
        )
    groups = entry.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        return None
    has_cache = entry.get("kv_cache_scheme") and not has_own_kv_cache_scheme(stored.config)
    if not has_cache and not any(map(_is_read_here, [{"format": entry.get("format")}, *groups.values()])):
        return None
    checker = LayoutChecker(stored, "compressed-tensors")
    formats = [entry.get("format"), *(group["format"] for group in groups.values() if group.get("format"))]
    checker.problems += [f"its format is {each!r}" for each in formats if each not in _FORMATS]
    checker.problems += [f"{name} has no list of targets" for name, group in groups.items() if not has_targets(group)]
    checker.require_valid()
    targets = {
        target: weights
        for group in groups.values()
        if isinstance(weights := group.get("weights"), Mapping)
        for target in group["targets"]
    }
    kinds: list[str] = []
    matrices: dict[str, EncodedMatrix] = {}
    for module, weights in pick_targets(checker.modules_with(SCALE), targets).items():
        if weights is None:
            checker.problems.append(f"no group of quantization_config covers {module}")
        elif read := _read_matrix(checker, module, weights):
            kinds.append(read[0])
            matrices[f"{module}.weight"] = read[1]
    checker.check_all_scaled(matrices)
    checker.require_valid()
    caches = tuple(name for name in stored.tensors if name.endswith(_OF_CACHES))
    kind = f"compressed-tensors {'/'.join(dict.fromkeys(kinds))}"
    return QuantizedMatrices(kind, matrices, caches, _note(entry, groups))


def _online_transforms(config: Any) -> list[str]:
    """List transforms that an engine has to compute; those of weights are already applied to the stored weights."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else config
    if not isinstance(groups, Mapping):
        return ["its config_groups cannot be read"] if groups else []
    return [str(name) for name, group in groups.items() if not _is_offline(group)]


def _is_offline(group: Any) -> bool:
    applied = group.get("apply") if isinstance(group, Mapping) else None
    return isinstance(applied, list) and all(
        isinstance(each, Mapping) and each.get("location") in _OF_WEIGHTS for each in applied
    )


def _is_read_here(group: Mapping[str, Any]) -> bool:
    """Return whether a group's kind is not read packed."""
    weights = group.get("weights")
    return (
        any(group.get(key) for key in _ROUNDED_ALSO)
        or group.get("format") in ("int-quantized", "naive-quantized")
        or (
            isinstance(weights, Mapping)
            and (
                weights.get("symmetric") is False
                or (weights.get("strategy") == "block" and not has_square_blocks(weights.get("block_structure")))
                or weights.get("actorder") in REORDERED
            )
        )
    )


def _read_matrix(checker: LayoutChecker, module: str, weights: Mapping[str, Any]) -> tuple[str, EncodedMatrix] | None:
    """Read a module's number format and matrix; return None on problems, which `checker` then lists."""
    tensors = checker.stored.tensors
    codes = module + (PACKED if module + PACKED in tensors else ".weight")
    if codes not in tensors:
        checker.problems.append(f"{codes} is missing")
        return None
    size = weights.get("group_size")
    group = size if type(size) is int and size > 0 else None
    unused = tuple(f"{module}.{each}" for each in _UNUSED if f"{module}.{each}" in tensors)
    if weights.get("type") == "float":
        structure = weights.get("block_structure")
        in_blocks = weights.get("strategy") == "block"
        block = block_shape(structure) if in_blocks else None
        if in_blocks and block is None:
            checker.problems.append(f"block_structure of {module} is {structure!r}, expected two positive numbers")
            return None
        return read_float_matrix(
            checker, codes, module + SCALE, divisor=module + GLOBAL, group=group, block=block, unused=unused
        )
    return _read_integers(checker, module, codes, weights, group, unused)


def _read_integers(
    checker: LayoutChecker,
    module: str,
    codes: str,
    weights: Mapping[str, Any],
    group: int | None,
    unused: tuple[str, ...],
) -> tuple[str, EncodedMatrix] | None:
    stored, bits, is_packed = checker.stored, weights.get("num_bits"), codes.endswith(PACKED)
    if weights.get("type", "int") != "int" or type(bits) is not int or not 2 <= bits <= 8:
        checker.problems.append(
            f"{module} has {bits!r} bits of type {weights.get('type')!r}; supported are integers of 2 to 8 bits"
        )
        return None
    words = checker.check_shape(codes, 2, torch.int32 if is_packed else torch.int8)
    if words is None or (is_packed and not checker.check_tensor(module + SHAPE, (2,), torch.int64, torch.int32)):
        return None
    outputs, width = stored.read(module + SHAPE).tolist() if is_packed else words
    if is_packed and words != (outputs, packed_words(width, bits)):
        checker.problems.append(f"{codes} is {list(words)}, not {[outputs, packed_words(width, bits)]}")
        return None
    scale_shape = checker.check_shape(module + SCALE, len(stored.tensors[module + SCALE].shape))
    if scale_shape is None:
        return None
    order = _read_order(checker, module, width, scale_shape[-1] if scale_shape else 1)
    spread = make_scale_picker(scale_shape, (outputs, width), group)
    if order is not None and len(scale_shape) == 2 and scale_shape[0] == outputs:

        def spread(scale: Tensor, indices: Tensor) -> Tensor:
            return scale[indices][:, order]

    if spread is None:
        checker.problems.append(
            f"{module + SCALE} is {list(scale_shape)}, which does not fit a matrix {[outputs, width]}"
        )
        return None
    has_zeros = weights.get("symmetric") is False or module + _ZERO in stored.tensors
    # Zero points per tensor are not packed.
    packs_zeros = is_packed and weights.get("strategy") in ("group", "channel")
    if has_zeros and not _expect_zeros(checker, module + _ZERO, scale_shape, outputs, bits, packs_zeros):
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
    return kind, EncodedMatrix((outputs, width), names, model_dtype(stored.config), rows)


def _read_order(checker: LayoutChecker, module: str, width: int, groups: int) -> Tensor | None:
    """Read the group index of each input, or return None if groups are consecutive inputs or the order is invalid."""
    name, stored = module + _ORDER, checker.stored
    if name not in stored.tensors or not checker.check_tensor(name, (width,), torch.int32, torch.int64):
        return None
    order = stored.read(name).long()
    # All -1 means that no order was computed.
    if (order == -1).all():
        return None
    if len(outside := order[(order < 0) | (order >= groups)]):
        checker.problems.append(f"{name} refers to group {int(outside[0])} of only {groups}")
        return None
    return order


def _expect_zeros(
    checker: LayoutChecker, name: str, scales: tuple[int, ...], outputs: int, bits: int, is_packed: bool
) -> bool:
    if not is_packed:
        return checker.check_tensor(name, scales, torch.int8)
    if len(scales) != 2 or scales[0] != outputs:
        checker.problems.append(f"{name} is packed along {outputs} outputs, but the scales have shape {list(scales)}")
        return False
    return checker.check_tensor(name, (packed_words(outputs, bits), scales[1]), torch.int32)


def _note(entry: Mapping[str, Any], groups: Groups) -> str:
    rounded = [what for key, what in _ROUNDED_ALSO.items() if any(group.get(key) for group in groups.values())] + (
        ["keys and values"] if entry.get("kv_cache_scheme") else []
    )
    return f"its engines also round {' and '.join(rounded)}, which diffquant does not compute" if rounded else ""
