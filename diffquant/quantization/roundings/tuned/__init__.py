"""Tuned rounding: gptq's codes and scales, moved on to where a layer's output is nearest to the 16-bit model's."""

from diffquant.quantization.roundings.tuned.rule import Tuned

__all__ = ["Tuned"]
