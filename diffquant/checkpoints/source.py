"""`Source`: a checkpoint that was opened and checked once, to pass to any verb."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffquant.checkpoints.opening import check_tensors, open_checkpoint, rename_tied_head
from diffquant.checkpoints.reader import Checkpoint, read_recorded_dtype, read_stored_recipe
from diffquant.checkpoints.side_files import list_behaviour_files
from diffquant.checkpoints.texts import SpecialTokens, read_special_tokens
from diffquant.checkpoints.tokenizer import open_tokenizer
from diffquant.checkpoints.weight_source import WeightSource
from diffquant.errors import CheckpointError, UnknownModelTypeError, UsageError
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.architecture import Architecture, TransformerArchitecture
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.support.files import file_digest

# Device, inode, size and times of each file, by path.
FilesState = dict[str, tuple[int, ...]]


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """Return the SHA-256 over a checkpoint's weights, config and tokenizer, independent of paths."""
    root = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    digests = {
        file.relative_to(root).as_posix(): _digest_once(file.resolve(), _file_state(file))
        for file in _files(checkpoint)
    }
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def checkpoint_file_stats(checkpoint: Checkpoint) -> FilesState:
    """Return the state of the files that a checkpoint's fingerprint covers; it changes if one of them is replaced."""
    return stat_files(_files(checkpoint))


def stat_files(files: Iterable[Path]) -> FilesState:
    """Return for each file its device, inode, size and times, which change if it is written or replaced."""
    return {str(file): _file_state(file) for file in files}


def _files(checkpoint: Checkpoint) -> list[Path]:
    files = checkpoint.weight_files()
    if checkpoint.path.is_dir():
        files += [checkpoint.path / "config.json", *list_behaviour_files(checkpoint.path)]
    return files


@lru_cache(maxsize=1024)
def _digest_once(file: Path, _state: tuple[int, ...]) -> str:
    return file_digest(file)


