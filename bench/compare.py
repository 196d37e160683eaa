"""Changes between two results of the bench that are larger than noise."""

from dataclasses import dataclass

from diffquant.bench.cells import BenchCell, BenchResult

# Even where no repeat overlaps, a machine drifts by a few percent from run to run.
SMALLEST_CHANGE = 0.05


@dataclass(frozen=True)
class Change:
    """A cell that both results have, before and after.

    Attributes:
        old, new: the cell in either result.
        times: how many times better the new one is, by medians.
    """

    old: BenchCell
    new: BenchCell
    times: float

    def __str__(self) -> str:
        what = "better" if self.times > 1 else "worse"
        was, now = self.old.spread, self.new.spread
        medians = f"{was.median:.4g} -> {now.median:.4g} {self.new.unit}" if was and now else ""
        times = self.times if self.times > 1 else 1 / self.times
        return f"{times:.2f}x {what}: {self.new.section}, {self.new.workload}, {self.new.path}: {medians}"


def moved(old: BenchResult, new: BenchResult) -> list[Change]:
    """Cells whose repeats do not overlap and whose medians differ by more than 5 %, worst first."""
    before = {cell.key: cell for cell in old.cells if cell.values}
    in_both = [(before[cell.key], cell) for cell in new.cells if cell.values and cell.key in before]
    changes = [Change(a, b, _times_better(a, b)) for a, b in in_both if _is_beyond_noise(a, b)]
    return sorted(changes, key=lambda change: change.times)


def summarize_changes(old: BenchResult, new: BenchResult) -> str:
    """Text with a line for every cell that moved, is new or is gone."""
    lines = [str(change) for change in moved(old, new)] or ["nothing moved beyond noise"]
    before, after = ({cell.key for cell in result.cells if cell.values} for result in (old, new))
    gone, added = before - after, after - before
    lines += [f"no longer measured: {', '.join(key[:3])}" for key in sorted(gone)]
    lines += [f"measured for the first time: {', '.join(key[:3])}" for key in sorted(added)]
    devices = [result.environment.get("device") for result in (old, new)]
    if devices[0] != devices[1]:
        lines.insert(0, f"different devices: {devices[0]}, {devices[1]}; times say nothing about the code")
    return "\n".join(lines)


def _is_beyond_noise(old: BenchCell, new: BenchCell) -> bool:
    a, b = old.spread, new.spread
    if a is None or b is None:
        return False
    apart = a.high < b.low or b.high < a.low
    times = _times_better(old, new)
    return apart and max(times, 1 / times) > 1 + SMALLEST_CHANGE


def _times_better(old: BenchCell, new: BenchCell) -> float:
    a, b = old.spread, new.spread
    if a is None or b is None or not a.median or not b.median:
        return 1.0
    return a.median / b.median if new.falls else b.median / a.median
