"""An adapter that lets the evaluations run an exported model like any other language model.

Each sequence of a batch runs in its own call, without padding: GroupQueryAttention supports several new tokens behind a
cache only for batch size 1.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from diffquant.checkpoints.side_files import list_side_files
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import UsageError
from diffquant.measure.language_model import LanguageModel, ModelOutputs, TokenCache
from diffquant.measure.sweep.exported import ExportedDescription
from diffquant.onnx.manifest import check_unchanged, read_manifest
from diffquant.onnx.native import attention_instruction_set
from diffquant.onnx.runtime.device import RuntimeDevice, describe_cpu_nodes
from diffquant.onnx.runtime.generation import Generator, read_context_length
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.support.files import file_digest
from diffquant.support.installation import install_command


class OnnxRuntime:
    """Opens exported folders for `diffquant.sweep` and describes them."""

    # All logits of a pass are in memory at once: 1,024 tokens with a vocabulary of 50,000 take 200 MB.
    batch_tokens = 1024

    def describe(self, folder: Path, device: str) -> ExportedDescription:
        """Return a folder's scheme, sizes and digests in the form in which a sweep stores them.

        Raises:
            CheckpointError: the folder is damaged, or has changed since export.
            MissingDependencyError: ONNX Runtime cannot use the device.
        """
        manifest = read_manifest(folder)
        check_unchanged(folder, manifest)
        widths = Counter(f"{tensor['bits']}:{tensor['granularity']}" for tensor in manifest.tensors.values())
        weights = widths.most_common(1)[0][0] if widths else "16"
        options = manifest.options
        extras = {"kv": options.kv_bits, "logits": options.logits, "embed": options.embed_bits}
        scheme = " ".join([weights, *(f"{name} {value}" for name, value in extras.items() if str(value) != "16")])
        cache = OnnxModel(folder, device=device).cache
        return ExportedDescription(
            bits=Scheme.parse(weights).bits,
            scheme=scheme,
            identity={
                **manifest.files.to_dict(),
                "tokenizer": [file_digest(file) for file in (folder / "config.json", *list_side_files(folder))],
                "onnxruntime": onnxruntime.__version__,
                # Native kernels run only on the CPU.
                "kernel": attention_instruction_set() if RuntimeDevice.parse(device).kind == "cpu" else None,
            },
            sources=(manifest.weights, manifest.origin),
            weight_bytes=sum((folder / name).stat().st_size for name in manifest.files.by_name),
            kv_bytes=cache.bytes_per_token if cache else 0,
        )

    def open(self, folder: Path, device: str) -> "OnnxLanguageModel":
        """Open the folder's model.

        Raises:
            CheckpointError: the folder is damaged.
            MissingDependencyError: ONNX Runtime cannot use the device.
        """
        model = OnnxModel(folder, device=device, every_position=True)
        if device == "auto" and model.device.kind == "cpu" and torch.cuda.is_available():
            why = f"ONNX Runtime does not start on CUDA here; {install_command('onnx-gpu')} may help"
            logging.getLogger(__name__).warning("%s runs on the CPU: %s", folder, why)
        if fallbacks := model.cpu_node_counts:
            logging.getLogger(__name__).warning("%s: %s", folder, describe_cpu_nodes(fallbacks))
        return OnnxLanguageModel(model, load_tokenizer(folder))


class OnnxCache:
    """Caches of a batch of sequences.

    Attributes:
        rows: for each sequence, its caches as arrays on the device. Arrays never change, so sequences may share them.
    """

    def __init__(self, rows: list[list[onnxruntime.OrtValue]] | None = None) -> None:
        self.rows = rows or []

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows = [self.rows[i] for i in indices.tolist()]

    def __deepcopy__(self, _memo: object) -> "OnnxCache":
        return OnnxCache(self.rows)


class OnnxLanguageModel(LanguageModel):
    """An exported model with the interface that evaluations use; it must return logits at every position."""

    def __init__(self, runtime: OnnxModel, tokenizer: Any = None) -> None:
        """Wrap an opened model; `tokenizer` is needed only for text."""
        self.runtime, self.tokenizer = runtime, tokenizer
        self._recipe = read_manifest(runtime.folder).options.recipe
        self._context = read_context_length(runtime.folder)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def has_cache(self) -> bool:
        return self.runtime.cache is not None

    @property
    def max_length(self) -> int:
        return self._context

    @property
    def vocabulary_size(self) -> int:
        return self.runtime.vocabulary

    def new_cache(self) -> OnnxCache:
        self.runtime.require_cache()
        return OnnxCache()

    def compute_outputs(self, ids: Tensor, mask: Tensor | None = None, cache: TokenCache | None = None) -> ModelOutputs:
        """Return logits [B, T, V] of new tokens [B, T] for a vocabulary of size V, and extend the cache.

        Logits are 0 for tokens that the mask hides.
        """
        batch, length = ids.shape
        cache = cache if isinstance(cache, OnnxCache) else OnnxCache()
        pasts = cache.rows or [self.runtime.allocate_cache(1) for _ in range(batch)]
        is_read = torch.ones_like(ids) if mask is None else mask[:, -length:]
        logits = torch.zeros(batch, length, self.runtime.vocabulary)
        rows = [self._run(row[k.bool()], past) for row, k, past in zip(ids, is_read, pasts, strict=True)]
        for target, k, (computed, _) in zip(logits, is_read, rows, strict=True):
            target[k.bool()] = computed
        cache.rows = [past for _, past in rows]
        return ModelOutputs(logits)

    def generate(
        self, prompt: Sequence[int], new_tokens: int, stops: Sequence[str], sampling: Mapping[str, object]
    ) -> list[int]:
        if sampling.get("do_sample"):
            raise UsageError("an exported model generates greedily in lm-eval; choose a task that does not sample")
        made: list[int] = []
        for token in self._generator.generate_tokens(list(prompt), new_tokens):
            made.append(token)
            if any(stop in self.tokenizer.decode(made) for stop in stops):
                break
        return made

    @cached_property
    def _generator(self) -> Generator:
        return Generator(self.runtime.folder, model=self.runtime)

    def _run(self, ids: Tensor, past: list[onnxruntime.OrtValue]) -> tuple[Tensor, list[onnxruntime.OrtValue]]:
        """Run one sequence's tokens [T] behind its cache; return logits [T, V] and the extended cache."""
        if not len(ids):
            return torch.zeros(0, self.runtime.vocabulary), past
        seen = past[0].shape()[2] if past else 0
        mask = np.ones((1, seen + len(ids)), np.int64)
        (logits,), cache = self.runtime.run(ids[None].numpy(), mask, past)
        return torch.from_numpy(logits[0].astype(np.float32)), cache