def _file_state(file: Path) -> tuple[int, ...]:
    """Return a file's device, inode, size and times, which change if it is written again."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


_Identity = TypeVar("_Identity")


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint whose config and tensors were checked to fit together.

    Attributes:
        checkpoint: reader of its config and tensors.
        adapter: translation of its names and head layout into those of the model that runs it.
        packed: scheme of each module whose weight is stored packed, by the checkpoint's own names; empty for a
            16-bit checkpoint.
        state: device, inode, size and times of its files when it was opened.
    """

    checkpoint: Checkpoint
    adapter: Adapter
    packed: Mapping[str, Scheme]
    state: FilesState

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json."""
        return str(self.checkpoint.config["model_type"])

    @property
    def has_only_cache_scales(self) -> bool:
        """Whether `quantization_config` describes only scales of the KV cache, so that the weights have 16 bits."""
        return not self.packed and self.checkpoint.config.get("quantization_config") is not None

    @property
    def architecture(self) -> Architecture:
        return self.adapter.architecture

    @property
    def spec(self) -> DiffSpec:
        return self.architecture.diff_spec

    def require_transformer(self, verb: str) -> TransformerArchitecture:
        """Return the architecture, for a verb (a command of diffquant) that supports only a DiffTransformer.

        Raises:
            CheckpointError: it is another architecture.
        """
        # A subclass has blocks that these verbs do not support.
        if type(self.architecture) is not TransformerArchitecture:
            raise self.unsupported_error(verb)
        return self.architecture

    def unsupported_error(self, verb: str, why: str = "") -> CheckpointError:
        """Return the error for a verb (a command of diffquant) that does not support the model's layers.

        Args:
            why: clause with the reason; by default the verb supports only a DiffTransformer.
        """
        kinds = ", ".join(dict.fromkeys(self.architecture.layer_kinds))
        others = "" if why else "export, verify, run, "
        return CheckpointError(
            f"{self.path} is a {self.model_type} model with layers of {kinds}: {verb} does not support it yet{why}; "
            f"inspect, quantize, {others}generate, eval, sweep, search and outliers do"
        )

    @property
    def weight_count(self) -> int:
        """Number of weights, packed ones included."""
        return sum(torch.Size(shape).numel() for shape in self.adapter.source_shapes().values())

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that `quantize` recorded in the checkpoint; 16 bits for any other checkpoint.

        Raises:
            CheckpointError: it cannot be read, or a newer diffquant wrote it.
        """
        return read_stored_recipe(self.checkpoint.config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model runs in by default.

        Raises:
            CheckpointError: the checkpoint records an unknown dtype.
        """
        embedding = self.adapter.source_name("model.embed_tokens.weight")
        return read_recorded_dtype(self.checkpoint.config) or self.checkpoint.tensors[embedding].dtype

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the contents of the checkpoint's weights, config and tokenizer, independent of paths.

        Raises:
            CheckpointError: the files changed since they were opened.
        """
        fingerprint = self._identify(checkpoint_fingerprint)
        if self._identify(checkpoint_file_stats) != self.state:
            raise self._change_error()
        return fingerprint

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The tokens that begin, end and pad the model's text.

        Raises:
            CheckpointError: see `read_special_tokens`.
        """
        return read_special_tokens(self.path, self.checkpoint.config)

    def check_special_tokens(self) -> None:
        """Check the special tokens' file, so that a copy of the checkpoint can be loaded.

        Raises:
            CheckpointError: see `read_special_tokens`.
        """
        _ = self.special_tokens

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        return open_tokenizer(self.checkpoint)

    def __reduce__(self) -> "tuple[Callable[[Path, str, FilesState], Source], tuple[Path, str, FilesState]]":
        # Pickled as its path, and opened again in the other process.
        return _reopen, (self.path, self.fingerprint, self.state)

    def check_unchanged(self) -> None:
        """Check that the checkpoint's files have not changed; call it before recording a result.

        Raises:
            CheckpointError: they changed, or are gone.
        """
        # Times may change without the content: compare contents before reporting a change.
        if (
            self._identify(checkpoint_file_stats) != self.state
            and self._identify(checkpoint_fingerprint) != self.fingerprint
        ):
            raise self._change_error()

    def _identify(self, identity: Callable[[Checkpoint], _Identity]) -> _Identity:
        try:
            return identity(self.checkpoint)
        except OSError as error:
            raise self._change_error() from error

    def _change_error(self) -> CheckpointError:
        return CheckpointError(f"{self.path} changed while it was in use; run the same command again")

    def read(self, parameter: str) -> Tensor:
        """Read a parameter, given by its name in the model, as the checkpoint stores it."""
        return self.checkpoint.read(self.adapter.source_name(parameter))


def open_source(path: Path | str | Source | WeightSource) -> Source:
    """Open a folder of safetensors or a .gguf file, and check its tensors against its config.

    A `Source` is returned unchanged, so that functions accept paths and sources.

    Raises:
        UnknownModelTypeError: no adapter reads its architecture.
        CheckpointError: the checkpoint is damaged, incomplete or of an unsupported kind; every offending file and
            tensor is named.
    """
    if isinstance(path, Source):
        return path
    if not isinstance(path, str | PathLike | WeightSource):
        raise UsageError(f"a model is a folder, a .gguf file or ORG/NAME, not of type {type(path).__name__}")
    checkpoint = path.checkpoint if isinstance(path, WeightSource) else open_checkpoint(Path(path))
    try:
        adapter = adapter_for(checkpoint.config).match_tensors(checkpoint.tensors)
    except UnknownModelTypeError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    rename_tied_head(checkpoint, adapter)
    state = checkpoint_file_stats(checkpoint)
    return Source(checkpoint, adapter, check_tensors(checkpoint, adapter), state)


def _reopen(path: Path, fingerprint: str, state: FilesState) -> Source:
    """Open a checkpoint again that another process had opened.

    Raises:
        CheckpointError: it has changed since then.
    """
    source = open_source(path)
    if source.state == state:
        # Exactly the same files, so there is no need to read them again.
        vars(source)["fingerprint"] = fingerprint
    elif source.fingerprint != fingerprint:
        raise source._change_error()
    return source
