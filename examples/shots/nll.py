"""Loss by position as a task: cumulative average NLL, and the NLL of AR-hits and of other tokens. No torch at the top.

A text is read in windows that do not overlap, so a window's n-th prediction has n tokens before it; the running mean is
the cumulative average NLL of arXiv 2410.05258, figure 4. A token is an AR-hit (associative recall) if it completes a
bigram that occurred earlier in its window. Table 6 there separates such tokens from the others, after Arora et al.,
arXiv 2312.04927, who also exclude the commonest bigrams of the training data, which we do not know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from diffquant.errors import UsageError
from diffquant.measure.cells import Cell
from diffquant.measure.results import FAILED, MISSING, Columns, Metric, TaskResult, format_interval, interval_fields
from diffquant.measure.stats import Difference, mean_interval
from diffquant.measure.task import (
    BATCH_TOKENS,
    CHARACTERS,
    CHARACTERS_PER_TOKEN,
    TEXT,
    WINDOW,
    Task,
    read_positive_option,
)
from diffquant.reports.plots import IntervalPoint, Look, PlotLine
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress, report_nothing
from examples.shots.panels import draw_panels, panels

if TYPE_CHECKING:
    from torch import Tensor

    from diffquant.measure.language_model import LanguageModel, ModelOutputs


# Words in the table, and the prefixes of their fields in a result.
_KINDS = {"NLL": "nll", "AR-hit": "ar_hit_nll", "other": "other_nll"}
_WEIGHTS = {"nll": "tokens_by_window", "ar_hit_nll": "ar_hits_by_window", "other_nll": "others_by_window"}


def _change(kind: str, result: TaskResult | None, baseline: TaskResult | None) -> Difference | None:
    """Return the mean change of the NLL of one kind of token, paired over windows and weighted by their tokens."""
    if result is None or baseline is None:
        return None
    weights = result.details[_WEIGHTS[kind]]
    if not sum(weights):
        return None
    now, before = (each.details[f"{kind}_by_window"] for each in (result, baseline))
    return mean_interval([a - b for a, b in zip(now, before, strict=True)], weights)


def _value_text(kind: str, result: TaskResult | None, _: object) -> str:
    if result is None:
        return FAILED if kind == "nll" else MISSING
    value = result.details[kind]
    return MISSING if value is None else f"{value:.4f}"


def _nll(result: TaskResult | None, _: object) -> Difference | None:
    """Return the NLL of all tokens, with its interval over windows."""
    if result is None:
        return None
    details = result.details
    return mean_interval(details["nll_by_window"], details["tokens_by_window"])


def _record(result: TaskResult | None, baseline: TaskResult | None) -> JsonObject:
    details = result.details if result else {}
    record: JsonObject = {"ar_hit_share": details.get("ar_hit_share")}
    for kind in _KINDS.values():
        record |= {kind: details.get(kind), **interval_fields(f"{kind}_change", _change(kind, result, baseline))}
    return record


def _notes(results: Sequence[TaskResult]) -> list[str]:
    if not results:
        return []
    first = results[0].details
    share = f"{100 * first['ar_hit_share']:.1f} %"
    return [
        f"NLL is in nats per token of text, in windows of {first['positions'][-1]} tokens. AR-hits complete a bigram "
        f"that occurred earlier in the window; they are {share} of the first model's tokens. "
        "Changes from 16 bits are paired over windows."
    ]


def _metrics(word: str, kind: str) -> tuple[Metric, Metric]:
    """Make the two metrics of one kind of token: its NLL (drawn only for all tokens) and the NLL's change."""
    change = partial(_change, kind)
    changed = Metric(
        "change [95 %]",
        lambda *results: format_interval(change(*results), "+.4f"),
        f"{word}: change from\n16 bits, nats",
        change,
        lambda difference: f"{word} {format_interval(difference, '+.4f')} nats",
    )
    value = Metric(word, partial(_value_text, kind))
    return replace(value, label="NLL, nats", estimate=_nll) if kind == "nll" else value, changed


POSITIONS = Columns(
    metrics=tuple(metric for word, kind in _KINDS.items() for metric in _metrics(word, kind)),
    record=_record,
    notes=_notes,
    by_item=False,
)


def position_panels(cells: Sequence[tuple[str, Cell]]) -> dict[str, list[PlotLine]]:
    """Return the lines of each panel by the panel's title.

    A line has the mean NLL in nats up to each position, with its interval over windows.
    """
    return panels((None if cell.point.is_baseline else cell.point.panel, _line(name, cell)) for name, cell in cells)


def plot_positions(cells: Sequence[tuple[str, Cell]], path: Path) -> None:
    """Draw the cumulative NLL into a file, whose suffix determines the format.

    Raises:
        UsageError: nothing was measured.
    """
    shown = position_panels(cells)
    if not shown:
        raise UsageError("nothing to plot: no cell of nll was measured")
    draw_panels(shown, _draw, _finish, "cumulative average NLL, nats\n(shaded: 95 % over windows)", path)


def _line(name: str, cell: Cell) -> PlotLine:
    details = cell.result.details if cell.result else {}
    by_position = map(mean_interval, zip(*details["cumulative_nll_by_window"], strict=True))
    points = (IntervalPoint(p, d.mean, d.low, d.high) for p, d in zip(details["positions"], by_position, strict=True))
    return PlotLine(name, tuple(points), cell.point.scheme_text)


def _draw(axis: Any, line: PlotLine, label: str, style: Look) -> None:
    positions, means, lows, highs, _ = zip(*line.points, strict=True)
    axis.plot(positions, means, label=label, markersize=4, **style)
    if max(highs) < float("inf"):
        axis.fill_between(positions, lows, highs, color=style["color"], alpha=0.08, linewidth=0)


