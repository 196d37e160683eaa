"""An exported model where the evaluations expect a torch one, so that the same tasks measure it.

What the tasks call hidden states are its logits, and the head passes them on. Each sequence runs by
itself: GroupQueryAttention takes a chunk after a past for one sequence only, and so no padding is read.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from diffquant.errors import UsageError
from diffquant.evals.perplexity import Reference
from diffquant.export.manifest import check_unchanged, read_manifest
from diffquant.export.native import kernel_name
from diffquant.export.runtime.generation import Generator
from diffquant.export.runtime.session import OnnxModel
from diffquant.formats.reader import read_json, side_files
from diffquant.model.adapters import adapter_for
from diffquant.scheme import Recipe, Scheme
from diffquant.source.tokenizer import load_tokenizer
from diffquant.support.files import file_digest
from diffquant.support.progress import Progress, silent
from diffquant.sweep.exported import ExportedModel, check_as_it_is
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.tasks import Task, make_tasks

# Logits of every token of a pass are held at once: 1,024 tokens of a vocabulary of 50,000 take 200 MB.
_BATCH_TOKENS = 1024


def evaluate_exported(
    folder: Path, recipe: Recipe | None, options: SweepOptions, progress: Progress = silent
) -> dict[str, dict[str, Any]]:
    """Results by task, as `diffquant.sweep.evaluate.evaluate` gives them for a checkpoint.

    Raises:
        UsageError: options ask for another precision or device than the model was exported with.
    """
    check_as_it_is(options, recipe)
    runtime = OnnxRuntime()
    return {task.name: runtime.run(folder, task, None, progress) for task in make_tasks(options)}


class OnnxRuntime:
    """What `diffquant.sweep` runs exported folders with; keeps the last one open."""

    def __init__(self) -> None:
        self._open: tuple[Path, OnnxLanguageModel, Any] | None = None

    def describe(self, folder: Path) -> ExportedModel:
        """What a sweep must know of a folder.

        Raises:
            CheckpointError: the folder is damaged, or changed since it was exported.
        """
        manifest = read_manifest(folder)
        check_unchanged(folder, manifest)
        widths = Counter(f"{tensor['bits']}:{tensor['granularity']}" for tensor in manifest.tensors.values())
        weights = widths.most_common(1)[0][0] if widths else "16"
        options = manifest.options
        extras = {"kv": options.kv_bits, "logits": options.logits, "embed": options.embed_bits}
        scheme = " ".join([weights, *(f"{name} {value}" for name, value in extras.items() if str(value) != "16")])
        cache = OnnxModel(folder).cache
        return ExportedModel(
            bits=Scheme.parse(weights).bits,
            scheme=scheme,
            identity={
                "sha256": dict(manifest.sha256),
                "tokenizer": [file_digest(file) for file in side_files(folder)],
                "onnxruntime": onnxruntime.__version__,
                "kernel": kernel_name(),
            },
            sources=tuple(frozenset(manifest.source.get(name, {}).values()) for name in ("sha256", "origin_sha256")),
            weight_bytes=sum((folder / name).stat().st_size for name in manifest.sha256),
            kv_bytes=cache.row_bytes if cache else 0,
        )

    def run(self, folder: Path, task: Task, reference: Reference | None, progress: Progress) -> dict[str, Any]:
        """A task's result; one sequence at a time, so the task's batches only bound memory."""
        if self._open is None or self._open[0] != folder:
            self._open = None
            self._open = folder, OnnxLanguageModel(OnnxModel(folder)), load_tokenizer(folder)
        _, model, tokenizer = self._open
        return task.in_batches_of(_BATCH_TOKENS).run(model, tokenizer, reference, progress)


class OnnxCache:
    """What each row of a batch has seen; rows share arrays, which no one writes to."""

    def __init__(self) -> None:
        self.rows: list[list[np.ndarray]] = []

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows = [self.rows[i] for i in indices.tolist()]

    def __deepcopy__(self, memo: object) -> "OnnxCache":
        branch = OnnxCache()
        branch.rows = list(self.rows)
        return branch


class OnnxLanguageModel:
    """The calls of a `DiffTransformer` that the evaluations make.

    Attributes:
        config: of the checkpoint it was exported from.
        lm_head: passes logits on.
    """

    def __init__(self, runtime: OnnxModel) -> None:
        self.runtime = runtime
        self.config = adapter_for(read_json(runtime.folder / "config.json")).config
        self.device = torch.device("cpu")
        # A copy, as any head gives one: scoring turns logits into exponentials in place.
        self.lm_head: Callable[[Tensor], Tensor] = torch.clone

    def new_cache(self) -> OnnxCache:
        return OnnxCache()

    def model(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: OnnxCache | None = None,
        use_cache: bool = False,
    ) -> BaseModelOutputWithPast:
        """Logits [B, T, V] as the last hidden state; 0 where the mask hides a new token.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S] over cached and new tokens.
            past_key_values: extended in place.
        """
        batch, length = input_ids.shape
        cache = past_key_values if past_key_values is not None else OnnxCache()
        pasts = cache.rows or [self.runtime.empty_cache(1) for _ in range(batch)]
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -length:]
        logits = torch.zeros(batch, length, self.runtime.vocabulary)
        rows = [self._run(ids[k.bool()], past) for ids, k, past in zip(input_ids, kept, pasts, strict=True)]
        for target, k, (found, _) in zip(logits, kept, rows, strict=True):
            target[k.bool()] = found
        cache.rows = [past for _, past in rows]
        return BaseModelOutputWithPast(last_hidden_state=logits)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        attention_mask: Tensor,
        max_new_tokens: int,
        stop_strings: list[str],
        tokenizer: Any,
        pad_token_id: int,
        do_sample: bool = False,
    ) -> Tensor:
        """Greedy continuation of one prompt [1, T] until a stop string appears: [1, T + new]."""
        if do_sample:
            raise UsageError("an exported model generates greedily in lm-eval; choose a task that does not sample")
        ids = prompt[0].tolist()
        made: list[int] = []
        for token in Generator(self.runtime.folder, model=self.runtime).tokens(ids, max_new_tokens):
            made.append(token)
            if any(stop in tokenizer.decode(made) for stop in stop_strings):
                break
        return torch.tensor([ids + made])

    def _run(self, ids: Tensor, past: list[np.ndarray]) -> tuple[Tensor, list[np.ndarray]]:
        """Logits [T, V] of one row's tokens, and its cache after them."""
        if not len(ids):
            return torch.zeros(0, self.runtime.vocabulary), past
        seen = past[0].shape[2] if past else 0
        mask = np.ones((1, seen + len(ids)), np.int64)
        (logits,), cache = self.runtime.run(ids[None].numpy(), mask, past)
        return torch.from_numpy(logits[0].astype(np.float32)), cache
