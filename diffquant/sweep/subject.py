"""Subjects: models as a sweep measures them. They can be pickled until the first cell is measured."""

import gc
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

import torch

from diffquant.evals.language_model import States
from diffquant.evals.task import Task
from diffquant.evals.torch_model import TorchModel
from diffquant.loading import load, recipe_of_run
from diffquant.model.causal import CausalModel
from diffquant.quantization.roundings import rounding_named, text_read_digest
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.source.building import has_packed_kernels
from diffquant.source.places import Places
from diffquant.source.source import Source
from diffquant.support.code import commit
from diffquant.support.files import file_digest
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress
from diffquant.support.versions import versions_of_run
from diffquant.sweep.measurement import Measurement
from diffquant.sweep.storage import kv_bytes_per_token, weight_bytes


class Subject(Protocol):
    """A model to measure. It holds one set of weights at a time, and none before the first cell."""

    @property
    def device(self) -> str:
        """Name of the device that computes."""

    @property
    def held_bytes(self) -> int:
        """Largest number of bytes of weights that it holds at once."""

    def key(self, recipe: Recipe) -> JsonObject:
        """Everything that a result depends on, apart from the task and the code."""

    def modules(self, recipe: Recipe) -> tuple[str, ...]:
        """Names of the modules where the computation of a result starts, apart from the task's."""

    def apart(self, device: str | None) -> Self:
        """A copy with its own weights, on another device of the same kind if one is named; results stay the same."""

    def reference(self, task: Task, recipe: Recipe | None, progress: Progress) -> States | None:
        """The 16-bit states that a task compares a recipe with, or None if it compares nothing or this is 16 bits."""

    def measure(self, task: Task, recipe: Recipe | None, reference: States | None, progress: Progress) -> Measurement:
        """Run a task under a recipe, or under the model's own; returns the result with its time and stored sizes.

        Raises:
            NotFiredError: a layer did not quantize its logits or operands.
            CheckpointError: the model's files changed since they were opened.
        """


@dataclass(frozen=True)
class Setup:
    """Settings with which checkpoints run.

    Attributes:
        dtype: dtype of the models.
        device: device that computes.
        attention: name of an attention backend, or "auto".
        places: places that models are spread over, or None to hold each on the device.
    """

    dtype: torch.dtype
    device: str
    attention: str
    places: Places | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def key(self) -> JsonObject:
        """The settings that a result depends on; with attention "auto", the device decides the backend."""
        attention = {} if self.attention == "auto" else {"attention": self.attention}
        return {"device": torch.device(self.device).type} | attention

    def common_key(self) -> JsonObject:
        """The settings that results of exported models depend on too."""
        return {"dtype": self.dtype_name, "versions": versions_of_run(self.device)}


@dataclass(eq=False)
class CheckpointSubject:
    """A checkpoint to measure. One set of weights is freed before the next is read.

    Attributes:
        source: opened checkpoint; pickled as its path.
        scales: file of ranges calibrated on it, for static schemes.
    """

    source: Source
    setup: Setup
    scales: Path | None = None
    _loaded: CausalModel | None = field(init=False, default=None)
    _references: dict[str, States | None] = field(init=False, default_factory=dict)
    _weight_bytes: dict[str, int] = field(init=False, default_factory=dict)

    @property
    def device(self) -> str:
        return self.setup.device

    @property
    def held_bytes(self) -> int:
        return self.source.weights * self.setup.dtype.itemsize

    def key(self, recipe: Recipe) -> JsonObject:
        is_static = any(recipe.is_static(target) for target in LAYER_TARGETS)
        scales = {"scales": file_digest(self.scales)} if self.scales and is_static else {}
        model = {"model": self.source.fingerprint, "recipe": recipe.to_dict()}
        text = text_read_digest(recipe.rounding)
        # A path does not determine the text's content.
        read = {"rounding_text": text} if text else {}
        # Weights move to the computing device from wherever they lie, so results do not depend on placement, except
        # that a spread model expands packed weights, which kernels would otherwise have read.
        setup = self.setup
        is_expanded = setup.places and self.source.packed and has_packed_kernels(setup.device, setup.dtype)
        expanded = {"expanded": True} if is_expanded else {}
        return scales | read | model | expanded | setup.common_key() | setup.key()

    def modules(self, recipe: Recipe) -> tuple[str, ...]:
        formats = {type(scheme.format).__module__ for scheme in (*recipe.schemes, *self.source.packed.values())}
        return (__name__, type(rounding_named(recipe.rounding.name)).__module__, *sorted(formats))

    def apart(self, device: str | None) -> "CheckpointSubject":
        return replace(self, setup=replace(self.setup, device=device or self.device))

    def reference(self, task: Task, recipe: Recipe | None, progress: Progress) -> States | None:
        if recipe == Recipe() or not task.compares_with_16_bits:
            return None
        if task.name not in self._references:
            model = TorchModel(self.model(Recipe()), self.source.tokenizer)
            self._references[task.name] = task.reference(model, progress)
        return self._references[task.name]

    def measure(self, task: Task, recipe: Recipe | None, reference: States | None, progress: Progress) -> Measurement:
        model = self.model(recipe)
        started = time.monotonic()
        result = task.run(TorchModel(model, self.source.tokenizer), reference, progress)
        seconds = round(time.monotonic() - started, 2)
        measured = self.source.recipe if recipe is None else recipe
        if measured.rounds("logits", "qk", "p", "pv"):
            model.require_fired()
        weights = weights_of(measured)
        if weights not in self._weight_bytes:
            self._weight_bytes[weights] = weight_bytes(self.source, measured)
        self.source.check_unchanged()
        report = model.logit_report() if measured.rounds("logits") else None
        return Measurement(result, seconds, self._weight_bytes[weights], kv_bytes_per_token(model), report, commit())

    def model(self, recipe: Recipe | None) -> CausalModel:
        """The model under a recipe, or under its own by default; read again only if the weights differ."""
        wanted, _ = recipe_of_run(self.source, recipe)
        if self._loaded is None or weights_of(self._loaded.recipe) != weights_of(wanted):
            if self._loaded is not None:
                self._loaded = None
                gc.collect()
            setup = self.setup
            self._loaded = load(
                self.source, recipe, setup.dtype, setup.device, scales=self.scales, device_map=setup.places
            )
            self._loaded.use_attention(setup.attention)
        self._loaded.apply_recipe(wanted)
        return self._loaded


def weights_of(recipe: Recipe) -> str:
    """A recipe's weights alone, as text; recipes with equal texts can share a loaded model."""
    return Recipe().with_weights_of(recipe).to_yaml()
