"""How many HellaSwag items each measure needs to tell a configuration from 16 bits.

    python -m research.studies.resolution SWEEP OUTPUT.json

Of the differences d from 16 bits, item by item, n = ((1.96 + 0.84) sd(d) / mean(d))² items give an interval of 95 %
that misses 0 in four of five draws of items. Its own interval is over resampled items.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from diffquant.errors import UsageError
from diffquant.evals.comparison import compare_outcomes, outcome_of
from diffquant.evals.stats import Difference, mean_interval
from diffquant.evals.task_result import TaskResult
from diffquant.report.tables import markdown
from diffquant.support.code import provenance
from diffquant.support.files import write_json
from diffquant.sweep.grid import Point
from diffquant.sweep.result import SweepResult, read_sweep

# Normal quantiles of a two-sided 95 % interval and of a power of 80 %.
_LEVEL, _POWER = 1.959964, 0.841621
_DRAWS, _SEED = 2000, 0


def main(
    sweep: Annotated[Path, typer.Argument(help="Folder of a sweep with hellaswag.")],
    output: Annotated[Path, typer.Argument(help="JSON file to write.")],
) -> None:
    """Count the items that each measure needs."""
    measured = read_sweep(sweep / "sweep.json")
    rows = [row for point in measured.points if not point.is_baseline for row in _rows(measured, point)]
    if not rows:
        raise UsageError(f"{sweep} has no quantized configuration beside its 16 bits")
    record = {"command": shlex.join(["python", "-m", "research.studies.resolution", *sys.argv[1:]]), "rows": rows}
    write_json(output, record | provenance(__name__))
    heads = ["scheme", "measure", "items", "mean", "low", "high", "items needed", "low", "high"]
    typer.echo("\n".join(markdown(heads, [[str(value) for value in row.values()] for row in rows])))


def items_needed(differences: np.ndarray) -> float:
    """The number of items after which the mean of such differences is told from 0; infinite where that is 0."""
    mean = differences.mean()
    return float(((_LEVEL + _POWER) * differences.std(ddof=1) / mean) ** 2) if mean else float("inf")


def _rows(sweep: SweepResult, point: Point) -> list[dict[str, object]]:
    baseline = sweep.baseline(point)
    before = sweep.result_of(baseline, "hellaswag") if baseline else None
    after = sweep.result_of(point, "hellaswag")
    if before is None or after is None:
        return []
    return [_row(point.scheme, name, *of) for name, of in _differences(before, after).items()]


def _differences(before: TaskResult, after: TaskResult) -> dict[str, tuple[np.ndarray, Difference]]:
    """Each measure of each item, and their mean with the interval that tables have."""
    identity = {"name": "hellaswag"}
    compared = compare_outcomes(*(outcome_of("", "hellaswag", identity, each) for each in (before, after)))
    scores = [outcome_of("", "hellaswag", identity, each).scores for each in (before, after)]
    found = {
        each.measure: (np.subtract(scores[1][each.measure].values, scores[0][each.measure].values), each.difference)
        for each in compared
    }
    kl, tokens = np.array(after.details["kl_by_item"]), np.array(after.details["tokens_by_item"])
    # A ratio of sums, to first order: each item as its tokens weigh.
    found["KL"] = (kl * tokens / tokens.mean(), mean_interval(kl.tolist(), tokens.tolist()))
    return found


def _row(scheme: str, measure: str, differences: np.ndarray, mean: Difference) -> dict[str, object]:
    draws = np.random.default_rng(_SEED).integers(len(differences), size=(_DRAWS, len(differences)))
    counts = [items_needed(differences[draw]) for draw in draws]
    low, high = np.quantile(counts, [0.025, 0.975], method="inverted_cdf")
    is_told = mean.low > 0 or mean.high < 0
    return {
        "scheme": scheme,
        "measure": measure,
        "n": len(differences),
        "mean": mean.mean,
        "low": mean.low,
        "high": mean.high,
        "items_needed": items_needed(differences) if is_told else None,
        "items_needed_low": float(low),
        # Where these items do not tell the two apart, there is no upper end.
        "items_needed_high": float(high) if is_told else None,
    }


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
