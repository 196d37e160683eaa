"""Runs of the bench: its options, its sections one after the other, and the files they leave."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffquant.bench.cells import BenchCell, BenchResult, cell_of
from diffquant.bench.contest import contest, linears, roofline, throughput
from diffquant.bench.contest.contest import Contest
from diffquant.bench.contest.peers import failure
from diffquant.bench.contest.workloads import Model, Workload, model_named
from diffquant.bench.environment import environment
from diffquant.bench.programs import programs, serving
from diffquant.bench.programs.batches import BatchSettings
from diffquant.bench.programs.cell_speeds import cell_speeds
from diffquant.bench.programs.sharing import share_sweep
from diffquant.errors import FailedCellsError, MissingDependencyError, UsageError
from diffquant.export import require
from diffquant.support.code import code_digest
from diffquant.support.devices import resolve_device
from diffquant.support.files import write_atomically, write_json
from diffquant.support.journal import Journal
from diffquant.support.outputs import RunFiles
from diffquant.support.progress import Progress, silent
from diffquant.support.spelling import spelled

SECTIONS = ("attention", "decode", "linear", "throughput", "generate", "serve", "quantize", "export", "sweep")
_DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
_DEFAULT_LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192, 16384)}
_DEFAULT_MODELS = {"cpu": ("830M", "smollm2-135m-diff-v2"), "cuda": ("3B", "smollm2-135m-diff-v2")}
_PACKAGES = ("onnx", "onnxruntime", "onnxruntime-genai", "lm_eval", "llama_cpp_python", "bitsandbytes", "torchao")
_DECODE_FACTOR = 4
_KIND_ITEMS = 10


@dataclass(frozen=True)
class Part:
    """Cells that are measured at one go, and kept when a later part is interrupted.

    Attributes:
        name: name within its section.
        measure: function that measures them.
    """

    name: str
    measure: Callable[[Progress], list[BenchCell]]


SectionParts = Callable[["BenchOptions"], list[Part]]


@dataclass(frozen=True)
class BenchOptions:
    """Options of a run of the bench: what is measured, and where.

    Attributes:
        sections: names in `SECTIONS`; all by default.
        device: "cpu" or "cuda"; "auto" becomes one of them.
        models: names in the registry of shapes; some by default.
        lengths, batches: sizes of attention's calls; decode's contexts are four times as long.
        dtype: name of the torch dtype; the device's own by default.
        repeats: turns of each path.
        peers: names of attention's and decode's peers; all by default.
        checkpoints: folders or .gguf files for the sections that run whole programs.
        graph: whether CUDA graphs are replayed.
        workers: numbers of workers that share a sweep on the first checkpoint, each beside the first; none by default.
    """

    sections: tuple[str, ...] = SECTIONS
    device: str = "auto"
    models: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    dtype: str = ""
    repeats: int = 5
    peers: tuple[str, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    graph: bool = False
    workers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.sections if name not in SECTIONS]
        if unknown:
            raise UsageError(f"unknown section {', '.join(map(repr, unknown))}; known are {', '.join(SECTIONS)}")
        object.__setattr__(self, "device", resolve_device(self.device))
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"the bench runs on cpu or cuda, not on {self.device!r}")
        if self.graph and self.device != "cuda":
            raise UsageError(f"{spelled('graph')}: only CUDA devices have graphs")
        if self.repeats < 1 or min(self.batches, default=0) < 1 or min(self.workers, default=1) < 1:
            raise UsageError(
                f"{spelled('repeats')}, {spelled('batches')} and {spelled('workers')} take counts of at least 1"
            )
        missing = [str(path) for path in self.checkpoints if not path.exists()]
        if missing:
            raise UsageError(f"no such checkpoint: {', '.join(missing)}")
        self.workloads(1)
        for section in contest.SECTIONS.keys() & set(self.sections):
            Contest(section, self.device, self.repeats, self.peers_of(section))

    @property
    def chosen_dtype(self) -> str:
        """Name of the dtype that is measured."""
        return self.dtype or _DEFAULT_DTYPES[self.device]

    def workloads(self, factor: int) -> list[Workload]:
        """Prompts where `factor` is 1; else single tokens at the end of contexts `factor` times as long."""
        made = [
            Workload(model_named(name), length if factor == 1 else 1, factor * length, batch, self.chosen_dtype)
            for name in self.models or _DEFAULT_MODELS[self.device]
            for batch in self.batches
            for length in self.lengths or _DEFAULT_LENGTHS[self.device]
        ]
        made[0].torch_dtype  # noqa: B018  # refuses an unknown dtype
        return made

    def peers_of(self, section: str) -> tuple[str, ...]:
        """Named peers that a section runs: those it knows where several sections run, all where it runs alone."""
        if len(contest.SECTIONS.keys() & set(self.sections)) == 1:
            return self.peers
        known = {name for peers in contest.SECTIONS.values() for name in peers}
        return tuple(name for name in self.peers if name in contest.SECTIONS[section] or name not in known)


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
    journal = Journal(folder, {"settings": settings, "peers": options.peers, "code": code, "device": about["device"]})
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
            parts = _PARTS[section](options)
            for number, part in enumerate(parts):
                told = _share_of(progress, number, len(parts))
                kept = _kept(journal, f"{section}: {part.name}", lambda: [asdict(c) for c in part.measure(told)])  # noqa: B023
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
        "models": list(options.models or _DEFAULT_MODELS[options.device]),
        "lengths": list(options.lengths or _DEFAULT_LENGTHS[options.device]),
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


def _contest(section: str, factor: int) -> SectionParts:
    def parts(options: BenchOptions) -> list[Part]:
        contest_of = Contest(section, options.device, options.repeats, options.peers_of(section), options.graph)
        return [Part(work.name, partial(contest_of.run, [work])) for work in options.workloads(factor)]

    return parts


def _linear(options: BenchOptions) -> list[Part]:
    def measure(model: Model, progress: Progress) -> list[BenchCell]:
        dtype, device, repeats = options.chosen_dtype, options.device, options.repeats
        return linears.run_linears([model], (1, 16), dtype, device, repeats, graph=options.graph, progress=progress)

    names = options.models or _DEFAULT_MODELS[options.device]
    return [Part(name, partial(measure, model_named(name))) for name in names]


def _throughput(options: BenchOptions) -> list[Part]:
    if options.device == "cuda":
        model, lengths = model_named("3B"), (2048, 4096)
    else:
        model, lengths = throughput.smaller(model_named("830M"), 2, 8192), (512, 1024)

    def measure(progress: Progress) -> list[BenchCell]:
        repeats = min(options.repeats, 3)
        return throughput.run_throughput([model], lengths, 1, options.chosen_dtype, options.device, repeats, progress)

    return [Part(model.name, measure)]


def _generate(options: BenchOptions) -> list[Part]:
    alone = options.sections == ("generate",)

    def measure(progress: Progress) -> list[BenchCell]:
        threads, repeats = os.cpu_count() or 1, min(options.repeats, 3)
        return programs.generation(options.checkpoints, threads, repeats, alone, progress)

    return _with_checkpoint("generate", options, measure)


def _serve(options: BenchOptions) -> list[Part]:
    settings = BatchSettings(options.chosen_dtype, os.cpu_count() or 1, repeats=min(options.repeats, 3))
    return [Part("batches", lambda progress: serving.serving(settings, progress))]


def _export(options: BenchOptions) -> list[Part]:
    try:
        require()
    except MissingDependencyError as error:
        absent = BenchCell("export", "ONNX", "diffquant export", missing=str(error))
        return [Part("ONNX", lambda _: [absent])]
    threads = os.cpu_count() or 1
    return [
        Part("ONNX", lambda progress: programs.exporting(0.3, progress)),
        Part("native kernel", lambda progress: programs.native_kernel(options.repeats, threads, progress)),
    ]


def _sweep(options: BenchOptions) -> list[Part]:
    scoring = _with_checkpoint(
        "sweep", options, lambda progress: programs.scoring(options.checkpoints[:1], 20, 1, progress)
    )
    if not options.checkpoints:
        return scoring
    model, turns = options.checkpoints[0], min(options.repeats, 3)
    kinds = Part(
        "kinds of cells",
        lambda progress: cell_speeds(model, (options.chosen_dtype,), _KIND_ITEMS, turns, progress),
    )
    if not options.workers:
        return [*scoring, kinds]
    sharing = Part("workers", lambda progress: share_sweep(model, options.workers, turns, progress=progress))
    return [*scoring, kinds, sharing]


def _with_checkpoint(section: str, options: BenchOptions, measure: Callable[[Progress], list[BenchCell]]) -> list[Part]:
    absent = BenchCell(section, "no checkpoint", "diffquant", missing="needs a checkpoint: give --checkpoint")
    return [Part("checkpoints", measure if options.checkpoints else lambda _: [absent])]


_PARTS: dict[str, SectionParts] = {
    "attention": _contest("attention", 1),
    "decode": _contest("decode", _DECODE_FACTOR),
    "linear": _linear,
    "throughput": _throughput,
    "generate": _generate,
    "serve": _serve,
    "quantize": lambda _: [Part("4:g32", lambda progress: programs.quantizing(0.5, "4:g32", progress))],
    "export": _export,
    "sweep": _sweep,
}


def demo_checkpoints() -> tuple[Path, ...]:
    """Path of SmolLM2's weights; none where the package that carries them is not installed."""
    from diffquant.demo.smollm2 import gguf_file

    try:
        return (gguf_file(),)
    except MissingDependencyError:
        return ()
