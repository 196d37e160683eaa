"""The list of runs, which of them are there, and the rate that the protocol gives each.

Source of every number here: protocol.md beside this file.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from research.studies.results import read_json
from research.train.settings import Schedule, Sizes

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
RUNS = FOLDER / "runs.md"

KINDS = ("transformer", "diff-v1", "diff-v2")
# Cells of E4, by number of maps and whether the norm stands behind the pair.
CELLS = {
    (1, False): "half-heads",
    (1, True): "half-heads-norm",
    (2, False): "diff-v1-no-norm",
    (2, True): "diff-v1",
}
GRID = (1e-3, 2e-3, 4e-3, 8e-3)
EDGES = {GRID[0]: 5e-4, GRID[-1]: 16e-3}
# Factors of a carried rate that E3 and E5 check first, and how their runs' names end.
CHECKS = {1.0: "", 2.0: "-double", 0.5: "-half"}
EQUALIZED = "-equalized"
# Largest magnitude of a logit in an equalized model: about what trained Transformers of this size reach.
LARGEST = 28.0
OUTLIERS = "-outliers"
# Arms of E7, by the scheme of the logits that they are trained with.
TUNED = {"-tuned": "16", "-tuned-tensor": "4:tensor", "-tuned-row": "4:row"}
# E6: other weight decays, windows without <s>, and a finished model that is only read.
DECAYS = {"-decay-0": 0.0, "-decay-1": 1.0}
NO_FIRST, READ = "-no-first", "-read"
# What may stand behind a kind: how it is trained.
VARIANTS = (EQUALIZED, OUTLIERS, *TUNED, *DECAYS, NO_FIRST, READ)
# Seed whose runs start from the models that ship.
SHIPPED = 101
# Beginnings of the names of runs in an arithmetic of their own.
OTHER_ARITHMETIC = ("arithmetic-", "e7-", "e8-")

_SMALL = Sizes(hidden=128, layers=5, heads=4, head_dim=32, inner=344, context=512, init=0.06, bias=False, theta=10000.0)
_LARGE = Sizes(hidden=256, layers=6, heads=8, head_dim=32, inner=688, context=512, init=0.06, bias=False, theta=10000.0)
_DEEP = replace(_SMALL, hidden=80, layers=12, inner=207)
_GPU = replace(_SMALL, hidden=320, layers=12, heads=10, inner=896, context=1024)
SIZES = {"1.25M": _SMALL, "5.3M": _LARGE, "1.25M-deep": _DEEP, "16M": _GPU}
TOKENS_PER_STEP = 4096
_STEPS = 1800
SMALL_TOKENS = _STEPS * TOKENS_PER_STEP
# What the best rate falls with: tokens to this power, and width.
EXPONENT = -0.32
_RATE = re.compile(r"(?P<number>[\d.e-]+)(?P<edge>\?)?|best(?: (?P<sign>[×/]) (?P<factor>[2-9]))?|(?P<checked>checked)")

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A line of runs.md.

    Attributes:
        name: name of the run and of its raw file.
        kind: kind of model and, behind it, how it is trained: one of `VARIANTS`, such as "-equalized" where queries and
            keys have one length, or "-outliers" where a high rate makes its logits large on purpose.
        size: name of its sizes in `SIZES`.
        steps: number of optimizer steps.
        rule: how its rate is found: a number, a number with "?" (needed only behind the end of the grid that is best),
            "best" (of its kind, carried to its tokens and width; with "× 2" or "/ 2" for its neighbours, and "× 4" for
            large logits), or "checked" (the best of the three neighbours at a quarter of the tokens, carried on).
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
    def architecture(self) -> str:
        """Kind of model that is trained, however it is trained."""
        return self.kind.removesuffix(self.variant)

    @property
    def variant(self) -> str:
        """What stands behind the kind, "" if nothing does."""
        return next((variant for variant in VARIANTS if self.kind.endswith(variant)), "")

    @property
    def tuned_at(self) -> str:
        """Scheme of the logits with which a model is trained further; "" for a run that trains a model anew."""
        return TUNED.get(self.variant, "")

    @property
    def begins_trained(self) -> bool:
        """Whether the run starts from a finished model."""
        return bool(self.tuned_at) or self.variant == READ

    @property
    def base_run(self) -> str | None:
        """Run whose finished model this one starts from; None where that is a model that ships, or none."""
        is_ours = self.begins_trained and self.seed != SHIPPED
        return f"e6-{self.architecture}-seed-{self.seed}" if is_ours else None

    @property
    def records_ranges(self) -> bool:
        """Whether the ranges of the logits are recorded during the training."""
        return self.name.startswith(("e5-", "e6-")) and "-seed-" in self.name and not self.begins_trained

    @property
    def base(self) -> str:
        """Kind whose best rate the run takes: a control takes that of the kind it controls, a cell of E4 its own."""
        has_grid = self.architecture in KINDS or self.name.startswith("e4-")
        return self.architecture if has_grid else "transformer"

    def schedule(self, rate: float) -> Schedule:
        """Schedule at a rate."""
        if self.tuned_at:
            return Schedule(self.steps, self.steps // 10, TOKENS_PER_STEP, ((0.0, 256),), rate, seed=self.seed)
        usual = Schedule(self.steps, 100, TOKENS_PER_STEP, ((0.0, 128), (0.5, 256)), rate, seed=self.seed)
        return replace(usual, decay=DECAYS.get(self.variant, usual.decay))

    @property
    def carry(self) -> float:
        """Factor from the best rate of the small models to this run's."""
        wider: float = SIZES[self.size].hidden / _SMALL.hidden
        fewer: float = (self.steps / _STEPS) ** EXPONENT
        return fewer / wider


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


