"""The commands on exported models: export, verify, run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import app
from diffquant.cli.options import (
    AsJson,
    Destination,
    Exported,
    Logits,
    Model,
    Overwrite,
    RuntimeDevice,
    Seed,
    Threads,
    to_json,
)
from diffquant.support.progress import progress_for


@app.command()
def export(
    model: Model,
    output: Destination,
    weights: Annotated[str, typer.Option(help="Weights of a plain checkpoint: 4:g32, 6:row, 8, 16.")] = "16",
    kv: Annotated[int, typer.Option("--kv", help="Bits of the KV cache: 16, 8, or 4 (experimental).")] = 16,
    scales: Annotated[
        Path | None, typer.Option(help="Of the KV cache, from diffquant calibrate; found by a short run otherwise.")
    ] = None,
    logits: Logits = "16",
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    embed: Annotated[int, typer.Option(help="Bits of embedding and head: 16 or 8.")] = 16,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="A model without a KV cache.")] = False,
    opset: Annotated[int, typer.Option(help="Of the standard domain.")] = 23,
    pure_onnx: Annotated[bool, typer.Option("--pure-onnx", help="Standard ONNX ops alone.")] = False,
    accuracy_level: Annotated[
        int,
        typer.Option(help="Products with codes: 4 rounds activations to int8, 1 keeps float32 and is slow."),
    ] = 4,
    web: Annotated[
        bool, typer.Option("--web", help="Also give what attention maps are drawn of, as examples/web does.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint, plain or quantized, as an ONNX model for ONNX Runtime."""
    from diffquant.export import require

    require()
    from diffquant.calib.calibration.kv_cache import calibrate_cache
    from diffquant.export.options import ExportOptions
    from diffquant.export.targets.onnx import ONNX
    from diffquant.recipe import Recipe
    from diffquant.source.ranges import Ranges

    options = ExportOptions.parse(
        weights,
        logits,
        kv_bits=kv,
        dtype=dtype,
        embed_bits=embed,
        cache=not no_cache,
        opset=opset,
        pure=pure_onnx,
        accuracy_level=accuracy_level,
        web=web,
    )
    progress = progress_for("export")
    source = ONNX.check(model, output, options, overwrite)
    ranges: Ranges | Path | None = scales
    if kv < 16 and scales is None:
        ranges = calibrate_cache(source, Recipe(weights=options.weights, logits=options.logits), progress=progress)
    report = ONNX.write(source, output, options, ranges, overwrite, progress)
    typer.echo(to_json(report) if as_json else report.summary())


@app.command()
def verify(
    folder: Exported,
    model: Model,
    tolerance: Annotated[float | None, typer.Option(help="Relative RMS error of logits; by measured rounding.")] = None,
    threads: Threads = 0,
    device: RuntimeDevice = "cpu",
    as_json: AsJson = False,
) -> None:
    """Prove that an exported folder computes what its checkpoint does; exit 4 where it does not."""
    from diffquant.export import require

    require()
    from diffquant.errors import ToleranceError
    from diffquant.export.verification.verify import verify as run

    try:
        verification = run(folder, model, tolerance, threads, device)
    except ToleranceError as missed:
        if as_json:
            typer.echo(to_json(missed.report))
        raise
    typer.echo(to_json(verification) if as_json else str(verification))


@app.command()
def run(
    folder: Exported,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Seed = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    threads: Threads = 0,
    device: RuntimeDevice = "cpu",
) -> None:
    """Continue a prompt in ONNX Runtime; speed and memory go to stderr."""
    from diffquant.export import require

    require()
    from diffquant.export.runtime.device import on_cpu_text
    from diffquant.export.runtime.generation import Generator

    generator = Generator(folder, threads, device=device)
    if fallbacks := generator.model.fallbacks:
        typer.echo(on_cpu_text(fallbacks), err=True)
    text = sys.stdin.read() if prompt == "-" else prompt
    for piece in generator.stream(text, max_new_tokens, temperature, seed, chat):
        typer.echo(piece, nl=False)
    typer.echo()
    typer.echo(str(generator.speed), err=True)
