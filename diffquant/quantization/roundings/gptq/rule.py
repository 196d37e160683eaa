"""GPTQ as a rounding: codes that lose least at a layer's output, over the layer's own inputs."""

from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.quantization.roundings.gptq.compensation import Inputs, compensate
from diffquant.quantization.roundings.mse import round_with_clipping
from diffquant.recipe import RoundingSettings
from diffquant.scheme import Scheme
from diffquant.source.source import Source, open_source
from diffquant.source.weight_source import WeightSource
from diffquant.support.progress import Progress
from diffquant.text.corpus import load_text, text_digest

TOKENS = 16384
WINDOW = 512


class Gptq(Rounding):
    """Error compensation weighed by the inputs' products; a weight outside the layers is rounded as by mse."""

    name = "gptq"
    needs_text = True

    def prepare(self, source: Source | WeightSource, settings: RoundingSettings, progress: Progress) -> Rounder:
        # It runs a model, which the other rules and this one's name do without.
        from diffquant.quantization.roundings.gptq.inputs import layer_products

        text = load_text(settings.text)
        read = layer_products(open_source(source), text, settings.tokens or TOKENS, settings.window or WINDOW, progress)
        # Blocks of one weight, and weights with the same inputs, follow one another.
        inputs, guard = lru_cache(maxsize=4)(Inputs.of), Lock()

        def compensated(name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            if name not in read.products:
                return round_with_clipping(name, values, scheme, dtype)
            with guard:
                layer_inputs = inputs(read.products[name])
            return compensate(values, layer_inputs, scheme, dtype)

        return Rounder(compensated, {"text": text_digest(text), "tokens": read.tokens, "window": read.window})


register(Gptq())
