"""Scores continuations by log-probability: a context runs once, and its continuations reuse the cache.

Contexts are left-padded, so that they end together; continuations are right-padded. If a scale of the recipe spans
rows of a sequence, a shared prefix would change it: such recipes run whole sequences, left-padded. If a scale spans
several tokens, padding would shift its groups: then all sequences of a batch have one length.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from diffquant.evals.batching import pass_cost_on, split_into_runs
from diffquant.evals.defaults import BATCH_TOKENS
from diffquant.evals.encoding import Request
from diffquant.evals.language_model import LanguageModel, States, require_finite
from diffquant.support.progress import Progress, silent

# Vocabulary logits to hold at once: 16 MiB in float32 stay in a CPU's cache, where the softmax over
# them ran much faster than on 64 MiB.
LOGITS_ENTRIES = 1 << 22
# On a CUDA device memory is the limit: 512 MiB of float32, or this share of the memory if that is less.
_CUDA_LOGITS_ENTRIES = 1 << 27
_CUDA_SHARE = 32


class Score(NamedTuple):
    """A continuation's summed log-probability, and whether greedy decoding would produce it."""

    logprob: float
    greedy: bool


# A callback that receives the states that predict continuations, each with the index of its request. A request's
# states arrive in the order of its tokens, in one call or several.
Watch = Callable[[Sequence[int], States], None]


class _Predictions(NamedTuple):
    """Tokens to score, and the states that predict them.

    Attributes:
        states: states at N positions.
        targets: [N, M] tokens; a row may be padded.
        owners: for each row, the indices of the requests whose tokens are in its first columns.
        finished: number of requests that end with these tokens.
    """

    states: States
    targets: Tensor
    owners: list[list[int]]
    finished: int


@torch.inference_mode()
def score(
    model: LanguageModel,
    requests: Sequence[Request],
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
    watch: Watch | None = None,
) -> list[Score]:
    """Score every request, in the order given.

    Args:
        batch_tokens: largest number of tokens per pass, cached context and padding included; bounds memory.
        watch: receives the states from which the scores are computed.

    Raises:
        NonFiniteError: the model's logits are not finite.

    Source: the numbers are those of lm-eval's HFLM (`_loglikelihood_tokens`).
    """
    totals, is_greedy = torch.zeros(len(requests), dtype=torch.float64), torch.ones(len(requests), dtype=torch.bool)
    done = 0
    passes = _after_contexts if model.shares_prefixes else _whole
    for states, targets, owners, finished in passes(model, requests, batch_tokens):
        logprobs, greedy = token_scores(states, targets)
        real = torch.arange(targets.shape[1]) < torch.tensor([[len(row)] for row in owners])
        owner_of = [owner for row in owners for owner in row]
        index = torch.tensor(owner_of, dtype=torch.long)
        totals.index_add_(0, index, logprobs.cpu()[real].double())
        is_greedy[index[~greedy.cpu()[real]]] = False
        if watch:
            rows = torch.tensor([number for number, row in enumerate(owners) for _ in row])
            watch(owner_of, states if targets.shape[1] == 1 else states[rows])
        done += finished
        if finished:
            progress(done, len(requests), "scoring")
    require_finite(totals)
    return [Score(logprob, greedy) for logprob, greedy in zip(totals.tolist(), is_greedy.tolist(), strict=True)]