def _finish(axis: Any, lines: list[PlotLine]) -> None:  # noqa: ARG001
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens read")


@dataclass(frozen=True, kw_only=True)
class Nll(Task):
    """Negative log-likelihood of a text's tokens, by position and by whether they are AR-hits.

    Attributes:
        text: text to score.
        window: number of tokens in a window; windows do not overlap.

    Source: arXiv 2410.05258, figure 4 (cumulative average NLL by position) and table 6 (AR-hit and others).
    """

    kind: ClassVar = "nll"
    usage: ClassVar = "nll"
    options: ClassVar = (TEXT, CHARACTERS, WINDOW)
    columns: ClassVar = POSITIONS
    plots: ClassVar = {"positions.png": plot_positions}

    text: str
    window: int

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.checkpoints.texts import load_text

        if name != cls.kind:
            raise cls.make_name_error(name)
        window = WINDOW.value_in(values)
        if window < 2:
            raise UsageError(f"nll needs windows of 2 tokens or more, got {window}")
        text = load_text(TEXT.value_in(values), read_positive_option(CHARACTERS, values))
        return cls(text=text, window=window, batch_tokens=batch_tokens)

    @property
    def total_tokens(self) -> int:
        return len(self.text) // CHARACTERS_PER_TOKEN

    def identity(self) -> JsonObject:
        from diffquant.checkpoints.texts import text_digest

        return {
            "name": self.name,
            "text": text_digest(self.text),
            "characters": len(self.text),
            "window": self.window,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:  # noqa: ARG002
        nll, is_hit = score_positions(model, self.text, self.window, self.batch_tokens, progress)
        windows, window = nll.shape
        positions, cumulative = cumulative_means(nll)
        return TaskResult(
            metric="nll",
            details={
                "nll": float(nll.mean()),
                "positions": positions,
                "cumulative_nll": cumulative.mean(0).tolist(),
                "cumulative_nll_by_window": cumulative.tolist(),
                "nll_by_window": nll.mean(1).tolist(),
                "tokens_by_window": [window] * windows,
                "ar_hit_share": float(is_hit.double().mean()),
                **_slice("ar_hit", "ar_hits", nll, is_hit),
                **_slice("other", "others", nll, ~is_hit),
            },
        )


def _slice(name: str, plural: str, nll: "Tensor", chosen: "Tensor") -> JsonObject:
    """Return the mean NLL of the chosen tokens, over all and in each window (0 if it has none), and their counts."""
    counts, sums = chosen.sum(1), (nll * chosen).sum(1)
    return {
        f"{name}_nll": float(sums.sum() / counts.sum()) if counts.any() else None,
        f"{name}_nll_by_window": (sums / counts.clamp(min=1)).tolist(),
        f"{plural}_by_window": counts.tolist(),
    }


def score_positions(
    model: "LanguageModel",
    text: str,
    window: int = WINDOW.default,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
) -> "tuple[Tensor, Tensor]":
    """Compute negative log-likelihoods of a text's tokens in windows of one length; an incomplete last one is skipped.

    Returns:
        float64 [N, W] in nats: for each of N windows, the n-th prediction, made from n tokens; bool [N, W]: whether the
        predicted token completes a bigram that occurred earlier in its window.

    Raises:
        UsageError: the text or the window is too short.
        NonFiniteError: the model's logits are not finite.
    """
    import torch

    from diffquant.checkpoints.tokens import encode_text
    from diffquant.measure.language_model import require_finite
    from diffquant.measure.scoring import token_scores

    tokens = encode_text(model.tokenizer, text, model.vocabulary_size, model.device)
    window = min(window, len(tokens) - 1, model.max_length)
    if window < 2:
        raise UsageError(f"nll needs windows of 2 tokens or more, got {window}")
    windows = tokens[: (len(tokens) - 1) // window * window].view(-1, window)
    # The token after a window is predicted, never read.
    targets = tokens[1 : windows.numel() + 1].view(-1, window)
    nll = torch.empty(windows.shape, dtype=torch.float64)
    rows = max(1, batch_tokens // window)
    for first in range(0, len(windows), rows):
        with torch.inference_mode():
            states = model.compute_outputs(windows[first : first + rows])
            for row, wanted in enumerate(targets[first : first + rows]):
                nll[first + row] = -token_scores(states[row], wanted[:, None])[0].flatten().double()
        progress(min(first + rows, len(windows)) * window, windows.numel(), "reading")
    require_finite(nll)
    both = zip(windows.tolist(), targets.tolist(), strict=True)
    return nll, torch.tensor([find_repeated_bigrams([*seen, wanted[-1]]) for seen, wanted in both])


def cumulative_means(nll: "Tensor") -> "tuple[list[int], Tensor]":
    """Compute the mean NLL of the first n predictions of each window, for n = 1, 2, 4, ... and the whole window.

    Args:
        nll: float64 [N, W], W predictions in each of N windows.

    Returns:
        The P values of n, and the means for each of them, float64 [N, P].
    """
    import torch

    window = nll.shape[1]
    positions = sorted({*(2**power for power in range(window.bit_length())), window})
    means = nll.cumsum(1) / torch.arange(1, window + 1)
    return positions, means[:, [position - 1 for position in positions]]


def find_repeated_bigrams(ids: Sequence[int]) -> list[bool]:
    """Return for each token after the first whether it completes a bigram that occurred earlier."""
    seen: set[tuple[int, int]] = set()
    hits = []
    for bigram in pairwise(ids):
        hits.append(bigram in seen)
        seen.add(bigram)
    return hits
