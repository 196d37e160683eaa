"""Tuning as a rounding: gptq first, then gradient descent on each layer's codes and scales together."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.recipe.rounding import RoundingSettings
from diffquant.scheme import Scheme
from diffquant.source.source import Source, open_source
from diffquant.source.weight_source import WeightSource
from diffquant.support.progress import Progress

# Each step of descent reads one window.
_WINDOW = 256


class Tuned(Rounding):
    """Codes and scales of a layer's weights, tuned together; a weight outside the layers is rounded as by mse."""

    name = "tuned"
    needs_text = True
    options = frozenset({"seed"})
    # 360 s where gptq takes its 150 s.
    work = 15.5

    def prepare(
        self,
        source: Source | WeightSource,
        schemes: Mapping[str, Scheme],
        settings: RoundingSettings,
        progress: Progress,
    ) -> Rounder:
        # It runs a model, which the other rules and this one's name do without.
        from diffquant.quantization.roundings.gptq.sequence import rounded_layers
        from diffquant.quantization.roundings.tuned.descent import tune_layer

        settings = replace(settings, window=settings.window or _WINDOW)
        tune = partial(tune_layer, seed=settings.seed or 0)
        return rounded_layers(open_source(source), schemes, settings, progress, tune, _WINDOW)


register(Tuned())
