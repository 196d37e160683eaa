"""Finds how much of a scored text a quantized checkpoint was calibrated on."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.formats.atomic_folder import RECORD
from diffquant.formats.json_object import read_json
from diffquant.source.source import Source
from diffquant.text.corpus import load_text, text_digest
from diffquant.text.tokens import encode_text

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens in a row that two texts do not share by chance.
_RUN = 16


def calibration_note(source: Source, scored: "Sequence[Sequence[int]]") -> str:
    """A clause that says how many of the scored tokens were also used to calibrate the checkpoint."""
    record = source.path / RECORD
    if not source.packed or not record.is_file():
        return "the candidate's weights were not calibrated by diffquant"
    rounding = read_json(record).get("rounding") or {}
    digest, count = rounding.get("text"), int(rounding.get("tokens", 0))
    if digest is None:
        return f"the candidate was rounded by {rounding.get('name', 'nearest')}, which reads no text"
    known = f"the candidate was rounded by {rounding['name']} over {count:,} tokens of a text with digest {digest}"
    read = _tokens_read(source, digest, count)
    if read is None:
        return f"{known}, which is not at hand: how much of it was scored is not known"
    seen = {tuple(read[i : i + _RUN]) for i in range(len(read) - _RUN + 1)}
    count = sum(len(_places_in(chunk, seen)) for chunk in scored)
    return f"{known}, of which {count:,} of the {sum(map(len, scored)):,} scored tokens are a part"


def _places_in(chunk: "Sequence[int]", seen: set[tuple[int, ...]]) -> set[int]:
    """Places of a chunk's tokens that stand in a run which was seen."""
    begins = [i for i in range(len(chunk) - _RUN + 1) if tuple(chunk[i : i + _RUN]) in seen]
    return {place for begin in begins for place in range(begin, begin + _RUN)}


def _tokens_read(source: Source, digest: str, count: int) -> list[int] | None:
    """The tokens used for calibration, or None if that text is gone or has changed."""
    path: Path | None = source.recipe.rounding.text
    try:
        text = load_text(path)
    except UsageError:
        return None
    if text_digest(text) != digest:
        return None
    import torch

    ids: list[int] = encode_text(
        source.tokenizer, text, source.architecture.vocab_size, torch.device("cpu"), count
    ).tolist()
    return ids
