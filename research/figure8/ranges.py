"""Ranges of attention logits by layer and map (E6 of protocol.md): during a training, and by length of the windows."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from diffquant import data
from diffquant.checkpoints.tokens import encode_text
from diffquant.errors import UsageError
from diffquant.model.modeling import DiffTransformer
from research.figure8 import scoring
from research.studies.figure8 import prose_readings
from research.studies.logit_noise import SeenAttention, observed

RANGES = "ranges.jsonl"
# Doublings of the steps that are recorded, two marks each.
_DOUBLINGS = 7.5
LENGTHS = (256, 1024, 4096)
# Distances that training had.
NEAR = 256
# Tokens that are read at once, and queries of theirs that are looked at together.
_BATCH = 4096
_ROWS = 64


def marks(steps: int) -> list[int]:
    """Steps at which ranges are recorded: 0, and 16 that grow by the root of 2 to the last."""
    return [0, *sorted({round(steps / 2 ** (halves / 2)) for halves in range(round(2 * _DOUBLINGS) + 1)} - {0})]


class Trajectory:
    """Ranges of a model at marks of its training, one line each of a file in the run's folder."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._file = folder / RANGES
        self._tokenizer = tokenizer
        self._windows: list[Tensor] = []

    @torch.inference_mode()
    def record(self, step: int, model: DiffTransformer) -> None:
        """Read the windows of books that are scored and keep what their logits range over."""
        if not self._windows:
            readings = prose_readings(model, self._tokenizer, data.books_text(), scoring.BOOKS)
            self._windows = [reading.ids[:, :-1] for reading in readings]
        line = {"step": step, "layers": ranges(model, self._windows)}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def recorded(self) -> dict[str, list[dict[str, Any]]]:
        """Read what was recorded, by step; a step that an interrupted run read twice has its last reading."""
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        return {str(entry["step"]): entry["layers"] for entry in sorted(map(json.loads, lines), key=_step)}


def _step(entry: dict[str, Any]) -> int:
    step: int = entry["step"]
    return step


@torch.inference_mode()
def read_lengths(model: DiffTransformer, tokenizer: Any) -> dict[str, Any]:
    """Measure ranges and the loss where the same tokens are read in windows of each of `LENGTHS`.

    Returns:
        By length, then "plain" or "first" (with <s> in place of each window's first token), the layers' `ranges` and
        the loss "nll" in nats a token.
    """
    tokens = middles(model, tokenizer, data.books_text(), max(LENGTHS))
    found: dict[str, Any] = {}
    for length in LENGTHS:
        plain = tokens.view(-1, length)
        first = torch.cat([torch.full_like(plain[:, :1], tokenizer.bos_token_id), plain[:, 1:]], 1)
        found[str(length)] = {}
        for name, windows in (("plain", plain), ("first", first)):
            losses: list[float] = []
            layers = ranges(model, windows.split(max(1, _BATCH // length)), losses)
            found[str(length)][name] = {"layers": layers, "nll": sum(losses) / len(losses)}
    return found


def middles(model: DiffTransformer, tokenizer: Any, text: str, count: int) -> Tensor:
    """Token ids [passages, count] from the middle of each passage of a text.

    Raises:
        UsageError: a passage is shorter.
    """
    length = len(text) // scoring.BOOKS.passages
    taken = []
    for number in range(scoring.BOOKS.passages):
        part = text[number * length : (number + 1) * length]
        ids = encode_text(tokenizer, part, model.config.vocab_size, model.device)
        first = (len(ids) - count) // 2
        if first < 0:
            raise UsageError(f"passage {number} has {len(ids)} tokens, fewer than the {count} that are read of it")
        taken.append(ids[first : first + count])
    return torch.stack(taken)


@torch.inference_mode()
def ranges(
    model: DiffTransformer, batches: Iterable[Tensor], losses: list[float] | None = None
) -> list[dict[str, Any]]:
    """Measure each layer's logits over windows of one length.

    Args:
        batches: token ids [B, T] each.
        losses: takes the loss of each batch in nats a token, if given.

    Returns:
        A dictionary for each layer, of lists with a number for each map: the largest magnitude of a logit ("largest"),
        the same among keys less than 256 tokens away ("near") and on the first key ("on_first"), the root mean square
        ("rms"), and the mean softmax weight on the first key of all queries but the first ("weight_on_first").
    """
    layers = [_Range(module.spec.maps) for module in model.attention_modules]

    def see(seen: SeenAttention) -> None:
        layers[seen.layer].add(seen)

    with observed(model, see):
        for ids in batches:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            if losses is not None:
                predictions = model.lm_head(hidden[:, :-1]).flatten(0, 1)
                losses.append(float(cross_entropy(predictions, ids[:, 1:].flatten())))
    return [layer.summary() for layer in layers]


class _Range:
    def __init__(self, maps: int) -> None:
        self.tops = {name: [0.0] * maps for name in ("largest", "near", "on_first")}
        self.squares, self.weights = [0.0] * maps, [0.0] * maps
        self.logits = self.queries = 0

    def add(self, seen: SeenAttention) -> None:
        batch, heads, length, _ = seen.logits[0].shape
        self.logits += batch * heads * (length * (length + 1) // 2)
        self.queries += batch * heads * (length - 1)
        for first in range(0, length, _ROWS):
            for number, logits in enumerate(seen.logits):
                self._add_rows(number, first, logits[:, :, first : first + _ROWS, : first + _ROWS])

    def _add_rows(self, number: int, first: int, logits: Tensor) -> None:
        """Add a map's logits [B, h, R, first + R] of queries from `first` on over the keys that any of them sees."""
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(first + 1)
        total = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
        weights = (logits[..., 0] - total).exp()[..., first == 0 :]
        self.weights[number] += float(weights.sum(dtype=torch.float64))
        size = logits.abs().masked_fill_(hidden, 0.0)
        self.squares[number] += float(size.square().sum(dtype=torch.float64))
        near = size.triu(first + 1 - NEAR)
        for name, found in {"largest": size, "on_first": size[..., 0], "near": near}.items():
            self.tops[name][number] = max(self.tops[name][number], float(found.max()))

    def summary(self) -> dict[str, Any]:
        return self.tops | {
            "rms": [(square / self.logits) ** 0.5 for square in self.squares],
            "weight_on_first": [weight / self.queries for weight in self.weights],
        }
