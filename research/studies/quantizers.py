"""Weight quantizers at equal bits: ours, and what other libraries that read no text make of the same weight.

Every library quantizes and dequantizes by itself; what it stores is counted from the tensors it holds.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_tensors import SCALE, packed_shapes
from diffquant.quantization.rounded_weight import quantize_as_stored
from diffquant.quantization.roundings import Rounder
from diffquant.quantization.roundings.nearest import round_to_nearest, round_with_clipping
from diffquant.recipe.numbers.formats.codebook import Iq4Nl, Iq4Xs
from diffquant.recipe.numbers.sharing import Granularity
from diffquant.recipe.scheme import Scheme
from research.studies.model_reading import ModelReading
from research.studies.rounding_method import TIERS, Method, Over, Quantize, Quantized, by_itself, group_size

RULES = ("nearest", "mse", "gptq", "tuned")

_SCALE = torch.float16


def ours(rule: str, bits: int, least: int, options: Mapping[str, Any] = MappingProxyType({})) -> Over:
    """A rule of ours with a scale a group, with its options."""
    return _rounded(rule, lambda width: Scheme.parse(f"{bits}:g{group_size(width, least)}"), options)


def codebook(rule: str, name: str, weighted: bool = False) -> Over:
    """A rule of ours with 16 uneven levels in groups of 32, or the next larger divisor of a width.

    Args:
        name: "iq4_nl", or "iq4_xs", whose steps are of 8 groups, or of the next larger divisor.
        weighted: whether `mse` weighs errors by the mean squares of the inputs, as llama.cpp does by its imatrix.
    """

    def scheme_of(width: int) -> Scheme:
        block = group_size(width, 32)
        steps = Iq4Xs(name, block, group_size(width // block, 8))
        return Scheme(Iq4Nl(name, block) if name == "iq4_nl" else steps, Granularity("group", block))

    return _rounded(rule, cache(scheme_of), weighted=weighted)


def _rounded(
    rule: str,
    scheme_of: Callable[[int], Scheme],
    options: Mapping[str, Any] = MappingProxyType({}),
    weighted: bool = False,
) -> Over:
    def over(reading: ModelReading) -> Quantize:
        importance = reading.mean_squares if weighted else {}
        mse = Rounder(partial(round_with_clipping, importance=importance))
        data_free = {"nearest": Rounder(round_to_nearest), "mse": mse}

        def quantize(name: str, weight: Tensor) -> Quantized:
            rounder = data_free.get(rule) or reading.rounder(rule, options, scheme_of)
            scheme = scheme_of(weight.shape[1])
            scales = math.prod(packed_shapes((weight.shape[0], weight.shape[1]), scheme)[SCALE])
            steps = scheme.format.scales_per_step
            of_scale = 8 * _SCALE.itemsize if steps == 1 else 6 + 8 * _SCALE.itemsize / steps
            stored = weight.numel() * scheme.format.code_width + round(scales * of_scale)
            dtype = scheme.format.scale_dtype(_SCALE)
            return Quantized(quantize_as_stored(rounder, name, weight.float(), scheme, dtype), stored, stored)

        return quantize

    return over


def _bitsandbytes(kind: str, nested: bool) -> Over:
    def quantize(weight: Tensor) -> Quantized:
        functional = import_module("bitsandbytes.functional")
        packed, state = functional.quantize_4bit(
            weight.float(), blocksize=64, compress_statistics=nested, quant_type=kind
        )
        # Its two tables of levels are constants.
        stored = _bits(packed, state.absmax) + (_bits(state.offset, state.state2.absmax) if nested else 0)
        return Quantized(functional.dequantize_4bit(packed, state), stored, stored)

    return by_itself(quantize)


def _int8(rounds_inputs: bool) -> Over:
    """bitsandbytes' int8 with a scale a row. It is LLM.int8 where inputs are rounded, too, as it is used.

    LLM.int8 gives each row of inputs a scale, and multiplies the columns in which some input reaches 6 as they are.
    """

    def quantize(weight: Tensor) -> Quantized:
        functional = import_module("bitsandbytes.functional")
        codes, scales, _ = functional.int8_vectorwise_quant(weight)
        stored = _bits(codes, scales)
        values = functional.int8_vectorwise_dequant(codes, scales).float()
        return Quantized(values, stored, stored, _llm_int8(codes, scales) if rounds_inputs else None)

    return by_itself(quantize)


def _llm_int8(codes: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """The product as MatMul8bitLt computes it; on a processor the library's Linear8bitLt does not round its inputs."""
    functional = import_module("bitsandbytes.functional")

    def product(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        inputs, steps, outliers = functional.int8_vectorwise_quant(rows.half(), threshold=6.0)
        mixed = torch.ops.bitsandbytes.int8_mixed_scaled_mm
        y: Tensor = mixed(rows, inputs, codes, steps, scales, outliers, None)[0]
        restored: Tensor = y.float().unflatten(0, x.shape[:-1])
        return restored

    return product


def _torchao_int4(least: int) -> Over:
    """torchao's int4 with a bfloat16 scale and zero a group, as its tinygemm layouts have it."""

    def quantize(weight: Tensor) -> Quantized:
        primitives = import_module("torchao.quantization.quant_primitives")
        block = (1, group_size(weight.shape[1], least))
        kind, values = torch.bfloat16, weight.float()
        # The layouts themselves are made on accelerators alone; these are the functions they call.
        scale, zero = primitives._choose_qparams_affine_tinygemm(
            values, primitives.MappingType.ASYMMETRIC, block, torch.int32, 0, 15, 1e-6, kind, kind
        )
        codes = primitives._quantize_affine_tinygemm(values, block, scale, zero, torch.int32, 0, 15)
        restored = primitives._dequantize_affine_tinygemm(
            codes, block, scale, zero, torch.int32, 0, 15, output_dtype=torch.float32
        )
        stored = codes.numel() * 4 + _bits(scale, zero)
        return Quantized(restored, stored, stored)

    return by_itself(quantize)


def _torchao_intx(bits: int, least: int) -> Over:
    """torchao's weight-only integers of any width, asymmetric; codes lie in bytes."""

    def quantize(weight: Tensor) -> Quantized:
        quantization = import_module("torchao.quantization")
        granularity = import_module("torchao.quantization.granularity")
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        config = quantization.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{bits}"),
            granularity=granularity.PerGroup(group_size(weight.shape[1], least)),
            mapping_type=quantization.MappingType.ASYMMETRIC,
        )
        quantization.quantize_(linear, config)
        made: Any = linear.weight
        beside = _bits(made.scale, made.zero_point)
        return Quantized(made.dequantize().float(), made.qdata.numel() * bits + beside, _bits(made.qdata) + beside)

    return by_itself(quantize)


