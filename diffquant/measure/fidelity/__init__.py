"""Compares two models' next-token distributions over the same chunks of a text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from diffquant.checkpoints.atomic_folder import RECORD
from diffquant.checkpoints.side_files import read_json
from diffquant.checkpoints.source import Source
from diffquant.errors import DiffQuantError, UsageError
from diffquant.measure.fidelity.base_file import write_base
from diffquant.measure.fidelity.models import ComparedModel, Distributions, count_scored_positions, divergence
from diffquant.quantization.roundings import rounding_named
from diffquant.support.progress import Progress

# Return type of `compare_distributions`.
Compared = tuple[Tensor, Tensor, Tensor, int | None]


def cut_chunks(sides: Sequence[ComparedModel], text: str, context: int) -> Tensor:
    """Return a text's tokens as N chunks of n tokens [N, n] that do not overlap; an incomplete last chunk is dropped.

    Args:
        sides: models that will read the chunks. If one is a file of log-probabilities, its own chunks are returned.
        text: text to cut; not used with such a file.
        context: number n of tokens in a chunk; not used with such a file.

    Raises:
        UsageError: the models tokenize the text differently, or it is shorter than one chunk.
    """
    fixed = [(side, chunks) for side in sides if (chunks := side.fixed_chunks) is not None]
    if fixed:
        (one, chunks), *others = fixed
        for other, theirs in others:
            if not torch.equal(chunks, theirs):
                raise UsageError(
                    f"{one.name} and {other.name} were not made from the same tokens; make both from the same text"
                )
        return chunks
    (side, tokens), *more = [(side, side.tokens(text)) for side in sides]
    for other, made in more:
        if made != tokens:
            pairs = zip(tokens, made, strict=False)
            place = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(tokens), len(made)))
            raise UsageError(
                f"{side.name} and {other.name} tokenize the text differently from token {place} on: "
                f"{tokens[place : place + 4]} and {made[place : place + 4]}; only models with the same tokenizer can "
                "be compared"
            )
    count = len(tokens) // context
    if not count:
        raise UsageError(f"the text has {len(tokens)} tokens and fills no chunk of {context}; give a longer text")
    return torch.tensor(tokens[: count * context]).view(count, context)


def compare_distributions(
    reference: ComparedModel, candidate: ComparedModel, chunks: Tensor, progress: Progress
) -> Compared:
    """Compare the next-token distributions of two models over the same N chunks of n tokens.

    In each chunk P positions are scored, those of its second half (see `count_scored_positions`).

    Args:
        chunks: token ids [N, n].

    Returns:
        KL(reference ‖ candidate) in nats, float64 [N, P]; whether both have the same top-1 token, bool [N, P]; negative
        log-likelihood of the text's tokens under both, float64 [2, N, P], NaN for tokens that a server omits; and k if
        a server returns only the top-k tokens, or None if both distributions are complete.

    Raises:
        UsageError: the vocabularies differ.
        DiffQuantError: a model's logits are not finite, or a server does not answer.
    """
    count, context = chunks.shape
    scored = count_scored_positions(context)
    shape = count, scored
    kl, nll = torch.empty(shape, dtype=torch.float64), torch.empty((2, *shape), dtype=torch.float64)
    is_same = torch.empty(shape, dtype=torch.bool)
    k = None
    for number, chunk in enumerate(chunks):
        p, q = (_predict(side, number, chunk) for side in (reference, candidate))
        _check_vocabularies((reference, p), (candidate, q))
        targets = chunk[context - scored :]
        kl[number] = divergence(p, q)
        is_same[number] = p.top_tokens == q.top_tokens
        nll[0, number], nll[1, number] = -p.log_probs_of(targets), -q.log_probs_of(targets)
        k = min((side.k for side in (p, q) if side.k is not None), default=None)
        progress(number + 1, count, "comparing")
    return kl, is_same, nll, k


def _check_vocabularies(*predicted: tuple[ComparedModel, Distributions]) -> None:
    """Check that both models have the same vocabulary, as far as their outputs show.

    Raises:
        UsageError: they do not.
    """
    sizes = {side.name: known.logs.shape[1] for side, known in predicted if known.ids is None}
    largest = {side.name: int(known.ids.max()) for side, known in predicted if known.ids is not None}
    if len(set(sizes.values())) > 1 or any(token >= size for token in largest.values() for size in sizes.values()):
        said = [f"{name} has a vocabulary of {size} tokens" for name, size in sizes.items()]
        said += [f"{name} returned token {token}" for name, token in largest.items()]
        raise UsageError(f"{', and '.join(said)}: only models with the same vocabulary can be compared")


def save_base_file(side: ComparedModel, chunks: Tensor, path: Path, progress: Progress) -> None:
    """Write a model's next-token distributions in the format of llama.cpp's `--kl-divergence-base`.

    Args:
        chunks: token ids [N, n] of N chunks of n tokens.

    Raises:
        UsageError: the model is a server, which returns only its top-k tokens, or the file cannot be written.
    """

    def predictions() -> Iterator[Distributions]:
        for number, chunk in enumerate(chunks):
            predicted = _predict(side, number, chunk)
            if predicted.ids is not None:
                raise UsageError(
                    f"{side.name} returns only its top-k tokens, but the file needs the whole vocabulary; give a folder"
                )
            yield predicted
            progress(number + 1, len(chunks), "reading")

    write_base(path, chunks, predictions())


def _predict(side: ComparedModel, number: int, chunk: Tensor) -> Distributions:
    """Let a model read a chunk, whose first token is replaced by its `prepended_bos_id` if it has one."""
    if side.prepended_bos_id is not None:
        chunk = torch.cat([torch.tensor([side.prepended_bos_id]), chunk[1:]])
    return side.predict(number, chunk)


def calibration_note(source: Source, scored: Sequence[Sequence[int]]) -> str:
    """Describe, without a full stop, how a candidate checkpoint was calibrated.

    If the calibration data of its rounding are available, the text states how many of the scored tokens they contain.

    Args:
        source: the candidate.
        scored: token ids of each scored piece of text.
    """
    scaled_on = source.checkpoint.scaled_on
    return _rounding_note(source, scored) + (f"; before that, its weights were {scaled_on}" if scaled_on else "")


def _rounding_note(source: Source, scored: Sequence[Sequence[int]]) -> str:
    record, earlier_format = source.path / RECORD, source.checkpoint.earlier_format
    if earlier_format is not None:
        return f"the candidate's weights were rounded to {earlier_format} before; on which text is not recorded"
    if not source.packed or not record.is_file():
        return "the candidate's weights were not calibrated by diffquant"
    rounding = read_json(record).get("rounding") or {}
    digest, count = rounding.get("text"), int(rounding.get("tokens", 0))
    if (imatrix := rounding.get("imatrix")) is not None:
        data = ", ".join(imatrix["datasets"]) or "unknown data"
        return f"the candidate was rounded by an imatrix of {data}, so it is unknown how much of that was scored"
    if digest is None:
        return f"the candidate was rounded by {rounding.get('name', 'nearest')}, which needs no calibration data"
    known = f"the candidate was rounded by {rounding['name']} over {count:,} tokens of a text with digest {digest}"
    try:
        calibration = rounding_named(rounding["name"]).read_calibration(source, source.recipe.rounding)
    except DiffQuantError:
        calibration = None
    if calibration is None or calibration.digest != digest:
        return f"{known}, which is not available, so it is unknown how much of that was scored"
    count = calibration.count_overlap(scored)
    return f"{known}, which contains {count:,} of the {sum(map(len, scored)):,} scored tokens"
