"""Sequences of token ids that a verification reads: passages of the prose that ships, from end to end of it."""

from collections.abc import Sequence

import numpy as np

from diffquant.data import books_text
from diffquant.errors import CheckpointError
from diffquant.model.config import DiffTransformerConfig
from diffquant.source.source import Source

POSITIONS = 512
LONGEST = 160
# Of the longest passage, the positions that prove what a route does with masks and caches.
BEGINNING = 48
# Passages differ in length, so that a padded batch has padding; the first is the longest.
_SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.9)
_SHORTEST = 2
# No tokenizer makes a token of more characters on average.
_CHARACTERS = 12


def sample_passages(source: Source, config: DiffTransformerConfig) -> list[np.ndarray]:
    """Passages of token ids [1, T], at least `POSITIONS` tokens in all: prose where there is a tokenizer, else random.

    Args:
        source: checkpoint, for its tokenizer.
        config: configuration of the model, for its context and vocabulary.
    """
    lengths = _lengths(min(LONGEST, config.max_position_embeddings - 1))
    passages = _prose(source, lengths)
    if passages is None or max(map(max, passages)) >= config.vocab_size:
        rng = np.random.default_rng(0)
        passages = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
    return [np.array([ids], np.int64) for ids in passages]


def beginnings(passages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The first positions of some passages, whose lengths are to each other as those of the passages."""
    return [ids[:, : max(min(_SHORTEST, ids.shape[1]), ids.shape[1] * BEGINNING // LONGEST)] for ids in passages]


def _lengths(longest: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < POSITIONS:
        share = _SHARES[len(lengths) % len(_SHARES)]
        lengths.append(max(min(_SHORTEST, longest), round(longest * share)))
    return lengths


def _prose(source: Source, lengths: list[int]) -> list[list[int]] | None:
    """Passages at equal distances in the prose; None without a tokenizer, or with one that makes too few tokens."""
    try:
        tokenizer = source.tokenizer
    except CheckpointError:
        return None
    text = books_text()
    passages = []
    for number, length in enumerate(lengths):
        start = number * len(text) // len(lengths)
        ids = tokenizer(text[start : start + _CHARACTERS * length])["input_ids"][:length]
        if len(ids) < length:
            return None
        passages.append(list(ids))
    return passages
