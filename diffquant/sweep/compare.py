"""Compares two sweeps, single configurations of them, or samples of lm-eval. No torch here."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from diffquant.errors import UsageError
from diffquant.evals.comparison import Comparison, Outcome, compare_outcomes, left_out, outcome_of
from diffquant.evals.samples import read_samples
from diffquant.support.listing import first_few
from diffquant.support.xz import stored
from diffquant.sweep.comparison_report import ComparisonReport
from diffquant.sweep.grid import Point
from diffquant.sweep.result import SweepResult, model_names, read_sweep


def compare(before: str | Path, after: str | Path) -> ComparisonReport:
    """Compare what two sources measured on the same items, item by item.

    Args:
        before, after: a sweep's folder or its sweep.json; FOLDER@WORDS for the configurations whose model, target or
            scheme are these words, such as "run@6:tensor" or "run@logits 16"; or a samples_*.jsonl of lm-eval.

    If each side has one configuration, these two are compared, whatever their names. Otherwise configurations are
    matched by model: the same path, or else the same name.

    Raises:
        UsageError: a source cannot be read, the two have nothing in common, or were asked different items in all tasks.
    """
    sides = _named_alike(*(_outcomes(str(source)) for source in (before, after)))
    is_one_each = all(len({outcome.name for outcome in side}) == 1 for side in sides)
    keyed = [{("" if is_one_each else outcome.name, outcome.task): outcome for outcome in side} for side in sides]
    shared = [key for key in keyed[0] if key in keyed[1]]
    if not shared and is_one_each:
        first, second = (", ".join(sorted({task for _, task in side})) for side in keyed)
        raise UsageError(f"nothing to compare: A has {first}, and B has {second}; both need results of one task")
    if not shared:
        first, second = (_names(side) for side in sides)
        raise UsageError(
            f"nothing to compare: A has {first}, and B has {second}; choose one configuration of each, such as "
            f"'{_chosen(before, sides[0])}' and '{_chosen(after, sides[1])}'"
        )
    alone = [
        f"{letter}'s {' '.join(filter(None, key))}"
        for letter, side, other in (("A", *keyed), ("B", *reversed(keyed)))
        for key in side
        if key not in other
    ]
    pairs = [(keyed[0][key], keyed[1][key]) for key in shared]
    comparisons: list[Comparison] = []
    without: list[str] = []
    for pair in pairs:
        try:
            comparisons += compare_outcomes(*pair)
            without += left_out(*pair)
        except UsageError as error:
            without.append(str(error))
    # Of all configurations alike.
    reasons = list(dict.fromkeys(without))
    if not comparisons:
        raise UsageError(first_few(reasons))
    return ComparisonReport(str(before), str(after), comparisons, alone, reasons)


class _Measured(NamedTuple):
    """An outcome named by target and scheme, with its model's path and that model's name in the sweep's table."""

    model: Path
    called: str
    outcome: Outcome


def _outcomes(source: str) -> list[_Measured]:
    """Every outcome that a source holds."""
    path, words = Path(source), ""
    if not path.exists() and "@" in source:
        folder, _, words = source.rpartition("@")
        path = Path(folder)
    if not path.exists():
        raise UsageError(f"{source}: no such file or folder")
    if path.suffix == ".jsonl":
        return [_Measured(path, "", read_samples(path))]
    file = path / "sweep.json" if path.is_dir() else path
    if not stored(file).is_file():
        raise UsageError(_no_sweep(path))
    try:
        sweep = read_sweep(file)
        outcomes = _of_sweep(sweep, words.split())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            _no_sweep(file)
            if isinstance(error, ValueError) and file.name != "sweep.json"
            else f"cannot read {file} as a sweep: {type(error).__name__}: {error}"
        ) from error
    if not outcomes:
        names = model_names([point.model for point in sweep.points])
        known = ", ".join(dict.fromkeys(_point_name(point, names) for point in sweep.points))
        raise UsageError(f"{source}: no measured configuration is called {words!r}; there are {known}")
    return outcomes


def _no_sweep(path: Path) -> str:
    """Why nothing that was measured is at a path."""
    wanted = "give a sweep's folder, or a samples_*.jsonl of lm-eval"
    if path.suffix.lower() == ".gguf" or (path / "config.json").is_file():
        return f"{path} is a model: {wanted}; `diffquant fidelity` compares what two models predict"
    return f"{path} has no sweep.json: {wanted}" if path.is_dir() else f"{path} is no sweep.json: {wanted}"


def _of_sweep(sweep: SweepResult, words: Sequence[str]) -> list[_Measured]:
    names = model_names([point.model for point in sweep.points])
    identities = {task["name"]: task for task in sweep.settings["tasks"]}
    return [
        _Measured(
            cell.point.model,
            names[cell.point.model],
            outcome_of(_configuration(cell.point), cell.task, identities[cell.task], cell.result),
        )
        for cell in sweep.cells
        if cell.result and set(words) <= {*_point_name(cell.point, names).split(" ")}
    ]


def _named_alike(before: list[_Measured], after: list[_Measured]) -> list[list[Outcome]]:
    """The outcomes of both sides under common names, those of A."""
    sides = (before, after)
    if all(len({each.model for each in side}) == 1 for side in sides):
        # The only model of each sweep is taken to be the same, wherever its file lies.
        return [[each.outcome for each in side] for side in sides]
    own = {each.model: each.called for each in before}
    return [
        [replace(each.outcome, name=f"{own.get(each.model, each.called)} {each.outcome.name}") for each in side]
        for side in sides
    ]


def _configuration(point: Point) -> str:
    return " ".join(filter(None, (point.target, point.scheme)))


def _point_name(point: Point, names: dict[Path, str]) -> str:
    return f"{names[point.model]} {_configuration(point)}"


def _chosen(source: str | Path, outcomes: list[Outcome]) -> str:
    """How to ask for the first of a source's configurations alone."""
    folder = Path(source) if Path(source).exists() else Path(str(source).rpartition("@")[0] or source)
    return f"{folder}@{outcomes[0].name}"


def _names(outcomes: list[Outcome]) -> str:
    return ", ".join(dict.fromkeys(outcome.name or "one configuration" for outcome in outcomes))
