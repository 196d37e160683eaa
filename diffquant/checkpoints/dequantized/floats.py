"""Reads matrices of 4- and 8-bit floats with scales, which libraries store in the same way under different names.

Codes are 8-bit floats in their torch dtype, or E2M1, two per byte with the even column in the low half. A scale is per
tensor, expert, output channel, block of both axes, or group along the input. Groups of 32 share a power of two (uint8,
E8M0). Groups of 16 share an e4m3 scale, which is multiplied (ModelOpt) or divided (compressed-tensors) by a float32
per tensor or expert.

Source: nvidia-modelopt 0.47, torch/quantization/qtensor and torch/export; MotifTechnologies' vLLM port,
tools/motif_nvfp4_quantize_ckpt.py; compressed-tensors 0.20; transformers 5.23,
integrations/finegrained_fp8.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_config import block_shape
from diffquant.checkpoints.dequantized import EncodedMatrix, QuantizedMatrices, register
from diffquant.checkpoints.dequantized.checker import FLOAT8, LayoutChecker
from diffquant.checkpoints.reader import Checkpoint
from diffquant.recipe.numbers.formats import format_named
from diffquant.support.devices import DTYPES

POWERS = (torch.uint8, torch.float8_e8m0fnu)
# (the stored scales, int64 indices [n] of rows) -> the scales of these rows: float32 [n, 1], [n, in] or [].
Spread = Callable[[Tensor, Tensor], Tensor]


def read_float_matrix(
    checker: LayoutChecker,
    codes: str,
    scales: str,
    *,
    multiplier: str | None = None,
    divisor: str | None = None,
    group: int | None = None,
    block: tuple[int, int] | None = None,
    unused: tuple[str, ...] = (),
) -> tuple[str, EncodedMatrix] | None:
    """Return the name of a matrix's number format, and the matrix; on a problem, add it to `checker` and return None.

    Args:
        codes, scales: names of the tensors.
        multiplier, divisor: name of the tensor, with one number or one per expert, that multiplies or divides the e4m3
            scales.
        group: number of neighbouring inputs that share a 16-bit scale, if the folder states it.
        block: height and width of the blocks that share a scale, if the folder states them.
        unused: names of further tensors of the matrix, which are not read.
    """
    stored = checker.stored
    info, scale_info = stored.tensors[codes], stored.tensors.get(scales)
    if scale_info is None:
        checker.problems.append(f"{codes} is {info.dtype}, and {scales} is missing")
        return None
    if len(info.shape) not in (2, 3) or 0 in info.shape:
        checker.problems.append(f"{codes} is {list(info.shape)}, expected two axes, or three with experts")
        return None
    is_packed = info.dtype not in FLOAT8
    shape = (*info.shape[:-1], 2 * info.shape[-1]) if is_packed else info.shape
    above = multiplier or divisor
    kind, size = _kind(info.dtype, scale_info.dtype, group, above in stored.tensors)
    spread = make_scale_picker(scale_info.shape, shape, size, block) if kind else None
    if spread is None:
        checker.problems.append(
            f"{codes} is {info.dtype} {list(info.shape)}, which does not fit the scale {scale_info.dtype} "
            f"{list(scale_info.shape)}{'' if above in stored.tensors else ' without a scale per tensor'}"
        )
        return None
    has_above = kind == "NVFP4" and above is not None
    over = make_scale_picker(stored.tensors[above].shape, shape) if has_above and above else None
    if has_above and over is None:
        checker.problems.append(
            f"{above} is {list(stored.tensors[above or ''].shape)}, expected one number, or one per expert"
        )
        return None

    def rows(indices: Tensor) -> Tensor:
        picked = stored.read(codes).flatten(0, -2)[indices]
        values = _decode_e2m1(picked) if is_packed else picked.float()
        scale = spread(stored.read(scales), indices)
        if over is not None and above is not None:
            whole = over(stored.read(above).float(), indices)
            # In each library's order of operations, so that results are equal bit for bit.
            scale = scale * whole if multiplier else scale / whole
        return values * scale

    names = (codes, scales, *([above] if above and above in stored.tensors else []), *unused)
    return kind, EncodedMatrix(tuple(shape), names, model_dtype(stored.config), rows)


def _kind(codes: torch.dtype, scales: torch.dtype, group: int | None, has_above: bool) -> tuple[str, int | None]:
    """Return the number format with these dtypes and its group size, or ("", None) if there is none."""
    if scales in POWERS:
        return ("MXFP8" if codes in FLOAT8 else "MXFP4"), 32
    if codes in FLOAT8:
        return ("FP8", group) if scales.is_floating_point and scales.itemsize > 1 else ("", None)
    return ("NVFP4", 16) if scales == torch.float8_e4m3fn and has_above else ("", None)


def make_scale_picker(
    scales: tuple[int, ...], shape: tuple[int, ...], group: int | None = None, block: tuple[int, int] | None = None
) -> Spread | None:
    """Return the function that picks the scales of given rows of a matrix, or None if the shapes do not fit.

    Args:
        scales: shape of the stored scales.
        shape: shape of the matrix [..., out, in].
        group: number of neighbouring inputs that share a scale, if known.
        block: height and width of the blocks that share a scale, if known.
    """
    *lead, height, width = shape
    experts, stated = math.prod(lead), tuple(n for n in scales if n != 1)
    if not stated:
        return lambda scale, _indices: _to_float32(scale).reshape(())
    if block is not None:
        down, across = block
        grid = (*lead, -(-height // down), -(-width // across))
        # ModelOpt adds an axis of size one to each of the two.
        if stated == tuple(n for n in grid if n != 1):
            tiles = grid[-2]

            def of_blocks(scale: Tensor, indices: Tensor) -> Tensor:
                at = indices // height * tiles + indices % height // down
                return _pick_scales(scale.reshape(experts * tiles, -1), at).repeat_interleave(across, -1)[:, :width]

            return of_blocks
    if lead and stated == (experts,) and scales[0] == experts:
        return lambda scale, indices: _pick_scales(scale.reshape(-1, 1), indices // height)
    if scales in ((*lead, height), (*lead, height, 1)):
        return lambda scale, indices: _pick_scales(scale.reshape(-1, 1), indices)
    if group is not None and scales == (*lead, height, -(-width // group)):

        def of_groups(scale: Tensor, indices: Tensor) -> Tensor:
            return _pick_scales(scale.flatten(0, -2), indices).repeat_interleave(group, -1)[:, :width]

        return of_groups
    return None


def model_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that config.json gives the model, to which libraries dequantize; bfloat16 if it gives none."""
    return DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), torch.bfloat16)


