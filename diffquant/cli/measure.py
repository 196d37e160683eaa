"""sweep, eval."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffquant.cli.app import app
from diffquant.cli.options import (
    AsJson,
    Attention,
    Characters,
    EvalDtype,
    Fine,
    Items,
    K,
    Kv,
    Lengths,
    Limit,
    Logits,
    Model,
    Override,
    RecipeFile,
    RecipeOptions,
    Residual,
    Scales,
    Stride,
    Tasks,
    Test,
    TextFile,
    Train,
    V,
    Weights,
    Window,
    lengths_of,
    listed,
    widths,
)
from diffquant.support.progress import progress_for

if TYPE_CHECKING:
    from diffquant.sweep.exported import Runtime


@app.command()
def sweep(
    models: Annotated[
        list[Path], typer.Argument(help="Checkpoints, a Transformer beside its DIFF for instance; exported folders.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for cells, table, plot and report.")],
    task: Tasks = "hellaswag",
    bits: Annotated[str, typer.Option(help="Widths, 2 to 8; 16 is always measured.")] = "16,8,6,4",
    target: Annotated[str, typer.Option(help="What to quantize, each alone: logits, weights, kv, k, v.")] = "logits",
    granularity: Annotated[
        str, typer.Option(help="Such as row,tensor,row:shift; each serves the targets that know it.")
    ] = "",
    recipe: Annotated[
        list[Path] | None, typer.Option(help="A recipe's YAML file to measure beside the grid; may be repeated.")
    ] = None,
    scales: Annotated[
        list[Path] | None, typer.Option(help="A model's file from diffquant calibrate, for static; may be repeated.")
    ] = None,
    limit: Limit = None,
    items: Items = None,
    text: TextFile = None,
    characters: Characters = 65536,
    window: Window = 1024,
    stride: Stride = 512,
    lengths: Lengths = "256",
    train: Train = None,
    test: Test = None,
    fine: Fine = False,
    dtype: EvalDtype = "auto",
    attention: Attention = "auto",
    device: str = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure what each bit width costs. Cells that are there already are not measured again."""
    from diffquant.sweep.grid import SweepOptions

    options = SweepOptions(
        tasks=listed(task),
        bits=widths(bits),
        targets=listed(target),
        granularities=listed(granularity),
        recipes=tuple(recipe or ()),
        scales=tuple(scales or ()),
        limit=limit,
        items=items,
        text=text,
        characters=characters or None,
        window=window,
        stride=stride,
        lengths=lengths_of(lengths),
        train=train,
        test=test,
        fine=fine,
        dtype=dtype,
        attention=attention,
        device=device,
    )
    from diffquant.sweep.outputs import write_outputs
    from diffquant.sweep.run import run_sweep
    from diffquant.sweep.table import text_table

    result = run_sweep(models, options, output, progress_for("sweep"), _runtime(models))
    written = write_outputs(result, output)
    typer.echo(result.to_json() if as_json else text_table(result))
    typer.echo(f"wrote {', '.join(map(str, written))}", err=as_json)
    result.require_complete()


@app.command("eval")
def eval_(
    model: Model,
    task: Tasks = "hellaswag",
    weights: Weights = "16",
    kv: Kv = "16",
    k: K = None,
    v: V = None,
    logits: Logits = "16",
    residual: Residual = 0,
    override: Override = None,
    recipe: RecipeFile = None,
    scales: Scales = None,
    limit: Limit = None,
    items: Items = None,
    text: TextFile = None,
    characters: Characters = 65536,
    window: Window = 1024,
    stride: Stride = 512,
    lengths: Lengths = "256",
    train: Train = None,
    test: Test = None,
    fine: Fine = False,
    dtype: EvalDtype = "auto",
    attention: Attention = "auto",
    device: str = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure one configuration; a quantized checkpoint's own recipe by default."""
    from diffquant.sweep.grid import SweepOptions

    wanted = RecipeOptions(weights, kv, k, v, logits, residual, override, recipe).given()
    options = SweepOptions(
        tasks=listed(task),
        scales=() if scales is None else (scales,),
        limit=limit,
        items=items,
        text=text,
        characters=characters or None,
        window=window,
        stride=stride,
        lengths=lengths_of(lengths),
        train=train,
        test=test,
        fine=fine,
        dtype=dtype,
        attention=attention,
        device=device,
    )
    from diffquant.sweep.evaluate import evaluate, summary
    from diffquant.sweep.exported import is_exported

    if is_exported(model):
        from diffquant.export import require

        require()
        from diffquant.export.runtime.scoring import evaluate_exported

        results = evaluate_exported(model, wanted, options, progress_for("eval"))
    else:
        results = evaluate(model, wanted, options, progress_for("eval"))
    typer.echo(json.dumps(results) if as_json else summary(results))


def _runtime(models: list[Path]) -> "Runtime | None":
    """What runs the exported folders among the models, where there are any."""
    from diffquant.sweep.exported import is_exported

    if not any(map(is_exported, models)):
        return None
    from diffquant.export import require

    require()
    from diffquant.export.runtime.scoring import OnnxRuntime

    return OnnxRuntime()
