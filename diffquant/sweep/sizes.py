"""Stored bytes against KL, and for each model the smallest configuration that changes little."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diffquant.evals.columns import MISSING, kl_text
from diffquant.evals.stats import Difference
from diffquant.evals.tasks import kind_of
from diffquant.report.page import Drawing, Key, Table
from diffquant.report.plots import Tips, as_svg, key_of, look, new_figure, plain_log_scale, tidy
from diffquant.sweep.result import SweepResult
from diffquant.sweep.table import Row, rows, tasks_of

# What each target stores: weights in MB, keys and values in kB a token.
_STORED = {"weights": "checkpoint, MB", "kv": "KV cache, kB per token", "k": "KV cache, kB per token"}
_STORED["v"] = _STORED["k"]
# Nats of KL up to which a configuration is recommended. A choice of ours: it is said wherever it decides.
SMALL_KL = 0.05


@dataclass(frozen=True)
class Sized:
    """A configuration's size and its KL from 16 bits.

    Attributes:
        size: MB of its checkpoint, or kB of a token in its cache.
        kl: mean in nats with its 95 % interval.
    """

    row: Row
    task: str
    size: float
    kl: Difference

    @property
    def series(self) -> str:
        return f"{self.row.model}, {self.row.point.granularity}"

    @property
    def size_text(self) -> str:
        return f"{self.size:.1f} MB" if self.row.point.target == "weights" else f"{self.size:.2f} kB/token"

    def command(self, path: str) -> str:
        """The command that makes what was measured; a sweep rounds to nearest."""
        target, scheme = self.row.point.target, self.row.point.scheme
        output = f"{self.row.model}-{target}{self.row.point.bits}"
        rounding = " --rounding nearest" if target == "weights" else ""
        return f"diffquant quantize {shlex.quote(path)} -o {shlex.quote(output)} --{target} {scheme}{rounding}"


def sized(sweep: SweepResult) -> list[Sized]:
    """Every configuration that stores less and whose KL was measured, in the table's order."""
    return [each for row in rows(sweep) for task in tasks_of(sweep) for each in _sized(row, task)]


def recommendations(found: Sequence[Sized], path_of: Mapping[str, str]) -> tuple[Table, dict[str, str]]:
    """For each model, target and task the smallest configuration with a small KL, and the commands that make them.

    Where a KL has an interval, its upper end has to be small.

    Args:
        path_of: paths by name of the models that `quantize` takes.
    """
    lines, commands = [], {}
    for model, target, task in dict.fromkeys((e.row.model, e.row.point.target, e.task) for e in found):
        mine = [e for e in found if (e.row.model, e.row.point.target, e.task) == (model, target, task)]
        small = [each for each in mine if each.kl.high < SMALL_KL]
        if not small:
            # Nothing narrower that was swept is close enough.
            lines.append([model, target, task, "16", MISSING, MISSING])
            continue
        best = min(small, key=lambda each: (each.size, each.kl.mean))
        lines.append([model, target, task, best.row.point.scheme, best.size_text, kl_text(best.kl)])
        if model in path_of:
            commands[f"{model}, {target} {best.row.point.scheme}"] = best.command(path_of[model])
    return Table(["model", "target", "by", "take", "stored", "KL"], lines, names=4), commands


def size_charts(found: Sequence[Sized]) -> tuple[list[Drawing], list[Key]]:
    """One drawing for each task and target, a line for each model and granularity; and the key to the lines."""
    series = list(dict.fromkeys(each.series for each in found))
    drawings = []
    for task, target in dict.fromkeys((each.task, each.row.point.target) for each in found):
        mine = [each for each in found if (each.task, each.row.point.target) == (task, target)]
        figure, tips = new_figure(4.6, 3.2), Tips()
        axis = figure.subplots()
        for name in dict.fromkeys(each.series for each in mine):
            line = sorted((each for each in mine if each.series == name), key=lambda each: each.size)
            drawn = [each.kl.drawn for each in line]
            bars = [[kl.mean - kl.low for kl in drawn], [kl.high - kl.mean for kl in drawn]]
            sizes, means = [each.size for each in line], [each.kl.mean for each in line]
            axis.errorbar(sizes, means, bars, markersize=5, linewidth=1.4, capsize=2.5, **look(series.index(name)))
            for each in line:
                text = f"{name}, {each.row.point.bits} bits: {each.size:.4g}, KL {each.kl.mean:.3g}"
                tips.mark(axis, each.size, each.kl.mean, f"{text} [{each.kl.low:.3g}, {each.kl.high:.3g}]")
        if all(each.kl.drawn.low > 0 for each in mine):
            plain_log_scale(axis)
        axis.set_xlabel(_STORED[target])
        axis.set_ylabel("KL from 16 bits, nats")
        tidy(axis)
        title = f"{task}: {target}"
        drawings.append(Drawing(as_svg(figure, f"{title}, size against KL", tips), title))
    return drawings, [key_of(number, name) for number, name in enumerate(series)]


def _sized(row: Row, task: str) -> Iterator[Sized]:
    compared, target = row.results[task], row.point.target
    nbytes = row.weight_bytes if target == "weights" else row.kv_bytes
    if target not in _STORED or nbytes is None or compared.result is None:
        return
    kl = kl_of(row, task)
    if kl is not None:
        yield Sized(row, task, nbytes / (1e6 if target == "weights" else 1e3), kl)


def kl_of(row: Row, task: str) -> Difference | None:
    """A configuration's KL from 16 bits, where the task measures one."""
    metrics = [change for change in kind_of(task).columns.changes if change.is_log]
    return metrics[0].of(row.results[task]) if metrics and row.results[task].result else None