def _pick_scales(scale: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of scales in float32; for all experts they would take a gigabyte."""
    return _to_float32(scale.view(torch.uint8)[rows].view(scale.dtype) if scale.itemsize == 1 else scale[rows])


def _to_float32(scale: Tensor) -> Tensor:
    """Convert scales to float32; uint8 scales are exponents (E8M0)."""
    return format_named("mxfp4").unpack_scale(scale) if scale.dtype == torch.uint8 else scale.float()


def _decode_e2m1(packed: Tensor) -> Tensor:
    """Decode E2M1 codes, two per byte."""
    nibbles = format_named("mxfp4")
    return nibbles.levels_of(nibbles.unpack(packed.view(torch.uint8), 2 * packed.shape[-1]), torch.float32)


_FP8_SCALES = ("_scale_inv", ".weight_scale")


@register("fp8")
def read_fp8(entry: Mapping[str, Any], stored: Checkpoint) -> QuantizedMatrices:
    """Read the matrices of an fp8 folder of DeepSeek, transformers or AutoFP8.

    A module has weight float8_e4m3fn and weight_scale_inv, which multiplies despite its name, [⌈out/128⌉, ⌈in/128⌉] for
    `weight_block_size` [128, 128]. Experts in one tensor T have T_scale_inv. A static `activation_scheme` adds
    activation_scale. AutoFP8 has weight_scale, which is one number, and input_scale instead.

    Raises:
        CheckpointError: tensors or settings do not match the layout; the message names the first.
    """
    checker = LayoutChecker(stored, "fp8")
    size = entry.get("weight_block_size")
    block = block_shape(size)
    if size is not None and block is None:
        checker.problems.append(f"weight_block_size of quantization_config is {size!r}, expected two positive numbers")
    checker.require_valid()
    names = [name for name in stored.tensors if name.endswith(_FP8_SCALES)]
    scales = {name: name.removesuffix("_inv").removesuffix("_scale") for name in names}
    found = _read_scaled(checker, scales, block)
    checker.require_valid()
    unused = tuple(name for name in stored.tensors if name.endswith(("activation_scale", "input_scale")))
    matrices = {name: matrix for name, (_, matrix) in found.items()}
    note = "its engines also round inputs of packed weights to eight bits, which diffquant does not compute"
    return QuantizedMatrices(f"FP8{f' in blocks of {block[0]}x{block[1]}' if block else ''}", matrices, unused, note)


def _read_scaled(
    checker: LayoutChecker, scales: Mapping[str, str], block: tuple[int, int] | None
) -> dict[str, tuple[str, EncodedMatrix]]:
    """Read each matrix and its number format, given the codes' name for each scale's; `checker` collects problems."""
    found = {}
    for scale, codes in scales.items():
        if codes not in checker.stored.tensors:
            checker.problems.append(f"{scale} exists, but {codes} is missing")
        elif matrix := read_float_matrix(checker, codes, scale, multiplier=f"{scale}_2", block=block):
            found[codes] = matrix
    checker.check_all_scaled(found)
    return found


_MODELOPT_SCALE = "weight_scale"
# Tensors that would have to be multiplied into a weight, which is not supported.
_FOLDED = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
_OF_CACHES = (".k_scale", ".v_scale", ".k_bias", ".v_bias")
# Shape of FP8 blocks in all of ModelOpt's exports.
_MODELOPT_BLOCK = (128, 128)
_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4",
    "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "MXFP4", "MXFP8", "MIXED_PRECISION",
)  # fmt: skip


@register("modelopt_nvfp4")
@register("modelopt_fp4")
@register("modelopt")
def read_modelopt(entry: Mapping[str, Any], stored: Checkpoint) -> QuantizedMatrices:
    """Read the matrices of a ModelOpt folder, or of Motif-3's own NVFP4 release.

    A module has weight and weight_scale. NVFP4 adds weight_scale_2, rounded activations add input_scale, and an FP8
    cache adds k_scale and v_scale to attention's projections. Experts in one tensor have no ".weight", and their
    tensors are named like gate_up_proj_weight_scale. Dtypes and shapes show each tensor's format, so a folder may mix
    formats. In Motif-3's release, `modelopt_nvfp4`, only experts are packed, with one weight_scale_2 for each expert.

    Raises:
        CheckpointError: tensors or settings do not match the layout; the message names the first.
    """
    checker = LayoutChecker(stored, "modelopt")
    algorithm = entry.get("quant_algo")
    if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
        checker.problems.append(
            f"quant_algo of quantization_config is {algorithm!r}, expected {', '.join(_ALGORITHMS)}"
        )
    checker.require_valid()
    inputs = [name for name in stored.tensors if name.endswith("input_scale")]
    scales = {}
    for scale in [name for name in stored.tensors if name.endswith(_MODELOPT_SCALE)]:
        stem = scale.removesuffix(_MODELOPT_SCALE)
        # "M." of a module, "T_" of experts in one tensor T.
        scales[scale] = codes = f"{stem}weight" if stem.endswith(".") else stem.removesuffix("_")
        checker.problems += [
            f"{codes} has a {each}, which is not supported" for each in _FOLDED if stem + each in stored.tensors
        ]
    found = _read_scaled(checker, scales, _MODELOPT_BLOCK)
    checker.require_valid()
    caches = [name for name in stored.tensors if name.endswith(_OF_CACHES) and "_proj" in name.rpartition(".")[0]]
    kinds = "/".join(dict.fromkeys(kind for kind, _ in found.values()))
    matrices = {name: matrix for name, (_, matrix) in found.items()}
    return QuantizedMatrices(f"ModelOpt {kinds}", matrices, (*inputs, *caches), _modelopt_note(inputs, caches))


def _modelopt_note(inputs: list[str], caches: list[str]) -> str:
    rounded = [what for what, names in (("inputs of packed weights", inputs), ("keys and values", caches)) if names]
    if not rounded:
        return ""
    return f"its engines also round {' and '.join(rounded)}, whose {len(inputs) + len(caches)} scales are not used here"
