"""The sides of a comparison, and those of them that run here: checkpoints and exported folders."""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.evals.fidelity.distributions import Distributions, Whole
from diffquant.support.plain_data import JsonObject
from diffquant.text.prompts import check_tokens

if TYPE_CHECKING:
    from diffquant.evals.language_model import LanguageModel


class Side(ABC):
    """One of the two models whose distributions are compared."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for people."""

    @abstractmethod
    def about(self) -> JsonObject:
        """Description of the model as plain data."""

    @property
    def fixed_chunks(self) -> Tensor | None:
        """The only tokens [chunks, n] it has distributions for, or None if it can read any text."""
        return None

    @property
    def longest(self) -> int | None:
        """Largest number of tokens in a chunk that it can read, or None if unknown."""
        return None

    @abstractmethod
    def tokens(self, text: str) -> list[int]:
        """A text's tokens, after the model's first token if it has one."""

    @property
    @abstractmethod
    def first_token(self) -> int | None:
        """The token that replaces a chunk's first one, or None."""

    @abstractmethod
    def predict(self, number: int, ids: Tensor, first: int) -> Distributions:
        """Distributions of the tokens behind positions `first` to n - 2 of a chunk.

        Args:
            number: the chunk's number in the text.
            ids: its tokens [n], the first one replaced where `first_token` says so.
        """


class Model(Side):
    """A model that runs here."""

    def __init__(self, path: Path, model: "LanguageModel", about: JsonObject) -> None:
        self._path, self._model, self._about = path, model, about

    @property
    def name(self) -> str:
        return str(self._path)

    def about(self) -> JsonObject:
        return self._about

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._model.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        ids = ids if self.first_token is None else [self.first_token, *ids]
        self._check(ids)
        return ids

    @cached_property
    def first_token(self) -> int | None:
        # The token is named by many tokenizers that do not put it before a text.
        bos, ids = self._model.tokenizer.bos_token_id, self._model.tokenizer.encode("a")
        return int(bos) if bos is not None and ids and ids[0] == bos else None

    def _check(self, ids: list[int]) -> None:
        check_tokens(ids, self._model.vocabulary, self._model.tokenizer)

    @torch.inference_mode()
    def predict(self, number: int, ids: Tensor, first: int) -> Whole:
        # Another side's tokens, such as a file's, may come here too.
        self._check(ids.tolist())
        states = self._model.read(ids[None].to(self._model.device))[0][first:-1]
        logits = states.exact_logits()
        if not logits.isfinite().all():
            raise CheckpointError(f"{self.name} computes NaN or infinity in chunk {number}; use --dtype float32")
        return Whole(logits.log_softmax(-1).cpu())
