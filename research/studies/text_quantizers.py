"""Other libraries' quantizers that read a text: AutoRound, llm-compressor's GPTQ, and llama.cpp's with an imatrix.

Each library's own code chooses the codes and scales. What it cannot do is find its way through our models, so it is
shown their layers: AutoRound tunes a stack of them, GPTQ gets each linear layer's inputs, llama.cpp their mean squares.
"""

import ctypes
import math
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffquant.model.walk import LayerRunner
from research.studies.model_reading import ModelReading
from research.studies.quantizers import codebook
from research.studies.rounding_method import TIERS, Method, Over, Quantize, Quantized, group_size

_SCALE_BITS = 16
_FINE, _COARSE, _SIX, _LOW, _, _FIVE, _LEAST = TIERS


def llm_compressor(bits: int, least: int, observer: str) -> Over:
    """llm-compressor's GPTQ with its own order of columns, a layer at a time, on the inputs of rounded layers."""

    def prepare(reading: ModelReading) -> Quantize:
        quantization = import_module("compressed_tensors.quantization")
        quantize_weight = import_module("llmcompressor.modifiers.gptq.gptq_quantize").quantize_weight
        observers = import_module("llmcompressor.observers").Observer
        made: dict[str, Quantized] = {}

        def visit(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
            args = quantization.QuantizationArgs(
                num_bits=bits,
                symmetric=True,
                strategy="group",
                group_size=group_size(weight.shape[1], least),
                observer=observer,
                # What its GPTQModifier asks for by itself.
                actorder="static",
            )
            found = observers.load_from_registry(observer, base_name="weight", args=args)(weight).get_qparams()
            scale = found["scale"].half().float()
            products = 2 * inputs.mT @ inputs / len(inputs)
            values, _, is_nearest = quantize_weight(
                weight[None].clone(), products[None], scale[None], found["zero_point"][None], None, args
            )
            if bool(is_nearest.any()):
                raise RuntimeError(f"{name}: the products of its inputs cannot be inverted")
            stored = weight.numel() * bits + scale.numel() * _SCALE_BITS
            made[name] = Quantized(values[0], stored, stored)
            return made[name].values

        reading.walk(visit)
        return lambda name, _: made[name]

    return prepare


class _Block(torch.nn.Module):
    """A layer that takes hidden states [B, T, D] alone, as AutoRound's cache of inputs wants it."""

    def __init__(self, runner: LayerRunner[Tensor], layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._runner = runner

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._runner.run_layer(self.layer, hidden_states)


def auto_round(bits: int, least: int, seed: int | None = None, batch_size: int = 8) -> Over:
    """AutoRound's tuning of rounding and ranges, symmetric, with its own settings but for the text and its windows.

    Args:
        seed: seed of its own draws; its own by default.
        batch_size: number of windows a step; by default its own.
    """

    def prepare(reading: ModelReading) -> Quantize:
        tuner_class = import_module("auto_round").AutoRound
        model: Any = reading.model()
        decoder, runner = model.model, model.new_layer_runner(reading.windows.shape[1])
        blocks = torch.nn.ModuleList(_Block(runner, layer) for layer in runner.layers)
        decoder.layers = blocks
        decoder.run_layers = lambda x, *_: decoder.norm(torch.nn.Sequential(*blocks)(x))
        weights = {
            re.sub(r"(layers\.\d+)\.", r"\1.layer.", name.removesuffix(".weight")): weight
            for name, weight in reading.weights.items()
        }
        for name in weights:
            if ".mlp." in name:
                _pad(model.get_submodule(name))
        tuner = tuner_class(
            model,
            reading.tokenizer,
            scheme="W4A16",
            bits=bits,
            sym=True,
            group_size=least,
            seqlen=reading.windows.shape[1],
            nsamples=len(reading.windows),
            batch_size=batch_size,
            dataset=[{"input_ids": ids[None]} for ids in reading.windows],
            device_map="cpu",
            amp=False,
            enable_torch_compile=False,
            **({} if seed is None else {"seed": seed}),
        )
        tuner.quantize()
        made: dict[str, Quantized] = {}
        for name, (source, weight) in weights.items():
            linear, (rows, width) = model.get_submodule(name), weight.shape
            if not hasattr(linear, "scale"):
                raise RuntimeError(f"{source}: AutoRound left it in 16 bits; it wants multiples of 32, not {rows} rows")
            stored = weight.numel() * bits + linear.scale[:rows].numel() * _SCALE_BITS
            made[source] = Quantized(linear.weight.data[:rows, :width].float(), stored, stored)
        return lambda name, _: made[name]

    return prepare


def _pad(linear: Any) -> None:
    """Give an MLP's layer rows and columns of zeros up to the next multiple of 32, which computes the same.

    AutoRound leaves other sizes in 16 bits. The MLP's own width is padded in all three of its layers.
    """
    rows, width = linear.weight.shape
    padded = torch.nn.functional.pad(linear.weight.data, (0, -width % 32, 0, -rows % 32))
    linear.weight = torch.nn.Parameter(padded)
    linear.out_features, linear.in_features = padded.shape


def _llama_cpp(kind: str) -> Over:
    """One of llama.cpp's types for every weight, weighed by the mean squares of its inputs: its imatrix."""

    def prepare(reading: ModelReading) -> Quantize:
        library, importance = _ggml(), reading.mean_squares
        return lambda name, weight: _ggml_quantized(library, kind, weight, importance[name])

    return prepare


def _llama_cpp_mix(kind: str, better: str) -> Over:
    """llama.cpp's mix: some layers' value and down projections in a type of more bits, as its Q4_K_M has them."""

    def prepare(reading: ModelReading) -> Quantize:
        library, importance = _ggml(), reading.mean_squares
        layers = 1 + max(_layer(name) for name in reading.weights)
        better_names = {
            source
            for name, (source, _) in reading.weights.items()
            if ("v_proj" in name or "down_proj" in name) and _has_more_bits(_layer(name), layers)
        }
        return lambda name, weight: _ggml_quantized(
            library, better if name in better_names else kind, weight, importance[name]
        )

    return prepare


def _layer(name: str) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    if found is None:
        raise ValueError(f"{name} does not say which layer it is of")
    return int(found[1])


def _has_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's `use_more_bits`, src/llama-quant.cpp."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


@cache
def _ggml() -> ctypes.CDLL:
    """The library of llama.cpp's tensors, as llama-cpp-python has it."""
    package = find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
    library = ctypes.CDLL(str(Path(package.origin).parent / "lib" / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def _ggml_quantized(library: ctypes.CDLL, kind: str, weight: Tensor, importance: Tensor) -> Quantized:
    """A weight [out, in] in a type of llama.cpp, rows joined where its blocks do not divide a row.

    llama.cpp itself would leave such a weight in a larger type or in 16 bits.
    """
    gguf = import_module("gguf")
    chosen = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[chosen]
    joined = math.lcm(weight.shape[1], block) // weight.shape[1]
    values = np.ascontiguousarray(weight.float().numpy()).reshape(-1, joined * weight.shape[1])
    weights = np.tile(importance.float().numpy(), joined)
    packed = np.empty((len(values), values.shape[1] // block * block_bytes), np.uint8)
    library.ggml_quantize_chunk(
        ctypes.c_int(chosen),
        values.ctypes.data_as(ctypes.c_void_p),
        packed.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0),
        ctypes.c_int64(len(values)),
        ctypes.c_int64(values.shape[1]),
        weights.ctypes.data_as(ctypes.c_void_p),
    )
    restored = torch.from_numpy(gguf.dequantize(packed, chosen)).reshape(weight.shape)
    return Quantized(restored, 8 * packed.size, 8 * packed.size)


def _of_llm_compressor(tier: str, bits: int, least: int) -> list[Method]:
    return [
        Method(
            f"llm-compressor GPTQ, {bits} bits, groups of {least}, {observer.removeprefix('memoryless_')}",
            tier,
            llm_compressor(bits, least, observer),
            "llmcompressor",
        )
        for observer in ("memoryless_minmax", "memoryless_mse")
    ]


def _of_auto_round(tier: str, bits: int, least: int) -> Method:
    return Method(f"AutoRound {bits} bits, groups of {least}", tier, auto_round(bits, least), "auto-round")


def _of_llama_cpp(tier: str, kind: str) -> Method:
    return Method(f"llama.cpp {kind}, imatrix", tier, _llama_cpp(kind), "llama-cpp-python")


TEXT_METHODS = (
    Method("mse iq4_nl, imatrix", _FINE, codebook("mse", "iq4_nl", weighted=True)),
    Method("mse iq4_xs, imatrix", _COARSE, codebook("mse", "iq4_xs", weighted=True)),
    _of_auto_round(_FINE, 4, 32),
    *_of_llm_compressor(_FINE, 4, 32),
    _of_llama_cpp(_FINE, "Q4_0"),
    _of_llama_cpp(_FINE, "Q4_K"),
    _of_llama_cpp(_FINE, "IQ4_NL"),
    Method("llama.cpp Q4_K_M, imatrix", _FINE, _llama_cpp_mix("Q4_K", "Q6_K"), "llama-cpp-python"),
    _of_auto_round(_COARSE, 4, 128),
    *_of_llm_compressor(_COARSE, 4, 128),
    _of_llama_cpp(_COARSE, "IQ4_XS"),
    _of_auto_round(_SIX, 6, 128),
    *_of_llm_compressor(_SIX, 6, 128),
    _of_auto_round(_LOW, 3, 32),
    *_of_llm_compressor(_LOW, 3, 32),
    _of_llama_cpp(_LOW, "Q3_K"),
    _of_llama_cpp(_LOW, "IQ3_S"),
    _of_auto_round(_FIVE, 5, 128),
    *_of_llm_compressor(_FIVE, 5, 128),
    _of_llama_cpp(_FIVE, "Q5_0"),
    _of_llama_cpp(_FIVE, "Q5_K"),
    _of_auto_round(_LEAST, 3, 128),
    *_of_llm_compressor(_LEAST, 3, 128),
    _of_llama_cpp(_LEAST, "IQ3_XXS"),
)
