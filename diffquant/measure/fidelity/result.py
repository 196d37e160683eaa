"""The result: KL and top-1 agreement with intervals, written as table, JSON and model card section."""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from diffquant.checkpoints.atomic_folder import add_to_record
from diffquant.measure.fidelity import Compared
from diffquant.measure.stats import Difference, mean_interval
from diffquant.reports.tables import Table
from diffquant.support.files import write_atomically
from diffquant.support.outputs import RunFiles
from diffquant.support.plain_data import JsonObject, replace_nonfinite
from diffquant.support.terminal import PrintableResult

# Neighbouring chunks are correlated, so the intervals treat equal parts of the text as the observations.
PARTS = 16
_RESAMPLES = 1000
_QUANTILES = {"median": 0.5, "99 %": 0.99, "99.9 %": 0.999}


@dataclass(frozen=True, repr=False)
class Fidelity(PrintableResult):
    """KL divergence and top-1 agreement of a candidate's next-token distributions with a reference's.

    Attributes:
        reference, candidate: descriptions of the compared models as plain data, each with a `name`.
        text: the text's name, digest and sizes, and how much of it the candidate was calibrated on.
        mean: mean KL(reference ‖ candidate) in nats, with its 95 % interval.
        quantiles: quantiles of the KL over all positions in nats, by name, with 95 % intervals.
        largest: largest KL at any position in nats.
        agreement: fraction of positions where both have the same top-1 token, with its 95 % interval.
        perplexities: perplexity of the reference and of the candidate, or None if the model is a server that did not
            return the log-probabilities of all tokens of the text.
        k: number of top tokens that a server returned, which makes the KL a lower bound, or None if both distributions
            are complete.
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
    def from_compared(
        cls, compared: Compared, reference: JsonObject, candidate: JsonObject, text: JsonObject, settings: JsonObject
    ) -> "Fidelity":
        """Compute the statistics from what `compare_distributions` returned."""
        kl, is_same, nll, k = compared
        perplexities = _perplexity(nll[0]), _perplexity(nll[1])
        figures = _mean(kl), _quantiles(kl), float(kl.max()), _share(is_same), perplexities, k
        return cls(reference, candidate, text, *figures, settings)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the table's rows: name, value and 95 % interval of each figure."""
        bound = "" if self.k is None else f", at least (top {self.k})"
        means = {"mean": self.mean, **self.quantiles}.items()
        rows = [(f"{name} KL, nats{bound}", f"{each.mean:.5f}", _interval(each, ".5f")) for name, each in means]
        rows.append((f"largest KL, nats{bound}", f"{self.largest:.5f}", ""))
        percent = self.agreement.times(100)
        rows.append(("same top token", f"{percent.mean:.2f} %", _interval(percent, ".2f")))
        for name, value in zip(("reference", "candidate"), self.perplexities, strict=True):
            rows.append((f"perplexity, {name}", "unknown" if value is None else f"{value:.3f}", ""))
        return rows

    def summary(self) -> str:
        """Return what was compared, the table and the notes as text."""
        head = f"KL({self.reference['name']} ‖ {self.candidate['name']})"
        return "\n".join([head, *self._table().text_lines(), *self.notes()])

    def format_card_section(self) -> str:
        """Return the fidelity section of a model card: a heading, the table and the notes in Markdown."""
        head = f"## Fidelity\n\nKL divergence of the next token from `{self.reference['name']}`, over {self._read()}.\n"
        return "\n".join([head, *self._table().markdown(), "", *self.notes()]) + "\n"

    def _table(self) -> Table:
        return Table(("", "value", "95 % interval"), self.rows())

    def notes(self) -> list[str]:
        """Return sentences that explain how to read the figures."""
        parts = self.text["parts"]
        intervals = f"Intervals are over {parts} equal parts of it" if parts > 1 else "A single part gives no interval"
        notes = [f"Over {self._read()}. {intervals}."]
        if self.k is not None:
            notes.append(
                f"One model returned only its {self.k} likeliest tokens per position; all others count as one bin, so "
                "each KL is a lower bound."
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
        return json.dumps(replace_nonfinite(self.to_dict()), indent=1, ensure_ascii=False) + "\n"

    def _read(self) -> str:
        text = self.text
        return (
            f"{text['scored']:,} tokens of {text['name']}, in chunks of {text['context']} whose second half is scored"
        )


def _mean(values: Tensor) -> Difference:
    """Return the mean of [N, P] with Student's 95 % interval over parts of the text."""
    parts = _parts(values)
    return mean_interval([float(part.mean()) for part in parts], [part.numel() for part in parts])


def _share(is_so: Tensor) -> Difference:
    """Return the fraction of [N, P] that is true, with its 95 % interval clipped to [0, 1]."""
    share = _mean(is_so.double())
    return share if math.isinf(share.low) else Difference(share.mean, max(share.low, 0.0), min(share.high, 1.0))


def _quantiles(values: Tensor) -> dict[str, Difference]:
    """Return quantiles of [N, P] with 95 % bootstrap intervals over parts of the text, infinite for one part."""
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


def count_interval_groups(chunks: int) -> int:
    """Return the number of groups into which a text's chunks are divided; intervals treat each group as one value."""
    return min(PARTS, chunks)


def _parts(values: Tensor) -> tuple[Tensor, ...]:
    """Split N chunks into consecutive parts of nearly equal size, one per observation."""
    return values.tensor_split(count_interval_groups(len(values)))


def _perplexity(nll: Tensor) -> float | None:
    mean = nll.mean()
    return None if mean.isnan() else float(mean.exp())


def _interval(value: Difference, digits: str) -> str:
    return f"[{value.low:{digits}}, {value.high:{digits}}]" if math.isfinite(value.low) else "one part"


NUMBERS, CARD, README = "fidelity.json", "fidelity.md", "README.md"
# The fidelity section of a card, up to the next heading of level 1 or 2.
_SECTION = re.compile(r"^## Fidelity\n.*?(?=^##? |\Z)", re.MULTILINE | re.DOTALL)
FILES = RunFiles(NUMBERS, frozenset({"reference", "candidate", "kl", "same_top_token"}), (CARD,), True)


def write_to_card(result: Fidelity, model: Path) -> Path:
    """Write the table into a candidate's model card, replacing an earlier table; return the card's path."""
    card, is_new = model / README, not (model / README).exists()
    kept = f"# {model.name}" if is_new else _SECTION.sub("", card.read_text(encoding="utf-8")).rstrip("\n")
    write_atomically(card, f"{kept}\n\n{result.format_card_section()}")
    # A card that already existed may not be diffquant's.
    add_to_record(model, [card] if is_new else [])
    return card


def write_fidelity(result: Fidelity, folder: Path) -> list[Path]:
    """Write the result into a folder as JSON and as Markdown, and return the paths of both files."""
    texts = {NUMBERS: result.to_json(), CARD: result.format_card_section()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    written = [folder / name for name in texts]
    add_to_record(folder, written)
    return written