def results(folder: Path = RESULTS) -> dict[str, Result]:
    """Every raw result by its run's name."""
    return {file.name.partition(".json")[0]: read_json(file) for file in sorted(folder.glob("*.json*"))}


def upcoming(there: Mapping[str, Result]) -> list[Run]:
    """Runs that have no result and can begin, in the list's order."""
    return [run for run in listed() if run.name not in there and rate_of(run, there) is not None]


def rate_of(run: Run, there: Mapping[str, Result]) -> float | None:
    """Learning rate that the protocol gives a run; None if it is not needed, or what decides is not there yet."""
    rule = _RATE.fullmatch(run.rule)
    if rule is None:
        raise UsageError(f"{run.name} has an unknown rate {run.rule!r}")
    if run.base_run is not None and run.base_run not in there:
        return None
    if rule["number"]:
        rate = float(rule["number"])
        return rate if not rule["edge"] or EDGES.get(_best_of_grid(run.base, there) or 0.0) == rate else None
    best = best_rate(run.base, there)
    if best is None:
        return None
    times = float(rule["factor"] or 1)
    factor = _checked(run.name[:2], run.kind, there) if rule["checked"] else 1 / times if rule["sign"] == "/" else times
    return None if factor is None else round(best * run.carry * factor, 6)


def best_rate(kind: str, there: Mapping[str, Result]) -> float | None:
    """Rate of lowest perplexity on the held-out training text; None while one of the trainings that decide is missing.

    Where the best is an end of the grid, the next rate beyond it is tried too.
    """
    best = _best_of_grid(kind, there)
    return _lowest({rate: grid_name(kind, rate) for rate in (best, EDGES[best])}, there) if best in EDGES else best


def grid_name(kind: str, rate: float) -> str:
    """Name of the run that trains a kind at a rate of the grid; kinds that only E4 has get their grid there."""
    return f"{'e1' if kind in KINDS else 'e4'}-{kind}-rate-{rate * 1000:g}e-3"


def _best_of_grid(kind: str, there: Mapping[str, Result]) -> float | None:
    return _lowest({rate: grid_name(kind, rate) for rate in GRID}, there)


def _checked(experiment: str, kind: str, there: Mapping[str, Result]) -> float | None:
    """Factor 1, 2 or ½ of the neighbour that is best at a quarter of the tokens."""
    return _lowest({factor: f"{experiment}-{kind}-check{name}" for factor, name in CHECKS.items()}, there)


def _lowest(names: Mapping[float, str], there: Mapping[str, Result]) -> float | None:
    """Number whose run has the lowest loss on the held-out windows; None while one of the runs is missing."""
    if any(name not in there for name in names.values()):
        return None
    losses = {number: there[name]["validation"]["nll"] for number, name in names.items()}
    # A training whose loss left the finite numbers is a rate that nobody would take.
    return min(losses, key=lambda number: math.inf if losses[number] is None else losses[number])
