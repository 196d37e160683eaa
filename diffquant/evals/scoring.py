"""Scoring of continuations by their log-probabilities: a context runs once, and its continuations reuse the cache.

Contexts are left-padded, so that they end together; continuations are right-padded. Where a scale of the
recipe spans rows of one sequence, a shared prefix would change it: such recipes run whole sequences,
left-padded. Where it spans so many tokens, padding would move them too: then batches are of one length.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError
from diffquant.evals.batching import pass_cost_on, split_into_runs
from diffquant.evals.defaults import BATCH_TOKENS
from diffquant.evals.encoding import Request
from diffquant.evals.language_model import LanguageModel, States, TokenCache
from diffquant.support.progress import Progress, silent
from diffquant.support.spelling import spelled

# Entries of vocabulary logits held at once: 16 MiB in float32 stay in a CPU's cache, where the softmax over
# them ran much faster than on 64 MiB.
LOGITS_ENTRIES = 1 << 22
# On a CUDA device memory is the limit: 512 MiB in float32, or this share of it where that is less.
_CUDA_LOGITS_ENTRIES = 1 << 27
_CUDA_SHARE = 32


class Score(NamedTuple):
    """Summed log-probability of a continuation, and whether greedy decoding would produce it."""

    logprob: float
    greedy: bool


class Watcher(Protocol):
    """Something that sees the states from which continuations are scored, as they pass."""

    def see(self, owners: Sequence[int], states: States) -> None:
        """Look at states, each with the index of the request whose token it predicts.

        A request's states come in the order of its tokens, in one call or several.
        """


@torch.inference_mode()
def score(
    model: LanguageModel,
    requests: Sequence[Request],
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
    watcher: Watcher | None = None,
) -> list[Score]:
    """Score every request, in the order given.

    Args:
        batch_tokens: most tokens of one pass, cached context and padding included; bounds memory.
        watcher: what sees the states that the scores are made of.

    Raises:
        NonFiniteError: the model's logits are not finite.

    Source: the numbers are those of lm-eval's HFLM (`_loglikelihood_tokens`).
    """
    totals = _Totals(len(requests), progress, watcher)
    run = _score_shared if model.shares_prefixes else _score_whole
    run(model, requests, batch_tokens, totals)
    if not totals.logprob.isfinite().all():
        raise NonFiniteError(f"the model computes NaN or infinity; use {spelled('dtype', 'float32')}, or wider bits")
    return totals.scores()


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
        # In place: a log_softmax would write all of the vocabulary again, and took five times as long.
        logprobs.append(picked - logits.sub_(largest).exp_().sum(1, keepdim=True).log())
        greedy.append(likeliest == wanted)
    return torch.cat(logprobs), torch.cat(greedy)


def _logits_entries(device: torch.device) -> int:
    """Entries of vocabulary logits held at once."""
    if device.type != "cuda":
        return LOGITS_ENTRIES
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(_CUDA_LOGITS_ENTRIES, memory // (_CUDA_SHARE * torch.float32.itemsize))


class _Totals:
    """Running sums over each request's tokens."""

    def __init__(self, count: int, progress: Progress, watcher: Watcher | None) -> None:
        self.logprob = torch.zeros(count, dtype=torch.float64)
        self.greedy = torch.ones(count, dtype=torch.bool)
        self.count = count
        self.done = 0
        self.progress = progress
        self.watcher = watcher

    def add(self, owners: list[int], logprobs: Tensor, greedy: Tensor) -> None:
        """Add tokens, with one entry each: its request, its log-probability, whether it was the likeliest."""
        index = torch.tensor(owners, dtype=torch.long)
        self.logprob.index_add_(0, index, logprobs.double().cpu())
        self.greedy[index[~greedy.cpu()]] = False

    def finish(self, requests: int) -> None:
        """Count requests as done."""
        self.done += requests
        self.progress(self.done, self.count, "scoring")

    def scores(self) -> list[Score]:
        return [Score(p, g) for p, g in zip(self.logprob.tolist(), self.greedy.tolist(), strict=True)]


def _score_shared(model: LanguageModel, requests: Sequence[Request], batch_tokens: int, totals: _Totals) -> None:
    continuations: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        continuations[request.context].append(index)
    contexts = sorted(continuations, key=len, reverse=True)
    lengths, pass_cost = [len(context) for context in contexts], pass_cost_on(model.device.type)
    for run in split_into_runs(lengths, batch_tokens, pass_cost=pass_cost):
        batch = [contexts[i] for i in run]
        owners = [continuations[context] for context in batch]
        cache, mask, states = _prefill(model, batch)
        _add_first_tokens(states, requests, owners, totals)
        _add_further_tokens(model, cache, mask, requests, owners, batch_tokens, totals)
        totals.finish(sum(map(len, owners)))


