"""outliers, calibrate, search."""

from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import app
from diffquant.cli.options import AsJson, EvalDtype, Model, listed, widths
from diffquant.progress import progress_for

Text = Annotated[Path | None, typer.Option("--text", help="UTF-8 text to read; some prose ships.")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of the text that are read, at most.")]


@app.command()
def outliers(
    models: Annotated[list[Path], typer.Argument(help="Checkpoints, a Transformer beside its DIFF for instance.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for outliers.json and its plot.")
    ] = None,
    text: Text = None,
    tokens: Tokens = 400_000,
    window: Annotated[int, typer.Option(help="Tokens the model sees at once.")] = 1024,
    dtype: EvalDtype = "auto",
    device: str = "cpu",
    as_json: AsJson = False,
) -> None:
    """Largest magnitudes and medians of attention logits and hidden states, layer by layer."""
    from diffquant.calib.outlier_outputs import text_table, write_outputs
    from diffquant.calib.outliers import OutlierOptions, find_outliers

    found = find_outliers(models, OutlierOptions(text, tokens, window, dtype, device), progress_for("outliers"))
    typer.echo(found.to_json().rstrip() if as_json else text_table(found))
    if output is not None:
        typer.echo(f"wrote {', '.join(map(str, write_outputs(found, output)))}", err=as_json)


@app.command()
def search(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the recipe, measurements and plot.")],
    budget: Annotated[str, typer.Option(help="Average bits of each target, such as 4.5, or bytes of weights: 90MB.")],
    target: Annotated[str, typer.Option(help="weights, k, v, logits; several with commas.")] = "weights",
    bits: Annotated[str, typer.Option(help="Widths to choose among.")] = "8,6,4",
    granularity: Annotated[str, typer.Option(help="What shares one scale of a weight: g32, g128, row.")] = "g32",
    text: Text = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of the text's first half to measure on.")] = 8,
    window: Annotated[int, typer.Option(help="Tokens of each.")] = 256,
    dtype: EvalDtype = "float32",
    device: str = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how long it would take and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the widths that cost least under a budget, and write them as a recipe."""
    from diffquant.calib.allocation import Budget
    from diffquant.calib.search import Search, SearchOptions
    from diffquant.calib.search_outputs import summary, write_outputs

    options = SearchOptions(
        listed(target), widths(bits), granularity, text, windows, window, dtype=dtype, device=device
    )
    run = Search(model, Budget.parse(budget), options, output)
    if dry_run:
        typer.echo(run.estimate())
        return
    found = run.run(progress_for("search"))
    written = write_outputs(found, output)
    typer.echo(found.to_json().rstrip() if as_json else summary(found))
    typer.echo(f"wrote {', '.join(map(str, written))}", err=as_json)
