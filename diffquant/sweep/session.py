"""One model under measurement: loaded once for each set of weights, with its 16-bit reference."""

import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffquant.evals.language_model import States
from diffquant.evals.torch_model import TorchModel
from diffquant.loading import load
from diffquant.model.modeling import DiffTransformer
from diffquant.scheme import Recipe
from diffquant.source.source import Source
from diffquant.support.progress import Progress
from diffquant.sweep.storage import kv_bytes_per_token, weight_bytes
from diffquant.sweep.tasks import Perplexity, Task


@dataclass
class Session:
    """Holds one loaded model at a time; the one before is let go first."""

    source: Source
    dtype: torch.dtype
    device: str
    scales: Path | None = None
    attention: str = "auto"
    _loaded: DiffTransformer | None = None
    _reference: States | None = None
    _weight_bytes: dict[str, int] = field(default_factory=dict)

    def measure(self, task: Task, recipe: Recipe, progress: Progress) -> dict[str, Any]:
        """A task's result under a recipe, with the time it took, what it stores and what its logits did.

        Raises:
            NotFiredError: a layer did not quantize its logits.
        """
        reference = None if recipe == Recipe() else self.reference(task, progress)
        model = self.model(recipe)
        started = time.monotonic()
        result = task.run(TorchModel(model), self.source.tokenizer, reference, progress)
        result["seconds"] = round(time.monotonic() - started, 2)
        if any(scheme.quantizes for scheme in recipe.schemes_of("logits")):
            model.require_fired()
            result["logit_report"] = model.logit_report()
        result["stored"] = {"weights": self._stored_weights(recipe), "kv_per_token": kv_bytes_per_token(model)}
        return result

    def model(self, recipe: Recipe) -> DiffTransformer:
        """The model under a recipe, read again only where the weights differ."""
        if self._loaded is None or _weights(self._loaded.recipe) != _weights(recipe):
            self._loaded = None
            gc.collect()
            self._loaded = load(self.source, recipe, self.dtype, self.device, scales=self.scales)
            self._loaded.use_attention(self.attention)
        self._loaded.apply_recipe(recipe)
        return self._loaded

    def reference(self, task: Task, progress: Progress) -> States | None:
        """What the model computes at 16 bits, where the task compares with that."""
        if not isinstance(task, Perplexity):
            return None
        if self._reference is None:
            self._reference = task.reference_of(TorchModel(self.model(Recipe())), self.source.tokenizer, progress)
        return self._reference

    def _stored_weights(self, recipe: Recipe) -> int:
        weights = _weights(recipe)
        if weights not in self._weight_bytes:
            self._weight_bytes[weights] = weight_bytes(self.source, recipe)
        return self._weight_bytes[weights]


def _weights(recipe: Recipe) -> str:
    return Recipe().with_weights_of(recipe).to_yaml()
