"""`Source`: a checkpoint that was opened and checked once, to pass to any verb."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from diffquant.errors import CheckpointError, UnknownModelTypeError, UsageError
from diffquant.family.spec import DiffSpec
from diffquant.formats.opening import open_checkpoint
from diffquant.formats.reader import Checkpoint
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.architecture import Architecture
from diffquant.model.transformer import TransformerArchitecture
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme
from diffquant.source.check import check_tensors, with_embedding
from diffquant.source.identity import FilesState, checkpoint_fingerprint, checkpoint_state
from diffquant.source.stored_recipe import stored_dtype, stored_recipe
from diffquant.source.tokenizer import tokenizer_of
from diffquant.source.weight_source import WeightSource
from diffquant.text.special_tokens import SpecialTokens, read_special_tokens

_Identity = TypeVar("_Identity")


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint whose config and tensors were checked to fit together.

    Attributes:
        checkpoint: reader of its config and tensors.
        adapter: translation of its names and head layout into those of the model that runs it.
        packed: scheme of each module whose weight is stored packed, by the checkpoint's own names; empty for a
            16-bit checkpoint.
        state: state of its files when it was opened.
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
    def architecture(self) -> Architecture:
        return self.adapter.architecture

    @property
    def spec(self) -> DiffSpec:
        return self.architecture.diff_spec

    @property
    def layers(self) -> int:
        return self.architecture.num_hidden_layers

    def transformer(self, verb: str) -> TransformerArchitecture:
        """The architecture, for a verb that takes only a DiffTransformer.

        Raises:
            CheckpointError: it is another architecture.
        """
        self.check_taken(verb)
        return cast(TransformerArchitecture, self.architecture)

    def check_taken(self, verb: str, *others: type[Architecture]) -> None:
        """Check that a verb takes the model: a DiffTransformer, or one of other architectures.

        Raises:
            CheckpointError: it is another architecture.
        """
        # A subclass has blocks that these verbs do not know.
        if type(self.architecture) in (TransformerArchitecture, *others):
            return
        kinds = ", ".join(dict.fromkeys(self.architecture.layer_kinds))
        raise CheckpointError(
            f"{self.path} is a {self.model_type} model with layers of {kinds}: {verb} does not take it yet; inspect, "
            "quantize, export, verify, run, generate, eval, sweep, search and outliers do"
        )

    @property
    def weights(self) -> int:
        """Number of weights, packed ones included."""
        return sum(torch.Size(shape).numel() for shape in self.adapter.source_shapes().values())

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that `quantize` recorded in the checkpoint; 16 bits for any other checkpoint.

        Raises:
            CheckpointError: it cannot be read, or a newer diffquant wrote it.
        """
        return stored_recipe(self.checkpoint.config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model runs in unless another is asked for.

        Raises:
            CheckpointError: the checkpoint names one that is unknown.
        """
        embedding = self.adapter.source_name("model.embed_tokens.weight")
        return stored_dtype(self.checkpoint.config) or self.checkpoint.tensors[embedding].dtype

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the contents of the checkpoint's weights, config and tokenizer, wherever they lie.

        Raises:
            CheckpointError: the files changed since they were opened.
        """
        fingerprint = self._now(checkpoint_fingerprint)
        if self._now(checkpoint_state) != self.state:
            raise self._changed()
        return fingerprint

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The tokens that begin, end and pad the model's text.

        Raises:
            CheckpointError: as `read_special_tokens` raises it.
        """
        return read_special_tokens(self.path, self.checkpoint.config)

    def check_special_tokens(self) -> None:
        """Check that a copy, which their file goes along with, can be loaded.

        Raises:
            CheckpointError: as `read_special_tokens` raises it.
        """
        _ = self.special_tokens

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        return tokenizer_of(self.checkpoint)

    def __reduce__(self) -> "tuple[Callable[[Path, str, FilesState], Source], tuple[Path, str, FilesState]]":
        # Pickled as its path, and opened again in the other process.
        return _open_again, (self.path, self.fingerprint, self.state)

    def check_unchanged(self) -> None:
        """Check that the checkpoint's files are still those that were opened; call it before recording a result.

        Raises:
            CheckpointError: they changed, or are gone.
        """
        # Files may be touched without changing: compare what they hold before saying that they changed.
        if self._now(checkpoint_state) != self.state and self._now(checkpoint_fingerprint) != self.fingerprint:
            raise self._changed()

    def _now(self, identity: Callable[[Checkpoint], _Identity]) -> _Identity:
        try:
            return identity(self.checkpoint)
        except OSError as error:
            raise self._changed() from error

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self.path} changed while it was in use; run the same command again")

    def read(self, parameter: str) -> Tensor:
        """A parameter's data as the checkpoint stores it, by the model's name."""
        return self.checkpoint.read(self.adapter.source_name(parameter))


def open_source(path: Path | str | Source | WeightSource) -> Source:
    """Open a folder of safetensors or a .gguf file, and check its tensors against its config.

    Returns an open source as it is, so that every verb takes either.

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
        adapter = adapter_for(checkpoint.config).fitted_to(checkpoint.tensors)
    except UnknownModelTypeError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    checkpoint = with_embedding(checkpoint, adapter)
    state = checkpoint_state(checkpoint)
    return Source(checkpoint, adapter, check_tensors(checkpoint, adapter), state)


def _open_again(path: Path, fingerprint: str, state: FilesState) -> Source:
    """Open a checkpoint again that another process had opened.

    Raises:
        CheckpointError: it has changed since.
    """
    source = open_source(path)
    if source.state == state:
        # Exactly the same files, so there is no need to read them again.
        vars(source)["fingerprint"] = fingerprint
    elif source.fingerprint != fingerprint:
        raise source._changed()
    return source
