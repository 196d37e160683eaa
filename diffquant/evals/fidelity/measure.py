"""Compares the next-token distributions of two models over the same chunks of a text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.evals.fidelity.base_file import scored, write_base
from diffquant.evals.fidelity.distributions import Distributions, Likeliest, Whole, divergence
from diffquant.evals.fidelity.sides import Side
from diffquant.support.progress import Progress


@dataclass(frozen=True)
class Comparison:
    """Results at the P scored positions of each of N chunks.

    Attributes:
        kl: KL(reference ‖ candidate) in nats, float64 [N, P].
        is_same: whether both have the same likeliest token, [N, P].
        reference_nll, candidate_nll: negative log-likelihood of the text's own tokens, float64 [N, P]; NaN where a
            server does not tell it.
        k: number of likeliest tokens if only those are known of one side; None if both distributions are complete.
    """

    kl: Tensor
    is_same: Tensor
    reference_nll: Tensor
    candidate_nll: Tensor
    k: int | None


def chunks_of(sides: Sequence[Side], text: str, context: int) -> Tensor:
    """A text's tokens in chunks [N, n] that do not overlap; an incomplete last chunk is dropped.

    Raises:
        UsageError: the sides tokenize the text differently, or it fills no chunk.
    """
    fixed = [(side, chunks) for side in sides if (chunks := side.fixed_chunks) is not None]
    if fixed:
        (one, chunks), *others = fixed
        for other, theirs in others:
            if not torch.equal(chunks, theirs):
                raise UsageError(f"{one.name} and {other.name} were not made from the same tokens")
        return chunks
    made = [(side, side.tokens(text)) for side in sides]
    for another in made[1:]:
        _check_same(made[0], another)
    tokens = made[0][1]
    count = len(tokens) // context
    if not count:
        raise UsageError(f"the text has {len(tokens)} tokens and fills no chunk of {context}; give a longer text")
    return torch.tensor(tokens[: count * context]).view(count, context)


def _check_same(a: tuple[Side, list[int]], b: tuple[Side, list[int]]) -> None:
    (side, tokens), (other, theirs) = a, b
    if tokens == theirs:
        return
    pairs = zip(tokens, theirs, strict=False)
    place = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(tokens), len(theirs)))
    raise UsageError(
        f"{side.name} and {other.name} make different tokens of the text, from token {place} on: "
        f"{tokens[place : place + 4]} and {theirs[place : place + 4]}; only models with one tokenizer can be compared"
    )


def compare(reference: Side, candidate: Side, chunks: Tensor, progress: Progress) -> Comparison:
    """Distributions of two models over the same chunks [N, n], compared behind each chunk's second half.

    Raises:
        UsageError: the vocabularies differ.
        DiffQuantError: a model's logits are not finite, or a server does not answer.
    """
    count, context = chunks.shape
    first = context - 1 - scored(context)
    shape = count, scored(context)
    kl, reference_nll, candidate_nll = (torch.empty(shape, dtype=torch.float64) for _ in range(3))
    is_same = torch.empty(shape, dtype=torch.bool)
    k = None
    for number, chunk in enumerate(chunks):
        p, q = (side.predict(number, _as_read(chunk, side), first) for side in (reference, candidate))
        _check_vocabularies((reference, p), (candidate, q))
        targets = chunk[first + 1 :]
        kl[number] = divergence(p, q)
        is_same[number] = p.top == q.top
        reference_nll[number], candidate_nll[number] = -p.of(targets), -q.of(targets)
        k = min((side.k for side in (p, q) if isinstance(side, Likeliest)), default=None)
        progress(number + 1, count, "comparing")
    return Comparison(kl, is_same, reference_nll, candidate_nll, k)


def _check_vocabularies(*predicted: tuple[Side, Distributions]) -> None:
    """Check that both sides have the same vocabulary, as far as their outputs show.

    Raises:
        UsageError: one has others.
    """
    sizes = {side.name: known.logs.shape[1] for side, known in predicted if isinstance(known, Whole)}
    largest = {side.name: int(known.ids.max()) for side, known in predicted if isinstance(known, Likeliest)}
    if len(set(sizes.values())) > 1 or any(token >= size for token in largest.values() for size in sizes.values()):
        said = [f"{name} has a vocabulary of {size} tokens" for name, size in sizes.items()]
        said += [f"{name} tells of token {token}" for name, token in largest.items()]
        raise UsageError(f"{', and '.join(said)}: only models with one vocabulary can be compared")


def save_base(side: Side, chunks: Tensor, path: Path, progress: Progress) -> None:
    """Write a model's distributions as llama.cpp's `--kl-divergence-base` file, which it and `compare` read.

    Raises:
        UsageError: only the model's likeliest tokens are known, or the file cannot be written.
    """

    def predictions() -> Iterator[Whole]:
        first = chunks.shape[1] - 1 - scored(chunks.shape[1])
        for number, chunk in enumerate(chunks):
            predicted = side.predict(number, _as_read(chunk, side), first)
            if not isinstance(predicted, Whole):
                raise UsageError(f"{side.name} gives only its likeliest tokens, but the file needs all of them")
            yield predicted
            progress(number + 1, len(chunks), "reading")

    write_base(path, chunks, predictions())


def _as_read(chunk: Tensor, side: Side) -> Tensor:
    """A chunk as a model reads it: as a separate text, after the model's first token."""
    if side.first_token is None:
        return chunk
    return torch.cat([torch.tensor([side.first_token]), chunk[1:]])
