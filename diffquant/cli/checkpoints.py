"""quantize, convert, inspect, generate."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diffquant.cli.app import app
from diffquant.cli.options import (
    AsJson,
    Attention,
    Destination,
    K,
    Kv,
    Logits,
    Model,
    Override,
    Overwrite,
    RecipeFile,
    RecipeOptions,
    Residual,
    Scales,
    V,
    Weights,
    to_json,
)
from diffquant.errors import UsageError
from diffquant.scheme import Recipe
from diffquant.support.progress import progress_for

if TYPE_CHECKING:
    from diffquant.model.modeling import DiffTransformer
    from diffquant.quantization.rounding import Rounding
    from diffquant.source.source import Source


@app.command()
def quantize(
    source: Model,
    output: Destination,
    weights: Weights = "16",
    kv: Kv = "16",
    k: K = None,
    v: V = None,
    logits: Logits = "16",
    residual: Residual = 0,
    override: Override = None,
    recipe: RecipeFile = None,
    rounding: Annotated[
        Literal["nearest", "mse", "gptq"],
        typer.Option(
            help="nearest: absmax; mse: scales of the least squared error; gptq: and compensated over a text."
        ),
    ] = "nearest",
    text: Annotated[Path | None, typer.Option("--text", help="Text for gptq; some prose ships.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Of the text that gptq reads; 16384 by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a checkpoint into compressed-tensors' format, streaming."""
    from diffquant.formats.atomic_folder import check_output
    from diffquant.quantization.plan import make_plan
    from diffquant.quantization.quantize import quantize as run
    from diffquant.source.source import open_source

    wanted = RecipeOptions(weights, kv, k, v, logits, residual, override, recipe).required()
    if (text, tokens) != (None, None) and rounding != "gptq":
        raise UsageError("--text and --tokens say what --rounding gptq reads; give them with it alone")
    opened = open_source(source)
    if dry_run or rounding == "gptq":
        # What is wrong with the plan or the output is said before gptq runs the model.
        plan = make_plan(opened, wanted)
        if dry_run:
            typer.echo(plan.table())
            return
        check_output(source, output, overwrite)
    rule = _rounding(rounding, opened, text, tokens)
    report = run(opened, output, wanted, rounding=rule, overwrite=overwrite, progress=progress_for("quantize"))
    typer.echo(to_json(report) if as_json else report.summary())


@app.command()
def convert(
    source: Model,
    output: Destination,
    to: Annotated[
        Literal["diffllama", "diff-v2"], typer.Option(help="diffllama from unilm's V1, diff-v2 from llama; both exact.")
    ],
    overwrite: Overwrite = False,
) -> None:
    """Rewrite a checkpoint in another format, computing the same function."""
    from diffquant.conversion import convert as run

    typer.echo(run(source, output, to, overwrite=overwrite, progress=progress_for("convert")).summary())


@app.command()
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Say what a checkpoint is: family member, pairs, λ of each layer, size at each width."""
    from diffquant.inspection import inspect_checkpoint

    found = inspect_checkpoint(model)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.")],
    weights: Weights = "16",
    kv: Kv = "16",
    k: K = None,
    v: V = None,
    logits: Logits = "16",
    residual: Residual = 0,
    override: Override = None,
    recipe: RecipeFile = None,
    scales: Scales = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: int = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the checkpoint's chat template.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's by default.")
    ] = None,
    attention: Attention = "auto",
    device: str = "cpu",
) -> None:
    """Continue a prompt, token by token."""
    import transformers

    from diffquant.attention import check_backend
    from diffquant.generation import stream

    check_backend(attention)
    transformers.set_seed(seed)
    wanted = RecipeOptions(weights, kv, k, v, logits, residual, override, recipe).given()
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded, tokenizer = _load(model, wanted, dtype, device, scales)
    loaded.use_attention(attention)
    for piece in stream(loaded, tokenizer, text, max_new_tokens, temperature, chat):
        typer.echo(piece, nl=False)
    typer.echo()


def _rounding(name: str, source: "Source", text: Path | None, tokens: int | None) -> "Rounding":
    from diffquant.quantization.rounding import CLIPPED, NEAREST

    if name == "gptq":
        from diffquant.calib.gptq import TOKENS, gptq

        return gptq(source, text, tokens or TOKENS, progress=progress_for("reading"))
    return CLIPPED if name == "mse" else NEAREST


def _load(
    path: Path, recipe: Recipe | None, dtype: str | None, device: str, scales: Path | None
) -> "tuple[DiffTransformer, Any]":
    from diffquant.loading import load
    from diffquant.source.ranges import check_taken
    from diffquant.source.source import open_source
    from diffquant.support.devices import resolve

    torch_dtype = resolve(dtype, device) if dtype else None
    source = open_source(path)
    tokenizer = source.tokenizer
    model = load(source, recipe, torch_dtype, device, scales=scales)
    check_taken(scales, [model.recipe])
    return model, tokenizer
