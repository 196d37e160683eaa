"""The commands that measure: sweep, eval, and compare, which reads what was measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffquant.cli.app import verb
from diffquant.cli.expanded import TaskOptions, expanded
from diffquant.cli.options import (
    AsJson,
    Attention,
    Device,
    DeviceMap,
    EvalDtype,
    Model,
    Models,
    OffloadFolder,
    RecipeOptions,
    Revision,
    Scales,
    Tasks,
    at_revision,
    chosen_device,
    widths,
)
from diffquant.errors import UsageError
from diffquant.support.comma_lists import split_list
from diffquant.support.progress import progress_for

if TYPE_CHECKING:
    from diffquant.sweep.grid import SweepOptions
    from diffquant.sweep.result import SweepResult


@dataclass(frozen=True)
class RunOptions:
    """The options that say how models run, and how results are shown."""

    dtype: EvalDtype = "auto"
    attention: Attention = "auto"
    device: Device = "auto"
    device_map: DeviceMap = None
    offload_folder: OffloadFolder = None
    as_json: AsJson = False


@dataclass(frozen=True)
class EngineOptions:
    """The options that say which processes measure a sweep's cells."""

    workers: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=1,
            help="Number of processes, here or on the Ray cluster, which share the cores.",
        ),
    ] = None
    devices: Annotated[
        str, typer.Option(metavar="LIST", help="Devices such as cuda:0,cuda:1, in place of --device; a process each.")
    ] = ""
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster that measures; auto finds the one that runs here."),
    ] = None
    worker: Annotated[
        bool,
        typer.Option(
            "--worker", help="Measure what no other --worker has claimed, and leave; the last one writes the tables."
        ),
    ] = False


@verb("sweep transformer diff -o sweep --target logits --bits 16,8,6,4")
@expanded
def sweep(
    models: Models,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for cells, table, plot and report.")
    ],
    *,
    task: Tasks = "hellaswag",
    bits: Annotated[str, typer.Option(metavar="LIST", help="Bit widths, 2 to 8; 16 is always measured.")] = "16,8,6,4",
    target: Annotated[
        str, typer.Option(metavar="LIST", help="What to quantize, each alone: logits, qk, weights, kv, k, v.")
    ] = "logits",
    granularity: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="What shares one scale, such as row,tensor,row:shift; each applies to the targets that have it.",
        ),
    ] = "",
    recipe: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="YAML file of a recipe to measure as well. May be repeated."),
    ] = None,
    scales: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Ranges that diffquant calibrate wrote, for static. May be repeated."),
    ] = None,
    task_options: TaskOptions,
    run: RunOptions,
    processes: EngineOptions,
) -> None:
    """Measure what each bit width costs, in a table and a page.

    Exported folders may be among the models. Results that the folder holds already are not measured again, and any
    number of sweeps may write into one folder at a time.
    """
    from diffquant.sweep.grid import SweepOptions

    options = SweepOptions(
        tasks=split_list(task),
        bits=widths(bits),
        targets=split_list(target),
        granularities=split_list(granularity),
        recipes=tuple(recipe or ()),
        scales=tuple(scales or ()),
        task_options=task_options.values,
        dtype=run.dtype,
        attention=run.attention,
        device=run.device,
        device_map=run.device_map,
        offload_folder=run.offload_folder,
    )
    from diffquant.export.targets import runtime_of

    chosen_device(run.device)
    if processes.worker:
        _work_along(models, options, output, processes, run.as_json)
        return
    from diffquant.sweep.engines.choice import chosen_engine
    from diffquant.sweep.outputs import write_outputs
    from diffquant.sweep.run import run_sweep

    options, engine = chosen_engine(options, processes.workers, split_list(processes.devices), processes.ray, _note)
    result = run_sweep(models, options, output, progress_for("sweep"), runtime_of, engine)
    _show(result, write_outputs(result, output), run.as_json)


def _work_along(
    models: list[Path], options: "SweepOptions", output: Path, processes: EngineOptions, as_json: bool
) -> None:
    """Measure what no other process has claimed."""
    from diffquant.export.targets import runtime_of
    from diffquant.sweep.run import join_sweep

    if processes.workers is not None or processes.devices or processes.ray:
        raise UsageError("--worker is one process: leave out --workers, --devices and --ray, and start more of it")
    result = join_sweep(models, options, output, progress_for("sweep"), runtime_of)
    if result is None:
        _note("nothing is left to claim; whoever finishes last writes the tables")
        return
    _show(result, [output / "sweep.json"], as_json)


