"""Compares two sweeps, two of their configurations, or lm-eval's samples, and reports the changes. No torch here."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.measure.cells import SweepPoint
from diffquant.measure.comparison import (
    UNITS,
    Comparison,
    Outcome,
    compare_outcomes,
    list_left_out_measures,
    make_outcome,
    read_samples,
)
from diffquant.measure.sweep.result import SweepResult, read_sweep
from diffquant.reports.tables import align_columns
from diffquant.support.files import find_file_or_xz
from diffquant.support.names import first_few
from diffquant.support.plain_data import JsonObject, replace_nonfinite
from diffquant.support.terminal import PrintableResult

# Most items that the text names for each kind of flip.
_NAMED_ITEMS = 20


@dataclass(frozen=True, repr=False)
class ComparisonReport(PrintableResult):
    """The comparison of everything that two sources have in common.

    Attributes:
        before, after: the two sources as the caller gave them; the table calls them A and B.
        comparisons: one comparison for each measure that both sources have, of each configuration and task.
        alone: results that only one source has.
        left_out: for each measure that could not be compared, a line with the reason.
    """

    before: str
    after: str
    comparisons: list[Comparison]
    alone: list[str]
    left_out: list[str]

    def summary(self) -> str:
        """Return a table with one row per comparison, and notes on how to read it."""
        heads = ["configuration", "task", "measure", "n", "A", "B", "B - A [95 %]", "McNemar p", "flips"]
        table = align_columns(heads, [*map(_texts, self.comparisons)], 3)
        return "\n".join([f"A is {self.before}", f"B is {self.after}", "", *table, "", *self._notes()])

    def to_dict(self) -> JsonObject:
        """Return everything as plain data, with the ids of all flipped items."""
        rows = [
            {
                **{f"configuration_{letter}": of.name for letter, of in zip("ab", comparison.outcomes, strict=True)},
                **{name: getattr(comparison, name) for name in ("task", "measure", "n")},
                "a": comparison.before,
                "b": comparison.after,
                "difference": comparison.difference.mean,
                "low": replace_nonfinite(comparison.difference.low),
                "high": replace_nonfinite(comparison.difference.high),
                "p": comparison.p_value,
                **{name: getattr(comparison, name) for name in ("gained", "lost")},
            }
            for comparison in self.comparisons
        ]
        return {"a": self.before, "b": self.after, "comparisons": rows, "alone": self.alone, "left_out": self.left_out}

    def _notes(self) -> Iterable[str]:
        rows = self.comparisons
        yield (
            "Differences are paired over the same items: Bonett and Price's interval for right and wrong, Student's "
            "for other numbers. McNemar's exact test asks whether as many items became right (+) as wrong (-)."
        )
        if units := {f"{c.measure} in {c.unit}" for c in rows if c.unit}:
            yield f"Units: {', '.join(sorted(units))}."
        flipped = [c for c in rows if c.gained or c.lost]
        if len({comparison.name for comparison in rows}) == 1:
            for comparison in flipped:
                yield f"{comparison.task} {comparison.measure}: {_items_text(comparison)}."
        elif flipped:
            yield "The JSON form names the items that flipped."
        if len(rows) > 1:
            yield f"{len(rows)} differences are shown; by chance, one 95 % interval in twenty misses the truth."
        if any(before.prompts != after.prompts for before, after in (c.outcomes for c in rows)):
            yield "The prompts of A and B differ, around the same documents."
        if self.alone:
            yield f"Not compared, since only one of them has it: {first_few(self.alone)}."
        if self.left_out:
            yield f"Not compared: {first_few(self.left_out)}."


def _texts(comparison: Comparison) -> list[str]:
    factor, form = UNITS[comparison.unit]
    change = comparison.difference.times(factor)
    bounds = f" [{change.low:+{form}}, {change.high:+{form}}]" if math.isfinite(change.low) else ""
    return [
        comparison.name or "-",
        comparison.task,
        comparison.measure,
        str(comparison.n),
        format(factor * comparison.before, form),
        format(factor * comparison.after, form),
        f"{change.mean:+{form}}{bounds}",
        "-" if comparison.p_value is None else f"{comparison.p_value:.2g}",
        "-" if comparison.p_value is None else f"+{len(comparison.gained or ())} -{len(comparison.lost or ())}",
    ]


def _items_text(comparison: Comparison) -> str:
    kinds = (("right", comparison.gained), ("wrong", comparison.lost))
    return "; ".join(f"became {kind}: items {first_few(items, ', ', _NAMED_ITEMS)}" for kind, items in kinds if items)


def compare(before: str | Path, after: str | Path) -> ComparisonReport:
    """Compare what two sources measured on the same items, item by item.

    Args:
        before, after: a sweep's folder or its sweep.json; FOLDER@WORDS for the configurations with these words in
            model, target or scheme, such as "run@6:tensor" or "run@logits 16"; or a samples_*.jsonl of lm-eval.

    If each source has one configuration, these two are compared, whatever their names. Otherwise configurations are
    matched by model: the same path, or else the same name.

    Raises:
        UsageError: a source cannot be read, the two have no configuration and task in common, or no measure can be
            compared.
    """
    sides = _match_names(*(_outcomes(str(source)) for source in (before, after)))
    is_one_each = all(len({outcome.name for outcome in side}) == 1 for side in sides)
    keyed = [{("" if is_one_each else outcome.name, outcome.task): outcome for outcome in side} for side in sides]
    shared = [key for key in keyed[0] if key in keyed[1]]
    if not shared and is_one_each:
        first, second = (", ".join(sorted({task for _, task in side})) for side in keyed)
        raise UsageError(f"nothing to compare: A has {first}, and B has {second}; give two results of the same task")
    if not shared:
        first, second = (_names(side) for side in sides)
        raise UsageError(
            f"nothing to compare: A has {first}, and B has {second}; choose one configuration of each, such as "
            f"'{_selection(before, sides[0])}' and '{_selection(after, sides[1])}'"
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
            without += list_left_out_measures(*pair)
        except UsageError as error:
            without.append(str(error))
    # The same reason may hold for all configurations.
    reasons = list(dict.fromkeys(without))
    if not comparisons:
        raise UsageError(first_few(reasons))
    return ComparisonReport(str(before), str(after), comparisons, alone, reasons)


# (path of the model, the model's name in the sweep's table, an outcome named by target and scheme)
_Named = tuple[Path, str, Outcome]


def _outcomes(source: str) -> list[_Named]:
    """Read every outcome of a source."""
    path, words = Path(source), ""
    if not path.exists() and "@" in source:
        folder, _, words = source.rpartition("@")
        path = Path(folder)
    if not path.exists():
        raise UsageError(f"{source}: no such file or folder")
    if path.suffix == ".jsonl":
        return [(path, "", read_samples(path))]
    file = path / "sweep.json" if path.is_dir() else path
    if not find_file_or_xz(file).is_file():
        raise UsageError(_no_sweep(path))
    try:
        sweep = read_sweep(file)
        outcomes = _sweep_outcomes(sweep, words.split())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, ValueError) and file.name != "sweep.json":
            raise UsageError(_no_sweep(file)) from error
        raise UsageError(f"cannot read {file} as a sweep: {type(error).__name__}: {error}") from error
    if not outcomes:
        known = ", ".join(dict.fromkeys(_point_name(point, sweep.names) for point in sweep.points))
        raise UsageError(f"{source}: no measured configuration has the words {words!r}; choose from {known}")
    return outcomes


def _no_sweep(path: Path) -> str:
    """Explain why a path has no measurements."""
    wanted = "give a sweep's folder, or a samples_*.jsonl of lm-eval"
    if path.suffix.lower() == ".gguf" or (path / "config.json").is_file():
        return f"{path} is a model: {wanted}; `diffquant fidelity` compares what two models predict"
    return f"{path} has no sweep.json: {wanted}" if path.is_dir() else f"{path} is not a sweep.json: {wanted}"


def _sweep_outcomes(sweep: SweepResult, words: Sequence[str]) -> list[_Named]:
    names, identities = sweep.names, {task["name"]: task for task in sweep.settings["tasks"]}
    found = [
        (cell.point, make_outcome(_configuration(cell.point), cell.task, identities[cell.task], cell.result))
        for cell in sweep.cells
        if cell.result and set(words) <= {*_point_name(cell.point, names).split(" ")}
    ]
    return [(point.model, names[point.model], outcome) for point, outcome in found]


def _match_names(before: list[_Named], after: list[_Named]) -> list[list[Outcome]]:
    """Give outcomes of A and B the same names if their models match; a model's name is that in A."""
    sides = (before, after)
    if all(len({model for model, _, _ in side}) == 1 for side in sides):
        # If each sweep has one model, they count as the same model, whatever their paths.
        return [[outcome for _, _, outcome in side] for side in sides]
    names = {model: name for model, name, _ in before}
    return [
        [replace(outcome, name=f"{names.get(model, name)} {outcome.name}") for model, name, outcome in side]
        for side in sides
    ]


def _configuration(point: SweepPoint) -> str:
    return " ".join(filter(None, (point.target, point.scheme_text)))


def _point_name(point: SweepPoint, names: dict[Path, str]) -> str:
    return f"{names[point.model]} {_configuration(point)}"


def _selection(source: str | Path, outcomes: list[Outcome]) -> str:
    """Return the argument that selects the first configuration of a source."""
    folder = Path(source) if Path(source).exists() else Path(str(source).rpartition("@")[0] or source)
    return f"{folder}@{outcomes[0].name}"


def _names(outcomes: list[Outcome]) -> str:
    return ", ".join(dict.fromkeys(outcome.name or "one configuration" for outcome in outcomes))