def _prefill(model: LanguageModel, contexts: list[tuple[int, ...]]) -> tuple[TokenCache, Tensor, States]:
    """Run contexts [B, S], left-padded; returns cache, mask [B, S], and the states after each context's last token."""
    width = max(map(len, contexts))
    ids = torch.tensor([[0] * (width - len(c)) + list(c) for c in contexts], device=model.device)
    mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts], device=model.device)
    cache = model.new_cache()
    return cache, mask, model.read(ids, mask, cache)[:, -1]


def _add_first_tokens(states: States, requests: Sequence[Request], owners: list[list[int]], totals: _Totals) -> None:
    """Add each continuation's first token, which the context's last state predicts."""
    most = max(map(len, owners))
    first = [[requests[i].continuation[0] for i in group] for group in owners]
    targets = torch.tensor([row + [0] * (most - len(row)) for row in first], device=states.values.device)
    real = torch.tensor([[column < len(row) for column in range(most)] for row in first])
    logprobs, greedy = token_scores(states, targets)
    owner_of = [i for group in owners for i in group]
    totals.add(owner_of, logprobs.cpu()[real], greedy.cpu()[real])
    if totals.watcher:
        rows = torch.tensor([row for row, group in enumerate(owners) for _ in group])
        totals.watcher.see(owner_of, states[rows])


def _add_further_tokens(
    model: LanguageModel,
    cache: TokenCache,
    mask: Tensor,
    requests: Sequence[Request],
    owners: list[list[int]],
    batch_tokens: int,
    totals: _Totals,
) -> None:
    """Run the continuations that have more tokens than one, in batches of alike length."""
    rows = [(b, i) for b, group in enumerate(owners) for i in group if len(requests[i].continuation) > 1]
    rows.sort(key=lambda row: len(requests[row[1]].continuation), reverse=True)
    lengths = [len(requests[i].continuation) - 1 for _, i in rows]
    for run in split_into_runs(lengths, batch_tokens, mask.shape[1], pass_cost_on(model.device.type)):
        picked = [rows[k] for k in run]
        branch = cache if run.stop == len(rows) else cache.branch()
        _add_continuations(model, branch, mask, [b for b, _ in picked], [i for _, i in picked], requests, totals)


def _add_continuations(
    model: LanguageModel,
    cache: TokenCache,
    mask: Tensor,
    contexts: list[int],
    owners: list[int],
    requests: Sequence[Request],
    totals: _Totals,
) -> None:
    """Run continuations [R, T], right-padded, each after the cached context of its row."""
    tokens = [requests[i].continuation for i in owners]
    width = max(map(len, tokens)) - 1
    device = mask.device
    chosen = torch.tensor(contexts, device=device)
    padded = torch.tensor([list(t) + [0] * (width + 1 - len(t)) for t in tokens], device=device)
    real = torch.tensor([[column < len(t) - 1 for column in range(width)] for t in tokens], device=device)
    cache.select(chosen)
    states = model.read(padded[:, :-1], torch.cat([mask[chosen], real.to(mask.dtype)], 1), cache)
    owner_of = [i for i, t in zip(owners, tokens, strict=True) for _ in t[1:]]
    _add_tokens(states[real], padded[:, 1:][real], owner_of, totals)


def _score_whole(model: LanguageModel, requests: Sequence[Request], batch_tokens: int, totals: _Totals) -> None:
    lengths = [len(request.context) + len(request.continuation) - 1 for request in requests]
    order = sorted(range(len(requests)), key=lengths.__getitem__, reverse=True)
    groups = [order] if model.takes_padding else [list(alike) for _, alike in groupby(order, lengths.__getitem__)]
    for group in groups:
        widths, pass_cost = [lengths[index] for index in group], pass_cost_on(model.device.type)
        for run in split_into_runs(widths, batch_tokens, pass_cost=pass_cost):
            owners = [group[place] for place in run]
            _add_sequences(model, [requests[i] for i in owners], owners, totals)
            totals.finish(len(owners))


def _add_sequences(model: LanguageModel, requests: list[Request], owners: list[int], totals: _Totals) -> None:
    """Run sequences [R, T], left-padded; only the continuations' tokens are scored."""
    sequences = [request.context + request.continuation for request in requests]
    width = max(map(len, sequences))
    tokens = torch.tensor([(0,) * (width - len(s)) + s for s in sequences], device=model.device)
    columns = torch.arange(1, width, device=tokens.device)
    first = torch.tensor([[width - len(s)] for s in sequences], device=tokens.device)
    states = model.read(tokens[:, :-1], (columns > first).long() if first.any() else None)
    scored = columns >= first + torch.tensor([[len(r.context)] for r in requests], device=tokens.device)
    owner_of = [i for i, r in zip(owners, requests, strict=True) for _ in r.continuation]
    _add_tokens(states[scored], tokens[:, 1:][scored], owner_of, totals)


def _add_tokens(states: States, targets: Tensor, owners: list[int], totals: _Totals) -> None:
    """Add tokens [N], each with the state that predicts it and its request."""
    logprobs, greedy = token_scores(states, targets.unsqueeze(1))
    totals.add(owners, logprobs.flatten(), greedy.flatten())
    if totals.watcher:
        totals.watcher.see(owners, states)