def _show(result: "SweepResult", written: list[Path], as_json: bool) -> None:
    """Print a sweep's table.

    Raises:
        FailedCellsError: cells failed.
    """
    from diffquant.sweep.table import text_table

    typer.echo(result.to_json() if as_json else text_table(result))
    typer.echo(f"wrote {', '.join(map(str, written))}", err=as_json)
    result.require_complete()


def _note(text: str) -> None:
    typer.echo(text, err=True)


@verb("eval model-4bit --task perplexity", name="eval")
@expanded
def eval_(
    model: Model,
    *,
    task: Tasks = "hellaswag",
    recipe_options: RecipeOptions,
    scales: Scales = None,
    task_options: TaskOptions,
    run: RunOptions,
    revision: Revision = None,
) -> None:
    """Measure one configuration of one model.

    A quantized checkpoint runs under its own recipe by default, and an exported folder as it is.
    """
    from diffquant.sweep.grid import SweepOptions

    options = SweepOptions(
        tasks=split_list(task),
        scales=() if scales is None else (scales,),
        task_options=task_options.values,
        dtype=run.dtype,
        attention=run.attention,
        device=run.device,
        device_map=run.device_map,
        offload_folder=run.offload_folder,
    )
    from diffquant.export.targets import runtime_of
    from diffquant.sweep.evaluate import evaluate, results_text

    chosen_device(run.device)
    results = evaluate(at_revision(model, revision), recipe_options.given(), options, progress_for("eval"), runtime_of)
    as_dicts = {name: result.to_dict() for name, result in results.items()}
    typer.echo(json.dumps(as_dicts) if run.as_json else results_text(results))


_SOURCE = (
    "A sweep's folder; FOLDER@WORDS for its configuration of that model, target or scheme; or a samples_*.jsonl of "
    "lm-eval."
)


@verb("compare sweep@16 sweep@6:tensor")
def compare(
    before: Annotated[str, typer.Argument(metavar="A", help=_SOURCE)],
    after: Annotated[str, typer.Argument(metavar="B", help="The same, for what is compared with A.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Compare two results on the same items, item by item.

    Shows the paired difference with its 95 % interval, McNemar's exact test, and which items flipped.
    """
    from diffquant.sweep.compare import compare as compare_sources

    report = compare_sources(before, after)
    typer.echo(json.dumps(report.to_dict()) if as_json else report.summary())


_SIDE = (
    "checkpoint folder, .gguf file, exported folder, llama.cpp's --kl-divergence-base file, or URL of a server that "
    "tells prompt log-probabilities, as vLLM's does"
)


@verb("fidelity model model-4bit")
def fidelity(
    reference: Annotated[str, typer.Argument(metavar="A", help=f"The reference: a {_SIDE}.")],
    candidate: Annotated[str | None, typer.Argument(metavar="B", help="The same, for what is compared with A.")] = None,
    *,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to read; the prose that ships by default.")
    ] = None,
    characters: Annotated[
        int,
        typer.Option(metavar="NUMBER", min=0, help="Number of characters to read, from the text's end; 0 reads all."),
    ] = 65536,
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=4, help="Number of tokens of a chunk; 512 by default.")
    ] = None,
    top_k: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Number of the likeliest tokens to ask a server for.")
    ] = 20,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the numbers and a table for the model card."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="The text's dataset on the hub, for an entry in .eval_results."),
    ] = None,
    save_base: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write A's log-probabilities to this file of llama.cpp's, in place of B."),
    ] = None,
    dtype: EvalDtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure how far a model's predictions are from another's.

    Shows the mean, median, 99 %, 99.9 % and largest KL divergence, and how often both have the same likeliest token,
    with 95 % intervals.
    """
    from diffquant.verbs.fidelity import fidelity as measure

    chosen_device(device)
    result = measure(
        reference,
        candidate,
        text=text,
        characters=characters,
        context=context,
        top_k=top_k,
        output=output,
        dataset=dataset,
        save_base=save_base,
        dtype=dtype,
        device=device,
    )
    if result is not None:
        typer.echo(result.to_json() if as_json else result.summary())
    if written := save_base or output:
        typer.echo(f"wrote {written}", err=as_json)
