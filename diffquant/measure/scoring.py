"""Scores continuations by log-probability: a context runs once, and its continuations reuse the cache.

Contexts are left-padded, so that they end together; continuations are right-padded. If a scale of the recipe spans
rows of a sequence, a shared prefix would change it: such recipes run whole sequences, left-padded. If a scale spans
several tokens, padding would shift its groups: then all sequences of a batch have the same length.

The KL divergence from another model's next-token distributions is also computed here.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from diffquant.measure.language_model import LanguageModel, ModelOutputs, Request, require_finite
from diffquant.measure.task import BATCH_TOKENS
from diffquant.support.progress import Progress, report_nothing

# Vocabulary logits to hold at once: 16 MiB in float32 stay in a CPU's cache, where the softmax over
# them ran much faster than on 64 MiB.
LOGITS_ENTRIES = 1 << 22
# On a CUDA device memory is the limit: 512 MiB of float32, or this share of the memory if that is less.
_CUDA_LOGITS_ENTRIES = 1 << 27
_CUDA_SHARE = 32


# A callback that receives the states that predict continuations, each with the index of its request. A request's
# states arrive in the order of its tokens, in one call or several.
Watch = Callable[[Sequence[int], ModelOutputs], None]


# Tokens to score, and what predicts them: states at N positions; targets [N, M], whose rows may be padded; for each row
# the indices of the requests whose tokens are in its first columns; and the number of requests that end.
_Predictions = tuple[ModelOutputs, Tensor, list[list[int]], int]


@torch.inference_mode()
def score(
    model: LanguageModel,
    requests: Sequence[Request],
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
    watch: Watch | None = None,
) -> list[tuple[float, bool]]:
    """Score every request, in the order given.

    Args:
        batch_tokens: largest number of tokens per pass, cached context and padding included; bounds memory.
        watch: called with the outputs that predict continuation tokens, and with the index of each one's request; see
            `Watch`.

    Returns:
        For each continuation its summed log-probability, and whether greedy decoding would produce it.

    Raises:
        NonFiniteError: the model's logits are not finite.

    Source: the numbers are those of lm-eval's HFLM (`_loglikelihood_tokens`).
    """
    totals, is_greedy = torch.zeros(len(requests), dtype=torch.float64), torch.ones(len(requests), dtype=torch.bool)
    done = 0
    passes = _read_after_contexts if model.can_share_prefixes else _read_whole
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
    return list(zip(totals.tolist(), is_greedy.tolist(), strict=True))


def token_scores(states: ModelOutputs, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of targets under the next-token distribution at each position.

    Args:
        states: states at N positions.
        targets: [N, M] ids of the M tokens to score at each position.

    Returns:
        float32 [N, M] natural log-probabilities, and bool [N, M]: whether the target is the top-1 token.
    """
    logprobs, greedy = [], []
    rows = max(1, _logits_entries(states.values.device) // states.vocabulary_size)
    for part, wanted in zip(states.split(rows), targets.split(rows), strict=True):
        logits = part.logits()
        largest, likeliest = logits.max(1, keepdim=True)
        picked = logits.gather(1, wanted) - largest
        # In place: log_softmax would write the whole vocabulary again, and took five times as long.
        logprobs.append(picked - logits.sub_(largest).exp_().sum(1, keepdim=True).log())
        greedy.append(likeliest == wanted)
    return torch.cat(logprobs), torch.cat(greedy)


def _logits_entries(device: torch.device) -> int:
    """Return the number of vocabulary logits to hold at once."""
    if device.type != "cuda":
        return LOGITS_ENTRIES
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(_CUDA_LOGITS_ENTRIES, memory // (_CUDA_SHARE * torch.float32.itemsize))


def _read_after_contexts(
    model: LanguageModel, requests: Sequence[Request], batch_tokens: int
) -> Iterator[_Predictions]:
    """Run each context once, then the continuations that share it; contexts are padded if the model allows it."""
    sharers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        sharers[request.context].append(index)
    contexts = list(sharers)
    pass_cost = pass_cost_on(model.device.type)
    for run in _batches(model, [*map(len, contexts)], batch_tokens, pass_cost):
        batch = [contexts[i] for i in run]
        owners = [sharers[context] for context in batch]
        # Contexts [B, S], left-padded: the state after the last token predicts each continuation's first.
        ids, mask = (padded.to(model.device) for padded in _pad(batch, is_left=True))
        cache = model.new_cache()
        states = model.compute_outputs(ids, mask, cache)[:, -1]
        first, _ = _pad([[requests[i].continuation[0] for i in group] for group in owners])
        rows = [(row, i) for row, group in enumerate(owners) for i in group if len(requests[i].continuation) > 1]
        yield states, first.to(model.device), owners, sum(map(len, owners)) - len(rows)
        rows.sort(key=lambda row: len(requests[row[1]].continuation), reverse=True)
        lengths = [len(requests[i].continuation) - 1 for _, i in rows]
        for part in split_into_passes(lengths, batch_tokens, mask.shape[1], pass_cost):
            # Continuations [R, T], right-padded, each after the cached context of its row.
            picked = [i for _, i in rows[part.start : part.stop]]
            branch = cache if part.stop == len(rows) else copy.deepcopy(cache)
            chosen = torch.tensor([row for row, _ in rows[part.start : part.stop]], device=model.device)
            branch.batch_select_indices(chosen)
            tokens, real = (padded.to(model.device) for padded in _pad([requests[i].continuation for i in picked]))
            scored = real[:, 1:].bool()
            states = model.compute_outputs(tokens[:, :-1], torch.cat([mask[chosen], real[:, 1:]], 1), branch)[scored]
            owner_of = [[i] for i in picked for _ in requests[i].continuation[1:]]
            yield states, tokens[:, 1:][scored].unsqueeze(1), owner_of, len(picked)


def _read_whole(model: LanguageModel, requests: Sequence[Request], batch_tokens: int) -> Iterator[_Predictions]:
    """Run whole sequences [R, T], left-padded, or of one length if the model cannot take padding."""
    sequences = [request.context + request.continuation for request in requests]
    lengths = [len(sequence) - 1 for sequence in sequences]
    for owners in _batches(model, lengths, batch_tokens, pass_cost_on(model.device.type)):
        tokens, real = (padded.to(model.device) for padded in _pad([sequences[i] for i in owners], is_left=True))
        new = torch.tensor([[len(requests[i].continuation)] for i in owners], device=model.device)
        # Score only the continuations' tokens.
        scored = torch.arange(1, tokens.shape[1], device=model.device) >= tokens.shape[1] - new
        states = model.compute_outputs(tokens[:, :-1], None if real.all() else real[:, :-1])[scored]
        owner_of = [[i] for i in owners for _ in requests[i].continuation]
        yield states, tokens[:, 1:][scored].unsqueeze(1), owner_of, len(owners)


def _batches(model: LanguageModel, lengths: Sequence[int], batch_tokens: int, pass_cost: int) -> Iterator[list[int]]:
    """Yield batches of sequences, padded on the left, as indices of `lengths`, the longest first.

    They have one length if the model cannot take padding, which would shift the groups of tokens that share a scale.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups = [order] if model.can_take_padding else [list(alike) for _, alike in groupby(order, lengths.__getitem__)]
    for group in groups:
        for run in split_into_passes([lengths[index] for index in group], batch_tokens, pass_cost=pass_cost):
            yield [group[place] for place in run]


def _pad(rows: Sequence[Sequence[int]], is_left: bool = False) -> tuple[Tensor, Tensor]:
    """Pad rows of tokens to [R, T] with zeros; also return a mask [R, T] that is 0 at padding."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if is_left else slice(len(row))
        ids[number, place] = torch.tensor(row)
        mask[number, place] = 1
    return ids, mask


# Fixed cost of a forward pass, in tokens. The CPU's number was measured on two cores with a model of 135 M
# parameters; the one for CUDA estimates how much a device reads while the host launches a pass.
# It only trades padding against passes; results do not depend on it.
PASS_COST = 48
_CUDA_PASS_COST = 4096


def pass_cost_on(device_type: str) -> int:
    """Return the fixed cost of a forward pass in tokens on a type of device, such as "cuda"."""
    return _CUDA_PASS_COST if device_type == "cuda" else PASS_COST


def split_into_passes(lengths: Sequence[int], budget: int, cached: int = 0, pass_cost: int = PASS_COST) -> list[range]:
    """Split sequences into consecutive runs, one per forward pass, that minimize the cost of all passes.

    A run costs its number of tokens, padding included, plus `pass_cost`.

    Args:
        lengths: number of tokens in each sequence, longest first.
        budget: largest number of tokens in a run, padding and cached tokens included; a longer sequence runs alone.
        cached: number of tokens that each sequence already has in a cache.

    Returns:
        Consecutive ranges that cover every index.
    """
    first_as_long: list[int] = []
    for index, length in enumerate(lengths):
        is_shorter = index == 0 or length < lengths[index - 1]
        first_as_long.append(index if is_shorter else first_as_long[-1])
    cheapest, start_of = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        best, best_start, start = float("inf"), end - 1, end
        while start:
            length = lengths[start - 1]
            # Among sequences of one length, a run should take all that fit: leaving one out costs the run before at
            # least its length. So we try one start per length instead of one per sequence.
            farthest = max(first_as_long[start - 1], end - max(budget // (length + cached), 1))
            if farthest >= start:
                break
            cost = cheapest[farthest] + (end - farthest) * length + pass_cost
            if cost < best:
                best, best_start = cost, farthest
            start = farthest
            if start > first_as_long[start]:
                break
        cheapest.append(best)
        start_of.append(best_start)
    runs = []
    end = len(lengths)
    while end:
        runs.append(range(start_of[end], end))
        end = start_of[end]
    return runs[::-1]


# Float32 vocabulary logits to hold at once for each model: 32 MiB.
_KL_ENTRIES = 1 << 23


def next_token_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Compute KL(P ‖ Q) [N] in nats at each of N positions.

    Args:
        p_logits, q_logits: logits of P and of Q, float32 [N, V], for a vocabulary of V tokens.
    """
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def kl_by_position(p: ModelOutputs, q: ModelOutputs) -> Tensor:
    """Compute KL(P ‖ Q) in nats at each of N positions, float64 [N], from two models' outputs there."""
    rows = max(1, _KL_ENTRIES // p.vocabulary_size)
    parts = zip(p.split(rows), q.split(rows), strict=True)
    return torch.cat([next_token_kl(a.float32_logits(), b.float32_logits()).double() for a, b in parts])


def make_kl_meter(reference: ModelOutputs, lengths: Mapping[int, int]) -> tuple[Watch, Callable[[], list[float]]]:
    """Make a callback that measures KL(reference ‖ model) of next-token distributions while `score` runs.

    Only some of the requests that `score` gets may be measured.

    Args:
        reference: outputs of the reference model at every continuation token of the measured requests, one request
            after the other.
        lengths: number of continuation tokens of each measured request, by the request's index in the list that
            `score` gets. The requests are in the order of `reference`.

    Returns:
        A callback to pass to `score` as `watch`, and a function to call after `score`, which returns the mean KL of
        each measured request in nats, in the order of `lengths`.
    """
    starts = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
    seen: Counter[int] = Counter()
    sums = dict.fromkeys(lengths, 0.0)

    def watch(owners: Sequence[int], states: ModelOutputs) -> None:
        measured = [(row, owner) for row, owner in enumerate(owners) if owner in starts]
        if not measured:
            return
        places = []
        for _, owner in measured:
            places.append(starts[owner] + seen[owner])
            seen[owner] += 1
        kl = kl_by_position(reference[torch.tensor(places)], states[torch.tensor([row for row, _ in measured])])
        for (_, owner), value in zip(measured, kl.tolist(), strict=True):
            sums[owner] += value

    return watch, lambda: [sums[owner] / length for owner, length in lengths.items()]
