"""GPTQ: a run over a text that rounds layer by layer, and the error compensation of each weight."""

from diffquant.quantization.roundings.gptq.rule import Gptq

__all__ = ["Gptq"]
