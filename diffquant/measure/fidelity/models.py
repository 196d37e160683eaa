"""The models whose next-token distributions are compared, and the KL divergence of two distributions."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffquant.checkpoints.texts import check_tokens
from diffquant.errors import CheckpointError
from diffquant.support.plain_data import JsonObject

if TYPE_CHECKING:
    from diffquant.checkpoints.source import Source
    from diffquant.measure.language_model import LanguageModel


# llama.cpp skips tokens whose stored log-probability is not above this, since only rounding error is left there.
_LEAST_STORED = -16.0
# A server's log-probabilities are float32, so the probability left for all other tokens is known only to about this.
_LEAST_REST = 1e-7


@dataclass(frozen=True)
class Distributions:
    """Next-token distributions at P positions, over the whole vocabulary of V tokens, or only K known tokens.

    Attributes:
        logs: log-probabilities [P, V] in float32, or [P, K] of the known tokens. A position with fewer than K known
            tokens is filled up with -inf.
        ids: ids [P, K] of the known tokens, which include the top-k, or None if all V are known.
        k: number of top tokens known at every position, or None if all tokens are known.
        is_stored: whether they were read from llama.cpp's file, which cuts off small log-probabilities.
    """

    logs: Tensor
    ids: Tensor | None = None
    k: int | None = None
    is_stored: bool = False

    @property
    def top_tokens(self) -> Tensor:
        """Top-1 token at each position, [P]."""
        top = self.logs.argmax(-1)
        return top if self.ids is None else self.ids.gather(1, top[:, None])[:, 0]

    def log_probs_of(self, tokens: Tensor) -> Tensor:
        """Return each position's log-probability [P] of its token in `tokens` [P]; NaN if that token is unknown."""
        if self.ids is None:
            return self.logs.gather(1, tokens[:, None])[:, 0]
        is_it = (self.ids == tokens[:, None]) & self.logs.isfinite()
        found = self.logs.masked_fill(~is_it, -torch.inf).amax(-1)
        return found.masked_fill(~is_it.any(-1), torch.nan)


def divergence(p: Distributions, q: Distributions) -> Tensor:
    """Compute KL(P ‖ Q) in nats at each position, float64 [P].

    If only the top-k tokens of one distribution are known, all others count as one bin. Merging outcomes never raises
    a KL divergence, so the result is then a lower bound.
    """
    if p.ids is None:
        if q.ids is not None:
            return _binned_divergence(p.logs.gather(1, q.ids).masked_fill(q.logs.isneginf(), -torch.inf), q.logs)
        weights = p.logs.exp()
        if p.is_stored:
            weights = weights.masked_fill(p.logs <= _LEAST_STORED, 0.0)
        return (weights * (p.logs - q.logs)).double().sum(-1)
    if q.ids is None:
        return _binned_divergence(p.logs, q.logs.gather(1, p.ids).masked_fill(p.logs.isneginf(), -torch.inf))
    is_same = (p.ids[:, :, None] == q.ids[:, None]) & p.logs.isfinite()[:, :, None] & q.logs.isfinite()[:, None]
    theirs = q.logs[:, None].expand_as(is_same).masked_fill(~is_same, -torch.inf).amax(-1)
    return _binned_divergence(p.logs.masked_fill(~is_same.any(-1), -torch.inf), theirs)


def _binned_divergence(p_logs: Tensor, q_logs: Tensor) -> Tensor:
    """Compute KL [P] over K tokens and one bin for all others, from log-probabilities [P, K], -inf if unknown."""
    p, q = p_logs.double().exp(), q_logs.double().exp()
    known = torch.where(p > 0, p * (p_logs.double() - q_logs.double()), 0.0).sum(-1)
    p_rest = (1 - p.sum(-1)).clamp_min(0.0)
    q_rest = (1 - q.sum(-1)).clamp_min(_LEAST_REST)
    return known + torch.xlogy(p_rest, p_rest / q_rest)


def count_scored_positions(context: int) -> int:
    """Count the positions of a chunk that are compared: those of its second half except the last."""
    return context - 1 - context // 2


class ComparedModel(ABC):
    """One of the two models whose distributions are compared.

    Attributes:
        source: the checkpoint, or None if it is an export, a file or a server.
    """

    source: "Source | None" = None

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for messages and reports."""

    @abstractmethod
    def describe_model(self) -> JsonObject:
        """Return what a result records about the model."""

    @property
    def fixed_chunks(self) -> Tensor | None:
        """The only N chunks of token ids [N, n] for which it has distributions, or None if it can read any text."""
        return None

    @property
    def max_chunk_length(self) -> int | None:
        """Largest number of tokens in a chunk that the model can read, or None if unknown."""
        return None

    @abstractmethod
    def tokens(self, text: str) -> list[int]:
        """Return a text's token ids, preceded by `prepended_bos_id` unless that is None."""

    @property
    @abstractmethod
    def prepended_bos_id(self) -> int | None:
        """Id of the BOS token that the tokenizer puts before every text, or None if it does not put one there."""

    @abstractmethod
    def predict(self, chunk_index: int, ids: Tensor) -> Distributions:
        """Return the next-token distributions at a chunk's scored positions, see `count_scored_positions`.

        Args:
            chunk_index: index of the chunk in the text.
            ids: the chunk's n token ids [n]. The first one is `prepended_bos_id`, unless that is None.
        """


class LocalModel(ComparedModel):
    """A model that runs in this process.

    Args:
        path: path of the checkpoint or exported folder, which serves as the model's name.
        model: the loaded model.
        about: what a result records about the model.
    """

    def __init__(self, path: Path, model: "LanguageModel", about: JsonObject, source: "Source | None" = None) -> None:
        self._path, self._model, self._about, self.source = path, model, about, source

    @property
    def name(self) -> str:
        return str(self._path)

    def describe_model(self) -> JsonObject:
        return self._about

    @property
    def max_chunk_length(self) -> int:
        return self._model.max_length

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._model.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        ids = ids if self.prepended_bos_id is None else [self.prepended_bos_id, *ids]
        self._check(ids)
        return ids

    @cached_property
    def prepended_bos_id(self) -> int | None:
        # Many tokenizers define a BOS token but do not put it before a text.
        bos, ids = self._model.tokenizer.bos_token_id, self._model.tokenizer.encode("a")
        return int(bos) if bos is not None and ids and ids[0] == bos else None

    def _check(self, ids: list[int]) -> None:
        check_tokens(ids, self._model.vocabulary_size, self._model.tokenizer)

    @torch.inference_mode()
    def predict(self, chunk_index: int, ids: Tensor) -> Distributions:
        # The token ids may come from the other side, such as a base file.
        self._check(ids.tolist())
        first = len(ids) - 1 - count_scored_positions(len(ids))
        states = self._model.compute_outputs(ids[None].to(self._model.device))[0][first:-1]
        logits = states.float32_logits()
        if not logits.isfinite().all():
            raise CheckpointError(f"{self.name} computes NaN or infinity in chunk {chunk_index}; use --dtype float32")
        return Distributions(logits.log_softmax(-1).cpu())
