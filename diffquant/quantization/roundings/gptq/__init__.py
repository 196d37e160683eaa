"""Layer-by-layer rounding with calibration data: `gptq`, and `tuned`, which refines its result by gradient descent."""

from collections.abc import Callable, Mapping
from functools import partial

from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.weight_source import WeightSource
from diffquant.errors import UsageError
from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.quantization.roundings.nearest import round_with_clipping
from diffquant.recipe.rounding import ROUNDING_OPTIONS, RoundingSettings
from diffquant.recipe.scheme import Scheme
from diffquant.support.names import option_name
from diffquant.support.progress import Progress


class Gptq(Rounding):
    """GPTQ: error compensation with the inputs' second moments.

    Weights outside the decoder layers, such as the head's, are rounded as by `mse`. SmolLM2-135M with 16,384 tokens
    takes 150 s of two cores (bench/results/quantize-roundings.json).
    """

    name = "gptq"
    needs_text = True
    options = frozenset({*ROUNDING_OPTIONS, "seed"})
    # Whether rounding uses the seed, in addition to the shuffling of calibration data.
    draws = False

    def prepare(
        self,
        source: Source | WeightSource,
        schemes: Mapping[str, Scheme],
        settings: RoundingSettings,
        progress: Progress,
    ) -> Rounder:
        # Imported here, since it imports the models, which other roundings do not need.
        from diffquant.quantization.roundings.gptq.sequence import round_layers

        opened = open_source(source)
        calibration = self.read_calibration(opened, settings)
        if settings.seed is not None and not (self.draws or calibration.is_shuffled):
            raise UsageError(
                f"{option_name('seed')} affects only rows of a JSONL file or dataset, but rounding {self.name} reads "
                "plain text from its beginning; leave it out"
            )
        make = partial(round_layers, opened, schemes, settings, calibration, progress, finish=self.finish(settings))
        return Rounder(round_with_clipping, calibration.record | settings.options, make=make)

    def finish(self, settings: RoundingSettings) -> Callable[..., None] | None:  # noqa: ARG002
        """Return what `round_layers` calls with each rounded layer; nothing for plain GPTQ."""
        return None


register(Gptq())


class Tuned(Gptq):
    """Gradient descent on all codes and scales of a decoder layer, starting from those of `gptq`.

    It takes 360 s where `gptq` takes 150 s. Weights outside the decoder layers, such as the head's, are rounded as by
    `mse`.
    """

    name = "tuned"
    options = frozenset({"seed"})
    draws = True
    # Each step of descent reads one window.
    window = 256
    # With 16,384 tokens the KL is larger than AutoRound's with its default (research/pages/weights.md).
    tokens = 65536

    def finish(self, settings: RoundingSettings) -> Callable[..., None]:
        from diffquant.quantization.roundings.gptq.descent import tune_layer

        return partial(tune_layer, seed=settings.seed or 0)


register(Tuned())
