"""The sections of the bench: the parts that each is measured in, by its options."""

import os
from collections.abc import Callable
from functools import partial

from diffquant.bench.cells import BenchCell
from diffquant.bench.contest import linears, throughput
from diffquant.bench.contest.contest import Contest
from diffquant.bench.contest.workloads import Model, model_named
from diffquant.bench.options import DEFAULT_MODELS, BenchOptions
from diffquant.bench.programs import programs, serving
from diffquant.bench.programs.batches import BatchSettings
from diffquant.bench.programs.cell_speeds import cell_speeds
from diffquant.bench.programs.sharing import share_sweep
from diffquant.errors import MissingDependencyError
from diffquant.export import require
from diffquant.support.progress import Progress

_DECODE_FACTOR = 4
_KIND_ITEMS = 10


# Measures some cells at one go, which are kept when a later part of their section is interrupted.
Part = Callable[[Progress], list[BenchCell]]
# The parts of a section by name.
SectionParts = Callable[[BenchOptions], dict[str, Part]]


def _contest(section: str, factor: int) -> SectionParts:
    def parts(options: BenchOptions) -> dict[str, Part]:
        contest_of = Contest(section, options.device, options.repeats, options.peers_of(section), options.graph)
        return {work.name: partial(contest_of.run, [work]) for work in options.workloads(factor)}

    return parts


def _linear(options: BenchOptions) -> dict[str, Part]:
    def measure(model: Model, progress: Progress) -> list[BenchCell]:
        dtype, device, repeats = options.chosen_dtype, options.device, options.repeats
        return linears.run_linears([model], (1, 16), dtype, device, repeats, graph=options.graph, progress=progress)

    names = options.models or DEFAULT_MODELS[options.device]
    return {name: partial(measure, model_named(name)) for name in names}


def _throughput(options: BenchOptions) -> dict[str, Part]:
    if options.device == "cuda":
        model, lengths = model_named("3B"), (2048, 4096)
    else:
        model, lengths = throughput.smaller(model_named("830M"), 2, 8192), (512, 1024)

    def measure(progress: Progress) -> list[BenchCell]:
        repeats = min(options.repeats, 3)
        return throughput.run_throughput([model], lengths, 1, options.chosen_dtype, options.device, repeats, progress)

    return {model.name: measure}


def _generate(options: BenchOptions) -> dict[str, Part]:
    alone = options.sections == ("generate",)

    def measure(progress: Progress) -> list[BenchCell]:
        threads, repeats = os.cpu_count() or 1, min(options.repeats, 3)
        return programs.generation(options.checkpoints, threads, repeats, alone, progress)

    return _with_checkpoint("generate", options, measure)


def _serve(options: BenchOptions) -> dict[str, Part]:
    settings = BatchSettings(options.chosen_dtype, os.cpu_count() or 1, repeats=min(options.repeats, 3))
    return {"batches": lambda progress: serving.serving(settings, progress)}


def _export(options: BenchOptions) -> dict[str, Part]:
    try:
        require()
    except MissingDependencyError as error:
        absent = BenchCell("export", "ONNX", "diffquant export", missing=str(error))
        return {"ONNX": lambda _: [absent]}
    threads = os.cpu_count() or 1
    return {
        "ONNX": lambda progress: programs.exporting(0.3, progress),
        "native kernel": lambda progress: programs.native_kernel(options.repeats, threads, progress),
    }


def _sweep(options: BenchOptions) -> dict[str, Part]:
    scoring = _with_checkpoint(
        "sweep", options, lambda progress: programs.scoring(options.checkpoints[:1], 20, 1, progress)
    )
    if not options.checkpoints:
        return scoring
    model, turns = options.checkpoints[0], min(options.repeats, 3)
    scoring["kinds of cells"] = lambda progress: cell_speeds(
        model, (options.chosen_dtype,), _KIND_ITEMS, turns, progress
    )
    if options.workers:
        scoring["workers"] = lambda progress: share_sweep(model, options.workers, turns, progress=progress)
    return scoring


def _with_checkpoint(section: str, options: BenchOptions, measure: Part) -> dict[str, Part]:
    absent = BenchCell(section, "no checkpoint", "diffquant", missing="needs a checkpoint: give --checkpoint")
    return {"checkpoints": measure if options.checkpoints else lambda _: [absent]}


PARTS: dict[str, SectionParts] = {
    "attention": _contest("attention", 1),
    "decode": _contest("decode", _DECODE_FACTOR),
    "linear": _linear,
    "throughput": _throughput,
    "generate": _generate,
    "serve": _serve,
    "quantize": lambda _: {"4:g32": lambda progress: programs.quantizing(0.5, "4:g32", progress)},
    "export": _export,
    "sweep": _sweep,
}
