"""The result: KL and top-1 agreement with intervals, as a table, as JSON, and as the hub reads evaluations."""

import json
import math
from dataclasses import asdict, dataclass
from datetime import date

import numpy as np
from torch import Tensor

from diffquant.evals.fidelity.measure import Comparison
from diffquant.evals.stats import Difference, mean_interval
from diffquant.report.tables import aligned, markdown
from diffquant.support.plain_data import JsonObject, finite
from diffquant.support.readable import Readable

# Neighbouring chunks resemble each other: the intervals are over equal parts of the text, each one observation.
PARTS = 16
# How the notes of an entry on the hub begin, by which diffquant knows its own.
HUB_NOTES = "mean KL divergence in nats from"
_RESAMPLES = 1000
_QUANTILES = {"median": 0.5, "99 %": 0.99, "99.9 %": 0.999}


@dataclass(frozen=True, repr=False)
class Fidelity(Readable):
    """KL divergence and top-1 agreement of a candidate's next-token distributions with a reference's.

    Attributes:
        reference, candidate: what was compared, as plain data with its `name`.
        text: the text's name, digest and sizes, and what of it the candidate was calibrated on.
        mean: mean KL(reference ‖ candidate) in nats, with its 95 % interval.
        quantiles: quantiles of the positions' KL in nats by name, with 95 % intervals.
        largest: largest KL at any position in nats.
        agreement: share of positions where both have the same likeliest token, with its 95 % interval.
        perplexities: the reference's and the candidate's; None if a server does not tell all tokens.
        k: number of likeliest tokens if only those are known of one side, which makes the KL a lower bound.
        settings: date, commit and versions.
    """

    reference: JsonObject
    candidate: JsonObject
    text: JsonObject
    mean: Difference
    quantiles: dict[str, Difference]
    largest: float
    agreement: Difference
    perplexities: tuple[float | None, float | None]
    k: int | None
    settings: JsonObject

    @classmethod
    def of(
        cls,
        comparison: Comparison,
        reference: JsonObject,
        candidate: JsonObject,
        text: JsonObject,
        settings: JsonObject,
    ) -> "Fidelity":
        """The statistics of a comparison."""
        kl = comparison.kl
        return cls(
            reference,
            candidate,
            text,
            _mean(kl),
            _quantiles(kl),
            float(kl.max()),
            _share(comparison.is_same),
            (_perplexity(comparison.reference_nll), _perplexity(comparison.candidate_nll)),
            comparison.k,
            settings,
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and 95 % interval of each figure."""
        bound = "" if self.k is None else f", at least (top {self.k})"
        rows = [(f"mean KL, nats{bound}", f"{self.mean.mean:.5f}", _interval(self.mean, ".5f"))]
        rows += [
            (f"{name} KL, nats{bound}", f"{value.mean:.5f}", _interval(value, ".5f"))
            for name, value in self.quantiles.items()
        ]
        rows.append((f"largest KL, nats{bound}", f"{self.largest:.4f}", ""))
        percent = Difference(*(100 * end for end in asdict(self.agreement).values()))
        rows.append(("same top token", f"{percent.mean:.2f} %", _interval(percent, ".2f")))
        for name, value in zip(("reference", "candidate"), self.perplexities, strict=True):
            rows.append((f"perplexity, {name}", "not told" if value is None else f"{value:.3f}", ""))
        return rows

    def summary(self) -> str:
        """The table and what was compared, for people."""
        head = f"KL({self.reference['name']} ‖ {self.candidate['name']})"
        return "\n".join([head, *aligned(("", "value", "95 % interval"), self.rows()), *self.notes()])

    def card(self) -> str:
        """The table in Markdown, for a model card."""
        head = f"## Fidelity\n\nKL divergence of the next token from `{self.reference['name']}`, over {self._read()}.\n"
        return "\n".join([head, *markdown(("", "value", "95 % interval"), self.rows()), "", *self.notes()]) + "\n"

    def notes(self) -> list[str]:
        """Notes on how to read the figures."""
        parts = self.text["parts"]
        intervals = f"Intervals are over {parts} equal parts of it" if parts > 1 else "One part alone tells no interval"
        notes = [f"Over {self._read()}. {intervals}."]
        if self.k is not None:
            notes.append(
                f"Of one model only the {self.k} likeliest tokens at a position are known; all others are one bin, so "
                "that each KL is a lower bound."
            )
        if self.text.get("calibration"):
            notes.append(f"Calibration: {self.text['calibration']}.")
        return notes

    def to_dict(self) -> JsonObject:
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "text": self.text,
            "kl": {
                "mean": asdict(self.mean),
                **{name: asdict(value) for name, value in self.quantiles.items()},
                "largest": self.largest,
                "lower_bound_of_top": self.k,
            },
            "same_top_token": asdict(self.agreement),
            "perplexity": dict(zip(("reference", "candidate"), self.perplexities, strict=True)),
            "settings": self.settings,
        }

    def to_json(self) -> str:
        return json.dumps(finite(self.to_dict()), indent=1, ensure_ascii=False) + "\n"

    def hub_entries(self, dataset: str) -> list[JsonObject]:
        """Content of a model's .eval_results/*.yaml on the hub: the mean KL, and everything else in the notes.

        Source: https://huggingface.co/docs/hub/eval-results
        """
        notes = "; ".join(f"{name} {value} {interval}".strip() for name, value, interval in self.rows()[1:])
        entry = {
            "dataset": {"id": dataset, "task_id": "default"},
            "value": round(self.mean.mean, 6),
            "date": date.today().isoformat(),
            "notes": f"{HUB_NOTES} {self.reference['name']}; {notes}; {' '.join(self.notes())}",
        }
        return [entry]

    def _read(self) -> str:
        text = self.text
        return (
            f"{text['scored']:,} tokens of {text['name']}, in chunks of {text['context']} whose second half is scored"
        )


def _mean(values: Tensor) -> Difference:
    """Mean of [N, P] with Student's 95 % interval over parts of the text."""
    parts = _parts(values)
    return mean_interval([float(part.mean()) for part in parts], [part.numel() for part in parts])


def _share(is_so: Tensor) -> Difference:
    """The share of [N, P] that is so, with the part of its interval that a share can reach."""
    share = _mean(is_so.double())
    return share if math.isinf(share.low) else Difference(share.mean, max(share.low, 0.0), min(share.high, 1.0))


def _quantiles(values: Tensor) -> dict[str, Difference]:
    """Quantiles of [N, P] with 95 % bootstrap intervals over parts of the text, infinite for one part."""
    points = [*_QUANTILES.values()]
    found, parts = np.quantile(values.numpy(), points), [part.numpy() for part in _parts(values)]
    if len(parts) == 1:
        ends = np.full((2, len(points)), [[-math.inf], [math.inf]])
    else:
        drawn = np.random.default_rng(0).integers(len(parts), size=(_RESAMPLES, len(parts)))
        resampled = [np.quantile(np.concatenate([parts[i] for i in row]), points) for row in drawn]
        ends = np.quantile(resampled, [0.025, 0.975], axis=0)
    return {
        name: Difference(*map(float, row)) for name, row in zip(_QUANTILES, zip(found, *ends, strict=True), strict=True)
    }


def parts_of(chunks: int) -> int:
    """Number of observations in this many chunks."""
    return min(PARTS, chunks)


def _parts(values: Tensor) -> tuple[Tensor, ...]:
    """Consecutive parts of N chunks, as equal as can be, as many as there are observations."""
    return values.tensor_split(parts_of(len(values)))


def _perplexity(nll: Tensor) -> float | None:
    mean = nll.mean()
    return None if mean.isnan() else float(mean.exp())


def _interval(value: Difference, digits: str) -> str:
    return f"[{value.low:{digits}}, {value.high:{digits}}]" if math.isfinite(value.low) else "one part"
