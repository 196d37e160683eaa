"""GPTQ: a run over a text that collects the layers' inputs, and the error compensation made of them."""

from diffquant.quantization.roundings.gptq.rule import Gptq

__all__ = ["Gptq"]
