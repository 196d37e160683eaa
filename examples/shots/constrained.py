"""Greedy decoding restricted to given labels, after one prefix that all queries share.

Each token is the likeliest among those that continue some label, until one label is left. The prefix runs once
and every query reuses its cache. If a scale of the recipe spans rows of a sequence, a shared prefix would change
it: such recipes run every sequence from its start at every token. Queries of one length run together, so nothing
is padded.

Source: Ratner et al., arXiv 2212.10947, whose restricted decoding arXiv 2410.05258, section 3.5, uses.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from diffquant.measure.language_model import LanguageModel, require_finite
from diffquant.measure.task import BATCH_TOKENS
from diffquant.support.progress import Progress, report_nothing

Tokens = Sequence[int]


@torch.inference_mode()
def choose(
    model: LanguageModel,
    prefix: Tokens,
    queries: Sequence[Tokens],
    labels: Sequence[Tokens],
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
) -> list[int]:
    """Choose a label for each query: the one that greedy decoding spells after the prefix and the query.

    Args:
        prefix, queries, labels: token ids, none empty; no label begins another.
        batch_tokens: largest number of tokens per pass, the prefix included; bounds memory.

    Returns:
        The index of each query's label.

    Raises:
        NonFiniteError: the model's logits are not finite.
    """
    start = _Sequences(model, prefix)
    chosen = [0] * len(queries)
    done = 0
    for batch in _batches_of_one_length(queries, len(prefix) + max(map(len, labels)), batch_tokens):
        spelled_out = _spell(start.branch(), [queries[i] for i in batch], labels)
        for index, label in zip(batch, spelled_out, strict=True):
            chosen[index] = label
        done += len(batch)
        progress(done, len(queries), "classifying")
    return chosen


class _Sequences:
    """A growing batch of token sequences, one per row; at first only the prefix.

    If the model can share prefixes, keys and values are kept; otherwise sequences rerun from their first token.
    """

    def __init__(self, model: LanguageModel, prefix: Tokens) -> None:
        self.model = model
        self.rows = [list(prefix)]
        self.cache = model.new_cache() if model.can_share_prefixes else None
        if self.cache is not None:
            model.compute_outputs(torch.tensor(self.rows, device=model.device), cache=self.cache)

    def branch(self) -> Self:
        """A copy of the sequences that grows independently."""
        other = copy.copy(self)
        other.cache = None if self.cache is None else copy.deepcopy(self.cache)
        return other

    def extend(self, rows: list[int], tokens: Sequence[Tokens]) -> Tensor:
        """Keep these R rows, in this order, and append tokens [R, T]; returns logits [R, V] of what follows."""
        # A long prefix takes much of the memory: copy it only if rows change.
        if self.cache is not None and rows != list(range(len(self.rows))):
            self.cache.batch_select_indices(torch.tensor(rows, device=self.model.device))
        self.rows = [self.rows[row] + list(new) for row, new in zip(rows, tokens, strict=True)]
        ids = torch.tensor(self.rows if self.cache is None else [*map(list, tokens)], device=self.model.device)
        logits = self.model.compute_outputs(ids, cache=self.cache)[:, -1].logits()
        require_finite(logits)
        return logits


def _spell(sequences: _Sequences, queries: Sequence[Tokens], labels: Sequence[Tokens]) -> list[int]:
    """The index of each query's label; all queries have one length."""
    possible = [list(range(len(labels))) for _ in queries]
    undecided = list(range(len(queries)))
    logits = sequences.extend([0] * len(queries), queries)
    depth = 0
    while True:
        allowed = [sorted({labels[label][depth] for label in possible[query]}) for query in undecided]
        tokens = _likeliest(logits, allowed)
        for query, token in zip(undecided, tokens, strict=True):
            possible[query] = [label for label in possible[query] if labels[label][depth] == token]
        rows = [row for row, query in enumerate(undecided) if len(possible[query]) > 1]
        if not rows:
            return [label for (label,) in possible]
        undecided = [undecided[row] for row in rows]
        logits = sequences.extend(rows, [[tokens[row]] for row in rows])
        depth += 1


def _likeliest(logits: Tensor, allowed: list[list[int]]) -> list[int]:
    """The allowed token with the largest logit in each row of [R, V]; the smaller id if equal."""
    most = max(map(len, allowed))
    # Pad with the first allowed token, which does not change the argmax.
    tokens = torch.tensor([ids + ids[:1] * (most - len(ids)) for ids in allowed], device=logits.device)
    return tokens.gather(1, logits.gather(1, tokens).argmax(1, keepdim=True)).flatten().tolist()


def _batches_of_one_length(queries: Sequence[Tokens], cached: int, batch_tokens: int) -> Iterator[list[int]]:
    """Batches of equally long queries, as indices: longest first, as many as fit a pass with the cached tokens."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, query in enumerate(queries):
        by_length[len(query)].append(index)
    for length in sorted(by_length, reverse=True):
        rows = max(1, batch_tokens // (cached + length))
        for first in range(0, len(by_length[length]), rows):
            yield by_length[length][first : first + rows]
