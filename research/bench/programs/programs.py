"""Sections that run whole programs: generating, quantizing, exporting and scoring, as cells."""

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffquant.benchmarks.cells import BenchCell
from diffquant.errors import DiffQuantError
from diffquant.onnx.native import library_path
from diffquant.support.progress import Progress, report_nothing
from research.bench.programs import contestants, generate, hellaswag, quantize
from research.bench.programs.comparison import compare_with_export
from tests.support.synthetic import sized_diffllama, synthesize

_BODY, _KERNEL = "function body", "native kernel"
_SLOW = ("transformers", "onnxruntime-genai")
_SHORT = "left out of the full report for its time; `python -m research.bench generate` runs it"


def generation(
    models: Sequence[Path], threads: int, repeats: int, peers: bool, progress: Progress = report_nothing
) -> list[BenchCell]:
    """Cells of decode and prefill of every contestant.

    Args:
        peers: whether peers whose folders take minutes to make are among them.
    """
    cells = []
    names = [name for name in contestants.CONTESTANTS if peers or not name.startswith(_SLOW)]
    for done, model in enumerate(models):
        progress(done, len(models), f"generate: {model.name}")
        with tempfile.TemporaryDirectory() as place:
            settings = generate.Settings(threads, repeats, batches=())
            rows = generate.measure_generation(model, Path(place), names, settings)
        compare_with_export(rows, contestants.FLOAT)
        left_out = [name for name in contestants.CONTESTANTS if name not in names]
        rows |= {name: {"missing": _SHORT} for name in left_out}
        cells += [cell for name, row in rows.items() for cell in _of_generation(model.name, name, row)]
    return cells


def _of_generation(model: str, name: str, row: dict[str, Any]) -> list[BenchCell]:
    facts = {what: row[what] for what in ("folder_bytes", "folder_of_export", "peak_of_export") if row.get(what)}
    return [
        BenchCell(
            "generate",
            f"{model}, {what} of {length} tokens",
            name,
            unit="tokens/s",
            values=tuple(row.get(what, ())),
            baseline=contestants.TORCH,
            missing=row.get("missing"),
            peak_bytes=row.get("peak_bytes"),
            facts=facts,
        )
        for what, length in (("decode", generate.Settings.new), ("prefill", generate.Settings.prefill))
    ]


def quantizing(gigabytes: float, weights: str, progress: Progress = report_nothing) -> list[BenchCell]:
    """Cell of quantizing a random checkpoint whole, then killed in the middle and resumed."""
    progress(0, 1, f"quantize: {gigabytes} GB")
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        synthesize(source, sized_diffllama(gigabytes))
        numbers = quantize.measure_quantizing(source, Path(place), weights)
    facts = {
        "GB a second": numbers["gigabytes_per_second"],
        "resumed output identical": float(numbers["byte_identical"]),
    }
    return [
        BenchCell(
            "quantize",
            f"{numbers['source_bytes'] / 1e9:.2f} GB to {weights}",
            "diffquant quantize",
            unit="s",
            values=(numbers["whole"]["seconds"],),
            peak_bytes=numbers["whole"]["peak_anonymous"],
            facts=facts,
        )
    ]


def exporting(gigabytes: float, progress: Progress = report_nothing) -> list[BenchCell]:
    """Cells of exporting a random checkpoint in float32 and in low bits; memory is without mapped files."""
    names = [contestants.FLOAT, *[name for name in contestants.CONTESTANTS if name.startswith("export 4")]]
    progress(0, 1, f"export: {gigabytes} GB")
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        synthesize(source, sized_diffllama(gigabytes))
        rows = contestants.write_all(source, Path(place), names)
    return [
        BenchCell(
            "export",
            f"a DiffLlama of {gigabytes} GB",
            name.replace("export", "diffquant export"),
            unit="s",
            values=(row["write_seconds"],),
            peak_bytes=row["write_anonymous_bytes"],
            facts={"folder_bytes": float(row["folder_bytes"])},
        )
        for name, row in rows.items()
    ]


def native_kernel(repeats: int, threads: int, progress: Progress = report_nothing) -> list[BenchCell]:
    """Cells of the op's native kernel beside its function body in ONNX Runtime."""
    from research.bench.programs import native_op

    shape = "v1 8/8"
    cells = []
    for work in native_op.WORKLOADS:
        progress(0, 1, f"export: native kernel, {work.tokens} of {work.context} tokens")
        cache = f"cache of {work.kv_bits} bits" if work.kv_bits else "cache as it is"
        name = f"op {shape}, {work.tokens} of {work.context}, {cache}, {work.dtype}"
        library = library_path()
        if library is None:
            cells.append(BenchCell("export", name, _KERNEL, missing="not built: python -m diffquant.onnx.native"))
            continue
        times = native_op.compare_kernel(shape, work, library, threads, repeats)
        for path, measured in ((_BODY, "body"), (_KERNEL, "native")):
            cells.append(BenchCell("export", name, path, values=tuple(times[measured]), baseline=_BODY))
    return cells


def scoring(models: Sequence[Path], items: int, repeats: int, progress: Progress = report_nothing) -> list[BenchCell]:
    """Cells of HellaSwag items a second, beside lm-eval's HFLM."""
    cells = []
    for done, model in enumerate(models):
        progress(done, len(models), f"sweep: {model.name}")
        workload = f"{model.name}, {items} HellaSwag items"
        if find_spec("lm_eval") is None:
            cells.append(BenchCell("sweep", workload, "HFLM", unit="items/s", missing="lm-eval is not installed"))
            continue
        try:
            timings = hellaswag.measure_scorers(model, items, repeats)["timings"]
        except DiffQuantError as error:
            cells.append(BenchCell("sweep", workload, "HFLM", unit="items/s", missing=str(error)))
            continue
        for timing in timings:
            batch = f", batch {timing['batch_size']}" if timing["batch_size"] else ""
            values = tuple(items / seconds for seconds in timing["seconds"])
            kind = timing["dtype"]
            cells.append(
                BenchCell(
                    "sweep",
                    f"{workload}, {kind}",
                    f"{timing['name']}{batch}",
                    unit="items/s",
                    values=values,
                    baseline=f"HFLM, batch {min(t['batch_size'] for t in timings if t['batch_size'])}",
                )
            )
    return cells
