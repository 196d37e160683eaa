"""outliers, calibrate, search."""

from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import app
from diffquant.cli.options import AsJson, EvalDtype
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
