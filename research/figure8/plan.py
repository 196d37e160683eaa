"""The list of runs, which of them are there, and the rate that the protocol gives each.

Source of every number here: protocol.md beside this file.
"""

import json
import lzma
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from settings import Schedule, Sizes

from diffquant.errors import UsageError

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
RUNS = FOLDER / "runs.md"

KINDS = ("transformer", "diff-v1", "diff-v2")
GRID = (1e-3, 2e-3, 4e-3, 8e-3)
EDGES = {GRID[0]: 5e-4, GRID[-1]: 16e-3}
EQUALIZED = "-equalized"
# Largest magnitude of a logit in an equalized model: about what trained Transformers of this size reach.
LARGEST = 28.0

_SMALL = Sizes(hidden=128, layers=5, heads=4, head_dim=32, inner=344, context=512, init=0.06, bias=False, theta=10000.0)
_LARGE = Sizes(hidden=256, layers=6, heads=8, head_dim=32, inner=688, context=512, init=0.06, bias=False, theta=10000.0)
SIZES = {"1.25M": _SMALL, "5.3M": _LARGE}
TOKENS_PER_STEP = 4096
_STEPS = 1800
# What the best rate falls with: tokens to this power, and width.
_EXPONENT = -0.32
_RATE = re.compile(r"(?P<number>[\d.e-]+)(?P<edge>\?)?|best(?: (?P<sign>[×/]) 2)?|(?P<checked>checked)")

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A line of runs.md.

    Attributes:
        name: name of the run and of its raw file.
        kind: kind of model, with "-equalized" behind it where queries and keys have one length.
        size: name of its sizes in `SIZES`.
        steps: number of optimizer steps.
        rule: how its rate is found: a number, a number with "?" (needed only behind the end of the grid that is best),
            "best" (of its kind, carried to its tokens and width; with "× 2" or "/ 2" for its neighbours), or "checked"
            (the best of the three neighbours at a quarter of the tokens, carried on).
        seed: seed of weights and data.
        arithmetic: "bf16", or "float32".
    """

    name: str
    kind: str
    size: str
    steps: int
    rule: str
    seed: int
    arithmetic: str

    @property
    def base(self) -> str:
        """Kind whose best rate the run takes: a control takes that of the kind it controls."""
        kind = self.kind.removesuffix(EQUALIZED)
        return kind if kind in KINDS else "transformer"

    @property
    def schedule(self) -> Schedule:
        """Schedule but for the rate, which is 0."""
        lengths = ((0.0, 128), (0.5, 256))
        return Schedule(self.steps, 100, TOKENS_PER_STEP, lengths, rate=0.0, seed=self.seed)

    @property
    def carry(self) -> float:
        """Factor from the best rate of the small models to this run's."""
        wider = SIZES[self.size].hidden / _SMALL.hidden
        return (self.steps / _STEPS) ** _EXPONENT / wider


@cache
def listed(file: Path = RUNS) -> tuple[Run, ...]:
    """All runs in their order.

    Raises:
        UsageError: a line cannot be read, or two runs have one name.
    """
    runs = []
    for line in file.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|") or cells[0] == "run" or set(line) <= set("|- "):
            continue
        try:
            name, kind, size, steps, rule, seed, arithmetic = cells
            runs.append(Run(name, kind, size, int(steps.replace(",", "")), rule, int(seed), arithmetic))
        except ValueError as error:
            raise UsageError(f"{file}: cannot read the run {line!r}: {error}") from error
        if not _RATE.fullmatch(rule) or size not in SIZES:
            raise UsageError(f"{file}: {name} has a rate {rule!r} or a size {size!r} that is unknown")
    if len({run.name for run in runs}) < len(runs):
        raise UsageError(f"{file}: two runs have one name")
    return tuple(runs)


def run_named(name: str) -> Run:
    """A run of the list.

    Raises:
        UsageError: there is none of that name.
    """
    found = [run for run in listed() if run.name == name]
    if not found:
        raise UsageError(f"{RUNS} has no run {name!r}")
    return found[0]


def raw_file(name: str, folder: Path = RESULTS) -> Path | None:
    """Raw file of a run; None where it has none yet."""
    files = (folder / f"{name}.json", folder / f"{name}.json.xz")
    return next((file for file in files if file.exists()), None)


def read_result(file: Path) -> Result:
    """Content of a raw file."""
    with lzma.open(file, "rt", encoding="utf-8") if file.suffix == ".xz" else file.open(encoding="utf-8") as stream:
        result: Result = json.load(stream)
    return result


def results(folder: Path = RESULTS) -> dict[str, Result]:
    """Every raw result by its run's name."""
    return {file.name.partition(".json")[0]: read_result(file) for file in sorted(folder.glob("*.json*"))}


def upcoming(there: Mapping[str, Result], runs: Iterable[Run] | None = None) -> list[Run]:
    """Runs that have no result and can begin, in the list's order."""
    runs = listed() if runs is None else runs
    return [run for run in runs if run.name not in there and rate_of(run, there) is not None]


def rate_of(run: Run, there: Mapping[str, Result]) -> float | None:
    """Learning rate that the protocol gives a run; None where it is not needed, or what decides is not there yet."""
    rule = _RATE.fullmatch(run.rule)
    if rule is None:
        raise UsageError(f"{run.name} has an unknown rate {run.rule!r}")
    if rule["number"]:
        rate = float(rule["number"])
        return rate if not rule["edge"] or EDGES.get(_best_of_grid(run.base, there) or 0.0) == rate else None
    best = best_rate(run.base, there)
    if best is None:
        return None
    if rule["checked"]:
        factor = _checked(run, there)
        return None if factor is None else round(best * run.carry * factor, 6)
    return round(best * run.carry * {"×": 2.0, "/": 0.5}.get(rule["sign"], 1.0), 6)


def best_rate(kind: str, there: Mapping[str, Result]) -> float | None:
    """Rate of lowest perplexity on the held-out training text; None while one of the trainings that decide is missing.

    Where the best is an end of the grid, the next rate beyond it is tried too.
    """
    best = _best_of_grid(kind, there)
    if best not in EDGES:
        return best
    losses = {rate: _validation(grid_name(kind, rate), there) for rate in (best, EDGES[best])}
    return None if None in losses.values() else _lowest(losses)


def _best_of_grid(kind: str, there: Mapping[str, Result]) -> float | None:
    losses = {rate: _validation(grid_name(kind, rate), there) for rate in GRID}
    return None if None in losses.values() else _lowest(losses)


def _checked(run: Run, there: Mapping[str, Result]) -> float | None:
    """Factor 1, 2 or ½ of the neighbour that is best at a quarter of the tokens."""
    names = {1.0: "", 2.0: "-double", 0.5: "-half"}
    losses = {factor: _validation(f"e3-{run.kind}-check{name}", there) for factor, name in names.items()}
    return None if None in losses.values() else _lowest(losses)


def grid_name(kind: str, rate: float) -> str:
    """Name of the run of a rate's choice."""
    return f"e1-{kind}-rate-{rate * 1000:g}e-3"


def _validation(name: str, there: Mapping[str, Result]) -> float | None:
    if name not in there:
        return None
    # A training whose loss left the finite numbers is a rate that nobody would take.
    loss = there[name]["validation"]["nll"]
    return math.inf if loss is None else loss


def _lowest(losses: Mapping[float, float | None]) -> float:
    return min(losses, key=lambda rate: losses[rate] or 0.0)
