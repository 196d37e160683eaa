"""GPTQ as a rounding: codes that lose least at a layer's output, over the layer's own inputs."""

from collections.abc import Mapping

from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.recipe.rounding import ROUNDING_OPTIONS, RoundingSettings
from diffquant.scheme import Scheme
from diffquant.source.source import Source, open_source
from diffquant.source.weight_source import WeightSource
from diffquant.support.progress import Progress


class Gptq(Rounding):
    """Error compensation weighed by the inputs' products; a weight outside the layers is rounded as by mse."""

    name = "gptq"
    needs_text = True
    options = frozenset(ROUNDING_OPTIONS)
    # 150 s of two cores for SmolLM2-135M and 16,384 tokens (bench/results/quantize-roundings.json).
    work = 6.5

    def prepare(
        self,
        source: Source | WeightSource,
        schemes: Mapping[str, Scheme],
        settings: RoundingSettings,
        progress: Progress,
    ) -> Rounder:
        # It runs a model, which the other rules and this one's name do without.
        from diffquant.quantization.roundings.gptq.sequence import rounded_layers

        return rounded_layers(open_source(source), schemes, settings, progress)


register(Gptq())
