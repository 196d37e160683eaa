"""Cost of a KV cache with static scales, one factor at a time: the text they are found on, its length, rule and width.

    python -m research.studies.static_cache MODEL --json research/results/smollm2-kv-scales/held-out.json

The prose that ships is sixteen passages of four books in turn. One window of each of the first eight is scored; scales
are found on windows of the others. One calibration alone sees windows that are scored, to say what that is worth. KL
is from the same model with a 16-bit cache, and a window of a passage is one observation. A file that is there is not
measured again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from diffquant.benchmarks.measuring import describe_environment
from diffquant.calib.calibration.observe import observe_ranges
from diffquant.calib.calibration.observers import Observer
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.texts import text_digest
from diffquant.checkpoints.tokens import encode_text
from diffquant.data import books_text
from diffquant.measure.language_model import ModelOutputs
from diffquant.measure.scoring import next_token_kl, token_scores
from diffquant.measure.stats import mean_interval, paired_difference
from diffquant.measure.torch_model import TorchModel
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.reports.tables import markdown
from diffquant.support.files import find_file_or_xz, write_json
from diffquant.support.progress import Progress, progress_for, report_nothing
from research.studies.results import read_json

PASSAGES, WINDOW = 16, 256
# A (passage, window) pair names a window; a passage's first and last may reach into its neighbours.
SCORED = [(passage, 4) for passage in range(8)]
USUAL = "6 windows, one a passage"
CALIBRATIONS = {
    USUAL: [(passage, 3) for passage in range(8, 14)],
    "6 windows of one passage": [(8, window) for window in range(1, 7)],
    "2 of the 6": [(passage, 3) for passage in range(8, 10)],
    "24 windows of these passages": [(passage, window) for passage in range(8, 14) for window in range(1, 5)],
    "6 of the 8 that are scored": SCORED[:6],
}


@dataclass(frozen=True)
class CacheRow:
    """A configuration of the cache.

    Attributes:
        bits: width of K and V.
        observer: rule of static scales; "" for a scale that each token and head has for itself.
        calibrated_on: key of `CALIBRATIONS` that static scales are found on.
    """

    bits: int
    observer: str = ""
    calibrated_on: str = ""

    @property
    def recipe(self) -> Recipe:
        return Recipe.of(kv=f"{self.bits}:{'static' if self.observer else 'row'}")


ROWS = [
    *(CacheRow(bits) for bits in (8, 4)),
    *(CacheRow(bits, observer, USUAL) for bits in (8, 4) for observer in ("absmax", "mse")),
    *(CacheRow(4, observer, name) for name in CALIBRATIONS if name != USUAL for observer in ("absmax", "mse")),
]


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder or a .gguf file.")],
    file: Annotated[Path, typer.Option("--json", help="Where the numbers are and go.")],
) -> None:
    """Measure what a KV cache with static scales costs, one factor at a time."""
    if not find_file_or_xz(file).exists():
        write_json(file, measure_cache(model, progress_for(model.name)))
    print(cache_table(read_json(file)))


@torch.inference_mode()
def measure_cache(path: Path, progress: Progress = report_nothing) -> dict[str, Any]:
    """Negative log-likelihood and KL of every row by scored window, in nats a token."""
    source = open_source(path)
    model, text = load(source, Recipe(), torch.float32, "cpu"), books_text()
    known = source.architecture.vocab_size
    scored = [_window(source.tokenizer, text, known, *at) for at in SCORED]
    ranges = {}
    for number, row in enumerate(ROWS):
        progress(number, 2 * len(ROWS), "calibrating")
        if row.observer:
            ids = torch.stack(
                [_window(source.tokenizer, text, known, *at)[:-1] for at in CALIBRATIONS[row.calibrated_on]]
            )
            ranges[row] = observe_ranges(model, ids, ("k", "v"), Observer(row.observer, bits=row.bits))
    exact = [_states(model, ids) for ids in scored]
    rows = []
    for number, row in enumerate(ROWS):
        progress(len(ROWS) + number, 2 * len(ROWS), "scoring")
        model.model.ranges = ranges.get(row, {})
        model.apply_recipe(row.recipe)
        rows.append(vars(row) | _scores([_states(model, ids) for ids in scored], scored, exact))
    return {
        "model": path.name,
        "fingerprint": source.fingerprint,
        "text": text_digest(text),
        "window": WINDOW,
        "scored": SCORED,
        "calibrations": CALIBRATIONS,
        "environment": describe_environment(),
        "16 bits": _scores(exact, scored, exact),
        "rows": rows,
    }


def _window(tokenizer: Any, text: str, vocabulary: int, passage: int, window: int) -> Tensor:
    """Token ids [WINDOW + 1] of a window of a passage."""
    length = len(text) // PASSAGES
    ids = encode_text(tokenizer, text[passage * length : (passage + 1) * length], vocabulary, torch.device("cpu"))
    return ids[window * WINDOW : (window + 1) * WINDOW + 1]


def _states(model: DiffTransformer, ids: Tensor) -> ModelOutputs:
    return TorchModel(model).compute_outputs(ids[None, :-1])[0]


def _scores(
    states: Sequence[ModelOutputs], windows: Sequence[Tensor], exact: Sequence[ModelOutputs]
) -> dict[str, list[float]]:
    predicted = [token_scores(s, ids[1:, None])[0] for s, ids in zip(states, windows, strict=True)]
    kl = [next_token_kl(p.float32_logits(), q.float32_logits()) for p, q in zip(exact, states, strict=True)]
    return {"nll": [-float(x.mean()) for x in predicted], "kl": [float(x.mean()) for x in kl]}


def cache_table(result: Mapping[str, Any]) -> str:
    """Markdown with a row for each configuration, mse beside absmax on the same tokens."""
    heads = ["cache", "scales", "found on", "tokens", "KL, nats", "mse less absmax", "perplexity"]
    full = f"perplexity {_perplexity(result['16 bits']):.2f} with a 16-bit cache"
    rows = [_cells(result, row) for row in result["rows"]]
    return "\n".join([*markdown(heads, rows), "", full])


def _cells(result: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    kl = mean_interval(row["kl"])
    windows = result["calibrations"].get(row["calibrated_on"], [])
    return [
        f"{row['bits']} bits",
        f"static, {row['observer']}" if row["observer"] else "a token and head",
        row["calibrated_on"] or "-",
        f"{len(windows) * result['window']:,}" if windows else "-",
        f"{kl.mean:.2g} [{kl.low:.2g}, {kl.high:.2g}]",
        _gain(result, row) if row["observer"] == "mse" else "-",
        f"{_perplexity(row):.2f}",
    ]


def _gain(result: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Difference of KL between mse and absmax on the same tokens, with its share of absmax's."""
    same = {"bits": row["bits"], "calibrated_on": row["calibrated_on"], "observer": "absmax"}
    absmax = next(other for other in result["rows"] if same.items() <= other.items())
    change, whole = paired_difference(row["kl"], absmax["kl"]), mean_interval(absmax["kl"]).mean
    return f"{change.mean:+.2g} [{change.low:+.2g}, {change.high:+.2g}], {change.mean / whole:+.0%}"


def _perplexity(scores: Mapping[str, Any]) -> float:
    return math.exp(mean_interval(scores["nll"]).mean)


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
