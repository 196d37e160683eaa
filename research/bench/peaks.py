"""Peak memory of a result's attention and decode cells, measured again, and its tables and plots drawn anew.

    python -m research.bench.peaks bench/results/cpu

Memory needs no quiet machine, as times do. The result says when, where and of which commit its memory was measured.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diffquant.benchmarks import contest
from diffquant.benchmarks.cells import BenchCell, BenchResult, read_result
from diffquant.benchmarks.contest import PeerComparison
from diffquant.benchmarks.measuring import describe_environment
from diffquant.benchmarks.run import write_bench_outputs
from diffquant.benchmarks.workloads import MODELS, Workload
from diffquant.errors import UsageError
from diffquant.support.progress import Progress, progress_for, report_nothing


def main(folder: Annotated[Path, typer.Argument(help="Folder with the bench.json of `diffquant bench`.")]) -> None:
    """Measure a result's peak memory again and draw its tables and plots."""
    result = measure_peaks(read_result(folder / "bench.json"), progress_for("peaks"))
    for path in write_bench_outputs(result, folder):
        print(path)


def measure_peaks(result: BenchResult, progress: Progress = report_nothing) -> BenchResult:
    """The result with its attention and decode cells' memory as it is here and now; none for paths no longer known.

    Raises:
        UsageError: it was measured on a CUDA device, where memory is measured with the times.
    """
    device = result.settings["device"]
    if device != "cpu":
        raise UsageError(f"this result is of {device}; its memory is measured with its times: run `diffquant bench`")
    cells = []
    for done, cell in enumerate(result.cells):
        progress(done, len(result.cells), f"{cell.section}: {cell.workload}, {cell.path}")
        cells.append(_measured(cell, result.settings["threads"]) if cell.section in contest.SECTIONS else cell)
    about = describe_environment()
    measured = {what: about[what] for what in ("date", "commit", "cpu")} | {"torch": about["versions"]["torch"]}
    return replace(result, cells=tuple(cells), settings=result.settings | {"peak memory": measured})


def _measured(cell: BenchCell, threads: int) -> BenchCell:
    known = contest.SECTIONS[cell.section]
    if not cell.values or cell.path not in known:
        return replace(cell, peak_bytes=None)
    work = _workload(cell)
    peak = PeerComparison(cell.section, "cpu", 1, (cell.path,)).measure_peak_memory(cell.path, work, threads)
    return replace(cell, peak_bytes=peak)


def _workload(cell: BenchCell) -> Workload:
    """Workload that a cell's name says."""
    model, tokens, batch, dtype = cell.workload.split(", ")
    counts = tokens.removesuffix(" tokens").split(" of ")
    work = Workload(MODELS[model], int(counts[0]), int(counts[-1]), int(batch.removeprefix("batch ")), dtype)
    if work.name != cell.workload:
        raise UsageError(f"cannot read the workload {cell.workload!r}; it would be {work.name!r}")
    return work


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
