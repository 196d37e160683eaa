"""ModelOpt's layout of floats, as Hugging Face folders have it, and the one of Motif-3's own NVFP4 release.

A module has weight, weight_scale, with NVFP4 weight_scale_2, and input_scale if engines round activations; attention
has k_scale and v_scale of an FP8 cache beside its projections. Experts in one tensor have no ".weight", and their
tensors are called after it: gate_up_proj, gate_up_proj_weight_scale, gate_up_proj_weight_scale_2. Tensors tell their
own format, so that a folder may mix them. Motif-3's release is `modelopt_nvfp4`: its experts alone are packed, one
weight_scale_2 for each.

Source: nvidia-modelopt 0.47, torch/export; MotifTechnologies' vLLM port, tools/motif_nvfp4_quantize_ckpt.py.
"""

from collections.abc import Mapping
from typing import Any

from diffquant.formats.dequantized.base import Contents, Parts, RoundedMatrix, register
from diffquant.formats.dequantized.floats import float_matrix, without_scales
from diffquant.formats.reader import Checkpoint

_SCALE = "weight_scale"
# Tensors that a weight is made of as well, which would have to be multiplied in.
_FOLDED = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
_OF_CACHES = (".k_scale", ".v_scale", ".k_bias", ".v_bias")
# What blocks of FP8 are in all of its exports.
_BLOCK = (128, 128)
_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "FP8_PB_REAL",
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "MXFP4",
    "MXFP8",
    "MIXED_PRECISION",
)


@register("modelopt_nvfp4")
@register("modelopt_fp4")
@register("modelopt")
def read_modelopt(entry: Mapping[str, Any], stored: Checkpoint) -> Contents:
    """The matrices of a ModelOpt folder.

    Raises:
        CheckpointError: tensors or settings are not what the layout has; the first are named.
    """
    parts = Parts(stored)
    algorithm = entry.get("quant_algo")
    if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
        parts.problems.append(
            f"quant_algo of quantization_config is {algorithm!r}, and read is {', '.join(_ALGORITHMS)}"
        )
    parts.check("modelopt")
    found: dict[str, tuple[str, RoundedMatrix]] = {}
    inputs = [name for name in stored.tensors if name.endswith("input_scale")]
    for scale in [name for name in stored.tensors if name.endswith(_SCALE)]:
        stem = scale.removesuffix(_SCALE)
        # "M." of a module, "T_" of experts in one tensor T.
        codes = f"{stem}weight" if stem.endswith(".") else stem.removesuffix("_")
        parts.problems += [
            f"{codes} has a {each}, which is not multiplied in" for each in _FOLDED if stem + each in stored.tensors
        ]
        if codes not in stored.tensors:
            parts.problems.append(f"{scale} is there without {codes}")
        elif matrix := float_matrix(stored, parts, codes, scale, multiplier=f"{scale}_2", block=_BLOCK):
            found[codes] = matrix
    parts.problems += without_scales(stored, found)
    parts.check("modelopt")
    caches = [name for name in stored.tensors if name.endswith(_OF_CACHES) and "_proj" in name.rpartition(".")[0]]
    kinds = "/".join(dict.fromkeys(kind for kind, _ in found.values()))
    matrices = {name: matrix for name, (_, matrix) in found.items()}
    return Contents(f"ModelOpt {kinds}", matrices, (*inputs, *caches), _note(inputs, caches))


def _note(inputs: list[str], caches: list[str]) -> str:
    rounded = [what for what, names in (("inputs of packed weights", inputs), ("keys and values", caches)) if names]
    if not rounded:
        return ""
    return f"its engines also round {' and '.join(rounded)}, whose {len(inputs) + len(caches)} scales are not used here"
