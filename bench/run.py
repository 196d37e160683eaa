"""Runs of the bench: its sections one after the other, and the files they leave."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from diffquant.bench.cells import BenchCell, BenchResult, cell_of
from diffquant.bench.contest import roofline
from diffquant.bench.contest.peers import failure
from diffquant.bench.environment import environment
from diffquant.bench.options import DEFAULT_LENGTHS, DEFAULT_MODELS, SECTIONS, BenchOptions
from diffquant.bench.sections import PARTS
from diffquant.errors import FailedCellsError, MissingDependencyError
from diffquant.support.code import code_digest
from diffquant.support.files import write_atomically, write_json
from diffquant.support.journal import Journal
from diffquant.support.outputs import RunFiles
from diffquant.support.progress import Progress, silent

_PACKAGES = ("onnx", "onnxruntime", "onnxruntime-genai", "lm_eval", "llama_cpp_python", "bitsandbytes", "torchao")


def run_files() -> RunFiles:
    """The files of a bench."""
    from diffquant.bench.plots import plot_names

    plots = (f"{name}.png" for section in SECTIONS for name in plot_names(section))
    return RunFiles("bench.json", frozenset({"settings", "cells"}), ("bench.md", "bench.csv", "report.html", *plots))


def run_bench(options: BenchOptions, folder: Path, progress: Progress = silent) -> BenchResult:
    """Run all sections, one after the other, and write bench.json; what fails is a cell that says so.

    Cells are kept as they come. An interrupted run goes on from there when the same is asked for again; one that came
    to its end is measured anew.

    Raises:
        OutputExistsError: the folder holds files of a bench's names that no bench wrote.
        KeyboardInterrupt: the run was interrupted; the message says how to go on.
    """
    run_files().check(folder)
    settings = _settings(options)
    about = environment(*_PACKAGES)
    code = code_digest((__name__,))
    # The settings have names alone, which folders of different models share.
    models = [str(path.resolve()) for path in options.checkpoints]
    key = {"settings": settings, "models": models, "peers": options.peers, "code": code, "device": about["device"]}
    journal = Journal(folder, key)
    started = time.monotonic()
    try:
        machine = _kept(journal, "roofline", lambda: roofline.measure_roofline(options.device, [options.chosen_dtype]))
        cells, failed = _measure_sections(options, journal, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted: what was measured is kept in {journal.path}; run the same command again to go on"
        ) from None
    settings |= {"seconds": round(time.monotonic() - started, 1), "failed_sections": failed}
    result = BenchResult(about, machine, settings, tuple(cells))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", result.to_dict())
    journal.discard()
    return result


def _measure_sections(options: BenchOptions, journal: Journal, progress: Progress) -> tuple[list[BenchCell], list[str]]:
    """Cells of all sections, those that are kept included, and the names of the sections that failed."""
    cells: list[BenchCell] = []
    failed: list[str] = []
    for section in options.sections:
        try:
            parts = PARTS[section](options)
            for number, (name, measure) in enumerate(parts.items()):
                told = _share_of(progress, number, len(parts))
                kept = _kept(journal, f"{section}: {name}", lambda: [asdict(cell) for cell in measure(told)])  # noqa: B023
                cells += map(cell_of, kept)
        except Exception as error:  # whatever it is, it must not take the other sections' results along
            cells.append(BenchCell(section, "the whole section", "diffquant", missing=failure(error)))
            failed.append(section)
    return cells, failed


def _kept(journal: Journal, name: str, measure: Callable[[], Any]) -> Any:
    """The result of a name in the journal, measured and written there if it is not yet."""
    if journal.get(name) is None:
        journal.add(name, measure())
    return journal.get(name)


def _share_of(progress: Progress, number: int, parts: int) -> Progress:
    """Progress of a section while one of its parts runs."""

    def tell(done: float, total: float, what: str) -> None:
        progress(number + (done / total if total else 0.0), parts, what)

    return tell


def _settings(options: BenchOptions) -> dict[str, Any]:
    return {
        "sections": list(options.sections),
        "device": options.device,
        "dtype": options.chosen_dtype,
        "models": list(options.models or DEFAULT_MODELS[options.device]),
        "lengths": list(options.lengths or DEFAULT_LENGTHS[options.device]),
        "batches": list(options.batches),
        "repeats": options.repeats,
        "threads": torch.get_num_threads(),
        "checkpoints": [path.name for path in options.checkpoints],
        "graph": options.graph,
        "workers": list(options.workers),
    }


def require_complete(result: BenchResult) -> None:
    """Check that every section could be measured.

    Raises:
        FailedCellsError: a section failed; the message names each that did, and why.
    """
    failed = result.settings["failed_sections"]
    reasons = [f"{cell.section}: {cell.missing}" for cell in result.cells if cell.section in failed and cell.missing]
    if failed:
        raise FailedCellsError(f"{len(failed)} sections failed:\n" + "\n".join(reasons), result)


def write_bench_outputs(result: BenchResult, folder: Path) -> list[Path]:
    """Write bench.md, bench.csv, report.html and the plots beside bench.json; returns all their paths."""
    from diffquant.bench.plots import plots
    from diffquant.bench.report import bench_report, csv_table, markdown
    from diffquant.report.page import page

    texts = {
        "bench.md": markdown(result),
        "bench.csv": csv_table(result),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text)
    drawn = [plot.save(folder) for plot in plots(result)]
    report = folder / "report.html"
    files = ["bench.json", *texts, *(picture.name for picture in drawn)]
    write_atomically(report, page(bench_report(result, folder.absolute().name, files)))
    return [*(folder / name for name in ("bench.json", *texts)), report, *drawn]


def demo_checkpoints() -> tuple[Path, ...]:
    """Path of SmolLM2's weights; none where the package that carries them is not installed."""
    from diffquant.demo.smollm2 import gguf_file

    try:
        return (gguf_file(),)
    except MissingDependencyError:
        return ()