def _hqq(bits: int, group: int | None) -> Over:
    """HQQ along the input axis, the one its fast kernels read; scale and zero in float16, as `HQQLinear` keeps them."""

    def quantize(weight: Tensor) -> Quantized:
        quantizer = import_module("hqq.core.quantize").Quantizer
        packed, meta = quantizer.quantize(
            weight.float(), nbits=bits, group_size=group, axis=1, compute_dtype=_SCALE, device="cpu"
        )
        beside = {part: meta[part].to(_SCALE) for part in ("scale", "zero")}
        restored = quantizer.dequantize(packed, meta | beside | {"compute_dtype": torch.float32})
        scales = _bits(*beside.values())
        return Quantized(restored.float(), weight.numel() * bits + scales, _bits(packed) + scales)

    return by_itself(quantize)


def _bits(*tensors: Tensor) -> int:
    return 8 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _of_ours(tier: str, bits: int, least: int) -> list[Method]:
    sharing = "channel" if least == _ROW else f"g{least}"
    return [Method(f"{rule} {bits}:{sharing}", tier, ours(rule, bits, least)) for rule in RULES]


def _of_codebook(tier: str, name: str) -> list[Method]:
    return [Method(f"{rule} {name}", tier, codebook(rule, name)) for rule in RULES]


# A group that is wider than any weight is a whole row.
_ROW = 1 << 30
_FINE, _COARSE, _SIX, _LOW, _EIGHT, _FIVE, _LEAST = TIERS
METHODS = (
    *_of_ours(_FINE, 4, 32),
    *_of_codebook(_FINE, "iq4_nl"),
    Method("bitsandbytes nf4, blocks of 64", _FINE, _bitsandbytes("nf4", nested=False), "bitsandbytes"),
    Method("bitsandbytes fp4, blocks of 64", _FINE, _bitsandbytes("fp4", nested=False), "bitsandbytes"),
    Method("torchao int4, groups of 64", _FINE, _torchao_int4(64), "torchao"),
    Method("HQQ 4 bits, groups of 64", _FINE, _hqq(4, 64), "hqq"),
    *_of_ours(_COARSE, 4, 128),
    *_of_codebook(_COARSE, "iq4_xs"),
    Method("bitsandbytes nf4, double quantization", _COARSE, _bitsandbytes("nf4", nested=True), "bitsandbytes"),
    Method("bitsandbytes fp4, double quantization", _COARSE, _bitsandbytes("fp4", nested=True), "bitsandbytes"),
    Method("torchao int4, groups of 256", _COARSE, _torchao_int4(256), "torchao"),
    Method("HQQ 4 bits, groups of 256", _COARSE, _hqq(4, 256), "hqq"),
    *_of_ours(_SIX, 6, 128),
    Method("torchao int6, groups of 192", _SIX, _torchao_intx(6, 192), "torchao"),
    Method("HQQ 6 bits, groups of 256", _SIX, _hqq(6, 256), "hqq"),
    *_of_ours(_LOW, 3, 32),
    Method("torchao int3, groups of 48", _LOW, _torchao_intx(3, 48), "torchao"),
    Method("HQQ 3 bits, groups of 64", _LOW, _hqq(3, 64), "hqq"),
    *_of_ours(_EIGHT, 8, _ROW),
    Method("bitsandbytes int8, rows", _EIGHT, _int8(rounds_inputs=False), "bitsandbytes"),
    Method("bitsandbytes LLM.int8, inputs rounded too", _EIGHT, _int8(rounds_inputs=True), "bitsandbytes"),
    Method("torchao int8, rows", _EIGHT, _torchao_intx(8, _ROW), "torchao"),
    Method("HQQ 8 bits, rows", _EIGHT, _hqq(8, None), "hqq"),
    *_of_ours(_FIVE, 5, 128),
    Method("torchao int5, groups of 192", _FIVE, _torchao_intx(5, 192), "torchao"),
    Method("HQQ 5 bits, groups of 256", _FIVE, _hqq(5, 256), "hqq"),
    *_of_ours(_LEAST, 3, 128),
    Method("torchao int3, groups of 192", _LEAST, _torchao_intx(3, 192), "torchao"),
    Method("HQQ 3 bits, groups of 256", _LEAST, _hqq(3, 256), "hqq"),
)

_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "": {},
    ", unrounded inputs": {"inputs": "unrounded"},
    ", target layer": {"target": "layer"},
    ", order of activation": {"order": "activation"},
}
# gptq as it may be told to work.
VARIANTS = tuple(
    Method(f"gptq {bits}:g{least}{name}", tier, ours("gptq", bits, least, options))
    for tier, bits, least in ((_FINE, 4, 32), (_COARSE, 4, 128), (_LOW, 3, 32))
    for name, options in _OPTIONS.items()
)
