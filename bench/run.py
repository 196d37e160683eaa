"""Runs of the bench: its options, its sections, and the files that it writes."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffquant.benchmarks import contest, linears
from diffquant.benchmarks.cells import BenchCell, BenchResult, parse_cell
from diffquant.benchmarks.contest import PeerComparison, format_error
from diffquant.benchmarks.measuring import describe_environment
from diffquant.benchmarks.workloads import Model, Workload, find_model
from diffquant.errors import FailedCellsError, UsageError
from diffquant.support.devices import resolve_device
from diffquant.support.files import write_json
from diffquant.support.names import option_name
from diffquant.support.outputs import Journal, RunFiles
from diffquant.support.progress import Progress, report_nothing

_DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
DEFAULT_LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192, 16384)}
DEFAULT_MODELS = {"cpu": ("830M", "smollm2-135m-diff-v2"), "cuda": ("3B", "smollm2-135m-diff-v2")}


@dataclass(frozen=True)
class BenchOptions:
    """Options of a run of the bench.

    Attributes:
        sections: names of the sections to run.
        device: "cpu" or "cuda"; "auto" becomes one of them.
        models: names in `workloads.MODELS`; `DEFAULT_MODELS` by default.
        lengths: context lengths in tokens for attention; contexts for decoding are four times as long.
        batches: batch sizes.
        dtype: name of the torch dtype; by default float32 on the CPU and bfloat16 on CUDA.
        repeats: number of timed repeats of each path.
        peers: names of the peers of attention and decoding to run; all by default.
        graph: whether to time replays of CUDA graphs.
    """

    sections: tuple[str, ...]
    device: str = "auto"
    models: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    dtype: str = ""
    repeats: int = 5
    peers: tuple[str, ...] = ()
    graph: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", resolve_device(self.device))
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"the bench runs on cpu or cuda, not on {self.device!r}")
        if self.graph and self.device != "cuda":
            raise UsageError(f"{option_name('graph')}: only CUDA devices have graphs; leave it out")
        if self.repeats < 1 or min(self.batches, default=0) < 1:
            raise UsageError(f"{option_name('repeats')} and {option_name('batches')} take counts of at least 1")
        self.workloads(1)
        for section in contest.SECTIONS.keys() & set(self.sections):
            PeerComparison(section, self.device, self.repeats, self.peers_of(section))

    @property
    def chosen_dtype(self) -> str:
        """Name of the torch dtype to measure."""
        return self.dtype or _DEFAULT_DTYPES[self.device]

    def workloads(self, context_factor: int) -> list[Workload]:
        """Return a workload for every model, batch size and length of the options.

        Args:
            context_factor: 1 for prefill of `lengths` tokens; otherwise for decoding one token with contexts of
                `context_factor` times `lengths` tokens.

        Raises:
            UsageError: a model or the dtype is unknown.
        """
        made = [
            Workload(
                find_model(name),
                length if context_factor == 1 else 1,
                context_factor * length,
                batch,
                self.chosen_dtype,
            )
            for name in self.models or DEFAULT_MODELS[self.device]
            for batch in self.batches
            for length in self.lengths or DEFAULT_LENGTHS[self.device]
        ]
        made[0].torch_dtype  # noqa: B018  # refuses an unknown dtype
        return made

    def peers_of(self, section: str) -> tuple[str, ...]:
        """Return the names in `peers` that a section should run.

        If several sections that have peers run, names of other sections' peers are left out. Unknown names are kept, so
        that `PeerComparison` raises an error about them.
        """
        if len(contest.SECTIONS.keys() & set(self.sections)) == 1:
            return self.peers
        known = {name for peers in contest.SECTIONS.values() for name in peers}
        return tuple(name for name in self.peers if name in contest.SECTIONS[section] or name not in known)


_DECODE_FACTOR = 4

# Measures some cells, which are stored before the next part of their section runs.
Part = Callable[[Progress], list[BenchCell]]
# Returns the parts of a section by name.
SectionParts = Callable[[BenchOptions], dict[str, Part]]


def _contest(section: str, factor: int) -> SectionParts:
    def parts(options: BenchOptions) -> dict[str, Part]:
        contest_of = PeerComparison(section, options.device, options.repeats, options.peers_of(section), options.graph)
        return {work.name: partial(contest_of.run, [work]) for work in options.workloads(factor)}

    return parts


def _linear(options: BenchOptions) -> dict[str, Part]:
    def measure(model: Model, progress: Progress) -> list[BenchCell]:
        dtype, device, repeats = options.chosen_dtype, options.device, options.repeats
        return linears.run_linears([model], (1, 16), dtype, device, repeats, graph=options.graph, progress=progress)

    names = options.models or DEFAULT_MODELS[options.device]
    return {name: partial(measure, find_model(name)) for name in names}


PARTS: dict[str, SectionParts] = {
    "attention": _contest("attention", 1),
    "decode": _contest("decode", _DECODE_FACTOR),
    "linear": _linear,
}


_PACKAGES = ("onnx", "onnxruntime", "onnxruntime-genai", "lm_eval", "llama_cpp_python", "bitsandbytes", "torchao")


def list_run_files(sections: Collection[str]) -> RunFiles:
    """Return the files that a bench of these sections writes."""
    from diffquant.benchmarks.plots import plot_names

    plots = (f"{name}.png" for section in sections for name in plot_names(section))
    return RunFiles("bench.json", frozenset({"settings", "cells"}), ("bench.md", "bench.csv", "report.html", *plots))


def run_bench(
    options: BenchOptions,
    sections: Mapping[str, SectionParts],
    folder: Path,
    progress: Progress = report_nothing,
    settings: Mapping[str, Any] | None = None,
) -> BenchResult:
    """Run the sections in the options, and write bench.json; a failed section has one cell with the reason.

    Finished parts are stored in a journal: an interrupted run with the same options and versions resumes from it. A
    complete run deletes the journal.

    Args:
        options: options of the run.
        sections: all known sections by name.
        folder: folder of the journal and of bench.json.
        progress: called with the work done, the total, and the current part.
        settings: further settings to store, for sections that have settings beyond the options.

    Raises:
        UsageError: the options have an unknown section.
        OutputExistsError: a file that the bench would replace was not written by a bench.
        KeyboardInterrupt: the run was interrupted; the message says how to resume it.
    """
    unknown = [name for name in options.sections if name not in sections]
    if unknown:
        raise UsageError(f"unknown section {', '.join(map(repr, unknown))}; choose from {', '.join(sections)}")
    list_run_files(sections).check(folder)
    stored = _settings(options) | dict(settings or {})
    about = describe_environment(*_PACKAGES)
    key = {"settings": stored, "peers": options.peers, "commit": about["commit"]}
    key |= {name: about[name] for name in ("device", "versions")}
    journal = Journal(folder, key)
    started = time.monotonic()
    try:
        cells, failed = _measure_sections(options, sections, journal, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted: what was measured is kept in {journal.path}; run the same command again to resume"
        ) from None
    stored |= {"seconds": round(time.monotonic() - started, 1), "failed_sections": failed}
    result = BenchResult(about, stored, tuple(cells))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", result.to_dict())
    journal.discard()
    return result


def _measure_sections(
    options: BenchOptions, sections: Mapping[str, SectionParts], journal: Journal, progress: Progress
) -> tuple[list[BenchCell], list[str]]:
    """Return the cells of all sections, stored or measured now, and the names of the sections that failed."""
    cells: list[BenchCell] = []
    failed: list[str] = []
    for section in options.sections:
        try:
            parts = sections[section](options)
            for number, (name, measure) in enumerate(parts.items()):
                key = f"{section}: {name}"
                if journal.get(key) is None:
                    measured = measure(_share_of(progress, number, len(parts)))
                    journal.add(key, [asdict(cell) for cell in measured])
                cells += map(parse_cell, journal.get(key))
        except Exception as error:  # no error may lose the other sections' results
            cells.append(BenchCell(section, "the whole section", "diffquant", missing=format_error(error)))
            failed.append(section)
    return cells, failed


def _share_of(progress: Progress, number: int, parts: int) -> Progress:
    """Return a progress function for one part of a section, which reports the section's progress."""

    def on_progress(done: float, total: float, what: str) -> None:
        progress(number + (done / total if total else 0.0), parts, what)

    return on_progress


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
        "graph": options.graph,
    }


def require_complete(result: BenchResult) -> None:
    """Check that no section failed.

    Raises:
        FailedCellsError: some sections failed; the message names each with its reason.
    """
    failed = result.settings["failed_sections"]
    reasons = [f"{cell.section}: {cell.missing}" for cell in result.cells if cell.section in failed and cell.missing]
    if failed:
        raise FailedCellsError(f"{len(failed)} sections failed:\n" + "\n".join(reasons), result)


def write_bench_outputs(result: BenchResult, folder: Path) -> list[Path]:
    """Write bench.md, bench.csv, report.html and the plots into the folder of bench.json; return all their paths."""
    from diffquant.benchmarks.plots import plots
    from diffquant.benchmarks.report import bench_report, csv_table, markdown
    from diffquant.reports.page import write_run

    texts = {"bench.md": markdown(result), "bench.csv": csv_table(result)}
    pictures = {f"{name}.png": partial(figure.savefig, dpi=160) for name, (_, figure, _) in plots(result).items()}
    written = write_run(folder, texts, pictures, "report.html", partial(bench_report, result), ["bench.json"])
    return [folder / "bench.json", *written]