def token_scores(states: States, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of targets under the next-token distribution at each position.

    Args:
        states: states at N positions.
        targets: [N, M] token ids.

    Returns:
        float32 [N, M] natural log-probabilities, and bool [N, M]: the target is the likeliest token.
    """
    logprobs, greedy = [], []
    rows = max(1, _logits_entries(states.values.device) // states.vocabulary)
    for part, wanted in zip(states.split(rows), targets.split(rows), strict=True):
        logits = part.logits()
        largest, likeliest = logits.max(1, keepdim=True)
        picked = logits.gather(1, wanted) - largest
        # In place: log_softmax would write the whole vocabulary again, and took five times as long.
        logprobs.append(picked - logits.sub_(largest).exp_().sum(1, keepdim=True).log())
        greedy.append(likeliest == wanted)
    return torch.cat(logprobs), torch.cat(greedy)


def _logits_entries(device: torch.device) -> int:
    """Number of vocabulary logits to hold at once."""
    if device.type != "cuda":
        return LOGITS_ENTRIES
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(_CUDA_LOGITS_ENTRIES, memory // (_CUDA_SHARE * torch.float32.itemsize))


def _after_contexts(model: LanguageModel, requests: Sequence[Request], batch_tokens: int) -> Iterator[_Predictions]:
    """Run each context once, then the continuations that share it; contexts are padded if they may be."""
    sharers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        sharers[request.context].append(index)
    contexts = list(sharers)
    pass_cost = pass_cost_on(model.device.type)
    for run in _batches(model, [*map(len, contexts)], batch_tokens, pass_cost):
        batch = [contexts[i] for i in run]
        owners = [sharers[context] for context in batch]
        # Contexts [B, S], left-padded: the state after the last token predicts each continuation's first.
        ids, mask = (padded.to(model.device) for padded in _padded(batch, is_left=True))
        cache = model.new_cache()
        states = model.read(ids, mask, cache)[:, -1]
        first, _ = _padded([[requests[i].continuation[0] for i in group] for group in owners])
        rows = [(row, i) for row, group in enumerate(owners) for i in group if len(requests[i].continuation) > 1]
        yield _Predictions(states, first.to(model.device), owners, sum(map(len, owners)) - len(rows))
        rows.sort(key=lambda row: len(requests[row[1]].continuation), reverse=True)
        lengths = [len(requests[i].continuation) - 1 for _, i in rows]
        for part in split_into_runs(lengths, batch_tokens, mask.shape[1], pass_cost):
            # Continuations [R, T], right-padded, each after the cached context of its row.
            picked = [i for _, i in rows[part.start : part.stop]]
            branch = cache if part.stop == len(rows) else cache.branch()
            chosen = torch.tensor([row for row, _ in rows[part.start : part.stop]], device=model.device)
            branch.select(chosen)
            tokens, real = (padded.to(model.device) for padded in _padded([requests[i].continuation for i in picked]))
            scored = real[:, 1:].bool()
            states = model.read(tokens[:, :-1], torch.cat([mask[chosen], real[:, 1:]], 1), branch)[scored]
            owner_of = [[i] for i in picked for _ in requests[i].continuation[1:]]
            yield _Predictions(states, tokens[:, 1:][scored].unsqueeze(1), owner_of, len(picked))


def _whole(model: LanguageModel, requests: Sequence[Request], batch_tokens: int) -> Iterator[_Predictions]:
    """Run whole sequences [R, T], left-padded, or of one length if the model cannot take padding."""
    sequences = [request.context + request.continuation for request in requests]
    lengths = [len(sequence) - 1 for sequence in sequences]
    for owners in _batches(model, lengths, batch_tokens, pass_cost_on(model.device.type)):
        tokens, real = (padded.to(model.device) for padded in _padded([sequences[i] for i in owners], is_left=True))
        new = torch.tensor([[len(requests[i].continuation)] for i in owners], device=model.device)
        # Score only the continuations' tokens.
        scored = torch.arange(1, tokens.shape[1], device=model.device) >= tokens.shape[1] - new
        states = model.read(tokens[:, :-1], None if real.all() else real[:, :-1])[scored]
        owner_of = [[i] for i in owners for _ in requests[i].continuation]
        yield _Predictions(states, tokens[:, 1:][scored].unsqueeze(1), owner_of, len(owners))


def _batches(model: LanguageModel, lengths: Sequence[int], batch_tokens: int, pass_cost: int) -> Iterator[list[int]]:
    """Sequences that run together, padded on the left: indices of `lengths`, the longest first.

    They have one length if the model cannot take padding, which would shift the groups of tokens that share a scale.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups = [order] if model.takes_padding else [list(alike) for _, alike in groupby(order, lengths.__getitem__)]
    for group in groups:
        for run in split_into_runs([lengths[index] for index in group], batch_tokens, pass_cost=pass_cost):
            yield [group[place] for place in run]


def _padded(rows: Sequence[Sequence[int]], is_left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows of tokens [R, T] with zeros beside them, and a mask [R, T] that is 0 there."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if is_left else slice(len(row))
        ids[number, place] = torch.tensor(row)
        mask[number, place] = 1
    return ids, mask
