"""Subjects: models as a sweep measures them, with their stored sizes. They can be pickled until the first cell."""

import gc
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from diffquant.checkpoints.building import has_packed_kernels
from diffquant.checkpoints.places import OffloadPlan
from diffquant.checkpoints.source import Source
from diffquant.family.call import dtype_name
from diffquant.measure.cells import weight_schemes_text
from diffquant.measure.language_model import LanguageModel, ModelOutputs
from diffquant.measure.results import TaskResult
from diffquant.measure.task import Task
from diffquant.measure.torch_model import TorchModel
from diffquant.model.adapters import sizes
from diffquant.model.cache import PackedStates
from diffquant.model.causal import CausalModel
from diffquant.model.windowed_cache import create_storage
from diffquant.quantization.loading import MODEL_MODULES, load, resolve_recipe
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.roundings import calibration_digest, rounding_named
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.reports.tables import bytes_at_16_bits
from diffquant.support.files import file_digest
from diffquant.support.installation import find_commit, list_compute_versions
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress


def run_timed(task: Task, model: LanguageModel, reference: ModelOutputs | None, progress: Progress) -> TaskResult:
    """Run a task, and record its time and the commit in the result."""
    started = time.monotonic()
    result = task.run(model, reference, progress)
    return replace(result, seconds=round(time.monotonic() - started, 2), commit=find_commit())


def settings_key(dtype: torch.dtype, device: str) -> JsonObject:
    """Return the settings on which the results of all subjects depend: the dtype, and versions of libraries."""
    return {"dtype": dtype_name(dtype), "versions": list_compute_versions(device)}


# Number of tokens over which the bytes of a cache are averaged.
_KV_TOKENS = 1024


@dataclass(eq=False)
class CheckpointSubject:
    """A checkpoint to measure. One set of weights is freed before the next is read.

    Attributes:
        source: opened checkpoint; pickled as its path.
        device: device that computes.
        attention: name of an attention backend, or "auto".
        places: devices and memories that the model is spread over, or None to keep it on `device`.
        scales: file of ranges that were calibrated on this checkpoint, for static schemes, or None.
    """

    source: Source
    dtype: torch.dtype
    device: str
    attention: str = "auto"
    places: OffloadPlan | None = None
    scales: Path | None = None
    _loaded: CausalModel | None = field(init=False, default=None)
    _references: dict[str, ModelOutputs | None] = field(init=False, default_factory=dict)
    _weight_bytes: dict[str, int] = field(init=False, default_factory=dict)

    @property
    def peak_weight_bytes(self) -> int:
        """Largest number of bytes of weights that it holds at once."""
        return self.source.weight_count * self.dtype.itemsize

    def key(self, recipe: Recipe) -> JsonObject:
        """Return everything on which a result under a recipe depends, except the task and the code."""
        is_static = any(recipe.is_static(target) for target in LAYER_TARGETS)
        scales = {"scales": file_digest(self.scales)} if self.scales and is_static else {}
        model = {"model": self.source.fingerprint, "recipe": recipe.to_dict()}
        text = calibration_digest(self.source, recipe.rounding)
        # A path does not determine the text's content.
        read = {"rounding_text": text} if text else {}
        # Weights move to the computing device from wherever they lie, so results do not depend on placement, except
        # that a spread model expands packed weights, which kernels would otherwise have read.
        is_expanded = self.places and self.source.packed and has_packed_kernels(self.device, self.dtype)
        expanded = {"expanded": True} if is_expanded else {}
        return scales | read | model | expanded | settings_key(self.dtype, self.device) | self.backend_key

    @property
    def backend_key(self) -> JsonObject:
        """The settings that determine the attention backend: the device, and the backend's name unless it is "auto"."""
        attention = {} if self.attention == "auto" else {"attention": self.attention}
        return {"device": torch.device(self.device).type} | attention

    def python_modules(self, recipe: Recipe) -> tuple[str, ...]:
        """Return names of the modules whose code determines a result under a recipe, except the task's module."""
        formats = {type(scheme.format).__module__ for scheme in (*recipe.schemes, *self.source.packed.values())}
        rope = getattr(self.source.architecture, "rope_parameters", {})
        of_rope = [sizes.__name__] if rope.get("rope_type") in sizes.MOVING_ROPE else []
        return (*MODEL_MODULES, type(rounding_named(recipe.rounding.name)).__module__, *sorted(formats), *of_rope)

    def copy_to(self, device: str | None) -> "CheckpointSubject":
        """Return a copy with separate weights and the same results.

        Args:
            device: another device of the same kind, such as "cuda:1", or None to keep the device.
        """
        return replace(self, device=device or self.device)

    def compute_reference(self, task: Task, recipe: Recipe | None, progress: Progress) -> ModelOutputs | None:
        """Return the 16-bit model's outputs, with which a task compares the outputs under a recipe.

        It returns None when nothing is compared: the recipe is empty, the task needs no outputs, or the sweep has no
        16-bit model.
        """
        if recipe == Recipe() or not task.compares_with_16_bits:
            return None
        if task.name not in self._references:
            model = TorchModel(self.model(Recipe()), self.source.tokenizer)
            self._references[task.name] = task.compute_reference(model, progress)
        return self._references[task.name]

    def measure(
        self, task: Task, recipe: Recipe | None, reference: ModelOutputs | None, progress: Progress
    ) -> TaskResult:
        """Run a task, and return the result with its time and stored sizes.

        Args:
            recipe: recipe to simulate, or None to use the one that the model records.
            reference: result of `compute_reference`.

        Raises:
            DiffQuantError: a layer did not quantize its cache, logits or operands.
            CheckpointError: the model's files changed since they were opened.
        """
        model = self.model(recipe)
        result = run_timed(task, TorchModel(model, self.source.tokenizer), reference, progress)
        measured = self.source.recipe if recipe is None else recipe
        if measured.quantizes_any(*LAYER_TARGETS, "activations"):
            model.check_quantizers_ran()
        weights = weight_schemes_text(measured)
        if weights not in self._weight_bytes:
            self._weight_bytes[weights] = weight_bytes(self.source, measured)
        self.source.check_unchanged()
        report = model.logit_report() if measured.quantizes_any("logits") else None
        nbytes = self._weight_bytes[weights]
        return replace(result, weight_bytes=nbytes, kv_bytes=kv_bytes_per_token(model), logit_report=report)

    def model(self, recipe: Recipe | None) -> CausalModel:
        """Return the model under a recipe, or under the one that it records if `recipe` is None.

        Weights are loaded again only if their schemes changed since the last call.
        """
        wanted, _ = resolve_recipe(self.source, recipe)
        if self._loaded is None or weight_schemes_text(self._loaded.recipe) != weight_schemes_text(wanted):
            if self._loaded is not None:
                self._loaded = None
                gc.collect()
            self._loaded = load(
                self.source, recipe, self.dtype, self.device, scales=self.scales, device_map=self.places
            )
            self._loaded.use_attention(self.attention)
        self._loaded.apply_recipe(wanted)
        return self._loaded


