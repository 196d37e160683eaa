"""The commands that measure: sweep, eval."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import app
from diffquant.cli.expanded import TaskOptions, expanded
from diffquant.cli.options import AsJson, Attention, EvalDtype, Model, RecipeOptions, Scales, Tasks, widths
from diffquant.support.comma_lists import split_list
from diffquant.support.progress import progress_for


@dataclass(frozen=True)
class RunOptions:
    """The options that say how models run, and how results are shown."""

    dtype: EvalDtype = "auto"
    attention: Attention = "auto"
    device: str = "cpu"
    as_json: AsJson = False


@app.command()
@expanded
def sweep(
    models: Annotated[
        list[Path], typer.Argument(help="Checkpoints, a Transformer beside its DIFF for instance; exported folders.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for cells, table, plot and report.")],
    *,
    task: Tasks = "hellaswag",
    bits: Annotated[str, typer.Option(help="Widths, 2 to 8; 16 is always measured.")] = "16,8,6,4",
    target: Annotated[str, typer.Option(help="What to quantize, each alone: logits, weights, kv, k, v.")] = "logits",
    granularity: Annotated[
        str,
        typer.Option(help="What shares one scale, such as row,tensor,row:shift; each serves the targets that know it."),
    ] = "",
    recipe: Annotated[
        list[Path] | None, typer.Option(help="A recipe's YAML file to measure beside the grid; may be repeated.")
    ] = None,
    scales: Annotated[
        list[Path] | None, typer.Option(help="A model's file from diffquant calibrate, for static; may be repeated.")
    ] = None,
    task_options: TaskOptions,
    run: RunOptions,
) -> None:
    """Measure what each bit width costs. Cells that are there already are not measured again."""
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
    )
    from diffquant.export.targets import runtime_of
    from diffquant.sweep.outputs import write_outputs
    from diffquant.sweep.run import run_sweep
    from diffquant.sweep.table import text_table

    result = run_sweep(models, options, output, progress_for("sweep"), runtime_of)
    written = write_outputs(result, output)
    typer.echo(result.to_json() if run.as_json else text_table(result))
    typer.echo(f"wrote {', '.join(map(str, written))}", err=run.as_json)
    result.require_complete()


@app.command("eval")
@expanded
def eval_(
    model: Model,
    *,
    task: Tasks = "hellaswag",
    recipe_options: RecipeOptions,
    scales: Scales = None,
    task_options: TaskOptions,
    run: RunOptions,
) -> None:
    """Measure one configuration; a quantized checkpoint's own recipe by default."""
    from diffquant.sweep.grid import SweepOptions

    options = SweepOptions(
        tasks=split_list(task),
        scales=() if scales is None else (scales,),
        task_options=task_options.values,
        dtype=run.dtype,
        attention=run.attention,
        device=run.device,
    )
    from diffquant.export.targets import runtime_of
    from diffquant.sweep.evaluate import evaluate, results_text

    results = evaluate(model, recipe_options.given(), options, progress_for("eval"), runtime_of)
    as_dicts = {name: result.to_dict() for name, result in results.items()}
    typer.echo(json.dumps(as_dicts) if run.as_json else results_text(results))
