"""A model that reads the text of a rounding contest: what every method that needs more than a weight gets of it."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.source import Source
from diffquant.checkpoints.texts import load_text
from diffquant.checkpoints.tokens import encode_windows
from diffquant.model.causal import CausalModel
from diffquant.model.walk import split_into_batches
from diffquant.quantization.loading import load
from diffquant.quantization.roundings import Rounder, rounding_named
from diffquant.quantization.roundings.gptq.layer_inputs import collect_inputs, group_by_input
from diffquant.recipe import Recipe
from diffquant.recipe.rounding import RoundingSettings
from diffquant.recipe.scheme import Scheme
from diffquant.support.progress import report_nothing

_BATCH_TOKENS = 4096

# (source name, weight [out, in], inputs [N, in]) -> the weight that takes its place, or None to leave it.
Visit = Callable[[str, Tensor, Tensor], Tensor | None]


class ModelReading:
    """A checkpoint's model over a text.

    Attributes:
        weights: name in the checkpoint and value [out, in] float16 of each weight that is quantized, by its name in the
            model.
    """

    def __init__(
        self, source: Source, weights: Mapping[str, tuple[str, Tensor]], text: Path | None, tokens: int, window: int
    ) -> None:
        """Make ready; nothing is read yet.

        Args:
            text: file with a text, whose beginning is read; None for the bundled text.
            tokens: number of tokens that are read.
            window: number of tokens the model sees at once.
        """
        self._source, self.weights = source, weights
        self._text, self._tokens, self._window = text, tokens, window
        self._ready: tuple[object, Rounder] | None = None

    def model(self) -> CausalModel:
        """The model anew, in float32 with the weights rounded to float16."""
        model = load(self._source, Recipe(), torch.float32, "cpu")
        for name, (_, weight) in self.weights.items():
            model.get_parameter(name).data = weight.float()
        return model

    def shortened(self, tokens: int) -> "ModelReading":
        """The same model over fewer tokens of the text."""
        return ModelReading(self._source, self.weights, self._text, tokens, self._window)

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return self._source.tokenizer

    @cached_property
    def windows(self) -> Tensor:
        """Token ids [N, window] of the text."""
        return encode_windows(self.model(), self._source.tokenizer, load_text(self._text), self._window, self._tokens)

    def rounder(self, rule: str, given: Mapping[str, Any], scheme_of: Callable[[int], Scheme]) -> Rounder:
        """A rounding of ours that reads a text, made ready for the model; kept until another one is asked for.

        Args:
            given: its options.
            scheme_of: function from a weight's width to its scheme.
        """
        schemes = {
            source.removesuffix(".weight"): scheme_of(weight.shape[1]) for source, weight in self.weights.values()
        }
        asked = (rule, dict(given), schemes)
        if self._ready is None or self._ready[0] != asked:
            settings = RoundingSettings(rule, self._text, self._tokens, self._window, **given)
            self._ready = asked, rounding_named(rule).prepare(self._source, schemes, settings, report_nothing).finish()
        return self._ready[1]

    @cached_property
    def mean_squares(self) -> Mapping[str, Tensor]:
        """Mean square [in] of each input of a weight in the 16-bit model, by the weight's name in the checkpoint."""
        means: dict[str, Tensor] = {}
        self.walk(lambda name, _, inputs: means.update({name: inputs.square().mean(0)}))
        return means

    @torch.inference_mode()
    def walk(self, visit: Visit) -> None:
        """Run the text through the model, and show `visit` each weight with its inputs, layer by layer.

        What it gives takes the weight's place once the layer has been seen, so later layers read its outputs.
        """
        model = self.model()
        walk, glance = model.new_layer_runner(self.windows.shape[1]), model.new_layer_runner(2)
        states = [walk.embed(batch) for batch in split_into_batches(self.windows, _BATCH_TOKENS)]
        glimpse = glance.embed(self.windows[:1, :2])
        for number, layer in enumerate(walk.layers):
            readers, glimpse = group_by_input(glance, layer, glimpse)
            runs = [collect_inputs(walk, layer, [names[0] for names in readers], state) for state in states]
            replaced: dict[str, Tensor] = {}
            for names in readers:
                inputs = torch.cat([seen[names[0]] for seen, _ in runs])
                for module in names:
                    if (name := f"model.layers.{number}.{module}.weight") in self.weights:
                        source, weight = self.weights[name]
                        new = visit(source, weight.float(), inputs)
                        if new is not None:
                            replaced[module] = new
            for module, new in replaced.items():
                layer.get_submodule(module).weight.data = new
            states = [walk.run_layer(layer, state) for state in states] if replaced else [output for _, output in runs]