def weight_bytes(source: Source, recipe: Recipe) -> int:
    """Count the bytes of the checkpoint that `quantize` writes under a recipe, scales included.

    Weights that the recipe does not quantize count 16 bits each, whatever dtype the source has.
    """
    if source.packed:
        return source.checkpoint.nbytes
    plan = plan_quantization(source, recipe)
    return plan.bytes_after if plan.schemes else bytes_at_16_bits(plan.weight_count)


def cached_bytes_per_token(scheme: Scheme, heads: int, width: int) -> float:
    """Measure the bytes per token of one layer's keys or values under a scheme, as a mean over 1,024 tokens.

    Args:
        heads: number of heads in the cache.
        width: number of channels of a head.
    """
    states = PackedStates(scheme, 0)
    states.append(torch.zeros(1, heads, _KV_TOKENS, width, dtype=torch.bfloat16))
    return states.nbytes / _KV_TOKENS


def kv_bytes_per_token(model: CausalModel, tokens: int = _KV_TOKENS) -> float:
    """Measure the bytes of keys and values per token in the cache of a model's recipe, as a mean over `tokens` tokens.

    Layers with a window hold only the window. The states of recurrent layers are not counted, since their size does
    not depend on the number of tokens.
    """
    cache_bytes = 0
    for layer, rows in model.model.architecture.cached_shapes.items():
        # One layer's keys and values at a time, so that a 16-bit cache of many layers is never held whole.
        storage = create_storage(rows, layer, model.recipe, model.model.ranges)
        storage.update(*(torch.zeros(1, n, tokens, d, dtype=torch.bfloat16) for n, d in (rows.keys, rows.values)))
        cache_bytes += storage.nbytes
    return cache_bytes / tokens
