"""The sections of the bench: the parts that each is measured in, by its options."""

import os
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Part:
    """Cells that are measured at one go, and kept when a later part is interrupted.

    Attributes:
        name: name within its section.
        measure: function that measures them.
    """

    name: str
    measure: Callable[[Progress], list[BenchCell]]


SectionParts = Callable[[BenchOptions], list[Part]]


def _contest(section: str, factor: int) -> SectionParts:
    def parts(options: BenchOptions) -> list[Part]:
        contest_of = Contest(section, options.device, options.repeats, options.peers_of(section), options.graph)
        return [Part(work.name, partial(contest_of.run, [work])) for work in options.workloads(factor)]

    return parts


def _linear(options: BenchOptions) -> list[Part]:
    def measure(model: Model, progress: Progress) -> list[BenchCell]:
        dtype, device, repeats = options.chosen_dtype, options.device, options.repeats
        return linears.run_linears([model], (1, 16), dtype, device, repeats, graph=options.graph, progress=progress)

    names = options.models or DEFAULT_MODELS[options.device]
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


PARTS: dict[str, SectionParts] = {
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
