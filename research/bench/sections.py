"""Sections of the bench that run whole programs: what each is measured in, for some checkpoints."""

import os
from collections.abc import Sequence
from pathlib import Path

from diffquant.benchmarks.cells import BenchCell
from diffquant.benchmarks.run import BenchOptions, Part, SectionParts
from diffquant.errors import MissingDependencyError, UsageError
from diffquant.onnx import check_installed
from diffquant.support.progress import Progress
from research.bench.programs import programs, serving
from research.bench.programs.batches import BatchSettings
from research.bench.programs.cell_speeds import cell_speeds
from research.bench.programs.sharing import share_sweep
from research.bench.throughput import THROUGHPUT, throughput_parts

_KIND_ITEMS = 10


def program_sections(checkpoints: Sequence[Path], workers: Sequence[int] = ()) -> dict[str, SectionParts]:
    """Sections by name.

    Args:
        checkpoints: folders or .gguf files for `generate` and `sweep`.
        workers: numbers of workers that share a sweep on the first checkpoint, each compared with the first number.

    Raises:
        UsageError: a checkpoint does not exist, or a number of workers is not positive.
    """
    missing = [str(path) for path in checkpoints if not path.exists()]
    if missing:
        raise UsageError(f"no such checkpoint: {', '.join(missing)}")
    if min(workers, default=1) < 1:
        raise UsageError("workers takes counts of at least 1")
    return {
        THROUGHPUT: throughput_parts,
        "generate": lambda options: _generate(options, checkpoints),
        "serve": _serve,
        "quantize": lambda _: {"4:g32": lambda progress: programs.quantizing(0.5, "4:g32", progress)},
        "export": _export,
        "sweep": lambda options: _sweep(options, checkpoints, workers),
    }


def _generate(options: BenchOptions, checkpoints: Sequence[Path]) -> dict[str, Part]:
    alone = options.sections == ("generate",)

    def measure(progress: Progress) -> list[BenchCell]:
        threads, repeats = os.cpu_count() or 1, min(options.repeats, 3)
        return programs.generation(checkpoints, threads, repeats, alone, progress)

    return _with_checkpoint("generate", checkpoints, measure)


def _serve(options: BenchOptions) -> dict[str, Part]:
    settings = BatchSettings(options.chosen_dtype, os.cpu_count() or 1, repeats=min(options.repeats, 3))
    return {"batches": lambda progress: serving.serving(settings, progress)}


def _export(options: BenchOptions) -> dict[str, Part]:
    try:
        check_installed()
    except MissingDependencyError as error:
        absent = BenchCell("export", "ONNX", "diffquant export", missing=str(error))
        return {"ONNX": lambda _: [absent]}
    threads = os.cpu_count() or 1
    return {
        "ONNX": lambda progress: programs.exporting(0.3, progress),
        "native kernel": lambda progress: programs.native_kernel(options.repeats, threads, progress),
    }


def _sweep(options: BenchOptions, checkpoints: Sequence[Path], workers: Sequence[int]) -> dict[str, Part]:
    scoring = _with_checkpoint(
        "sweep", checkpoints, lambda progress: programs.scoring(checkpoints[:1], 20, 1, progress)
    )
    if not checkpoints:
        return scoring
    model, turns = checkpoints[0], min(options.repeats, 3)
    kinds = {
        _of("kinds of cells", [model]): lambda progress: cell_speeds(
            model, (options.chosen_dtype,), _KIND_ITEMS, turns, progress
        )
    }
    shared: dict[str, Part] = {
        _of("workers", [model]): lambda progress: share_sweep(model, workers, turns, progress=progress)
    }
    return scoring | kinds | (shared if workers else {})


def _with_checkpoint(section: str, checkpoints: Sequence[Path], measure: Part) -> dict[str, Part]:
    absent = BenchCell(section, "no checkpoint", "diffquant", missing="needs a checkpoint: give --checkpoint")
    return {_of("checkpoints", checkpoints): measure if checkpoints else lambda _: [absent]}


def _of(name: str, checkpoints: Sequence[Path]) -> str:
    """Name of a part, with the paths of its models: settings have their names alone, which different models share."""
    return ", ".join([name, *(str(path.resolve()) for path in checkpoints)])
