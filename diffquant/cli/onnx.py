"""The commands on exported models: export, verify, run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import verb
from diffquant.cli.hub import check_push, push_folder
from diffquant.cli.options import (
    AsJson,
    Chat,
    Destination,
    Device,
    Exported,
    Logits,
    Model,
    NewTokens,
    Overwrite,
    Prompt,
    Push,
    Revision,
    Seed,
    Temperature,
    Threads,
    at_revision,
    cache_bits,
    echo_pieces,
    note_if_transformer,
    to_json,
)
from diffquant.support.progress import progress_for


@verb("export model -o model-onnx --weights 4:g32 --kv 8")
def export(
    model: Model,
    output: Destination,
    weights: Annotated[
        str,
        typer.Option(metavar="SCHEME", help="Scheme of a plain checkpoint's weights: 4:g32, 6:row, 8 or 16."),
    ] = "16",
    kv: Annotated[
        str,
        typer.Option(
            "--kv", metavar="SCHEME", help="Scheme of the KV cache: 16, 8:static, or 4:static (experimental)."
        ),
    ] = "16",
    scales: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Ranges of the KV cache that diffquant calibrate wrote; a short run finds them otherwise.",
        ),
    ] = None,
    logits: Logits = "16",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32 or float16.")] = "float32",
    embed: Annotated[int, typer.Option(metavar="BITS", help="Bits of embedding and head: 16 or 8.")] = 16,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Make a model without a KV cache.")] = False,
    opset: Annotated[int, typer.Option(metavar="NUMBER", help="Opset of the standard ONNX operators.")] = 23,
    pure_onnx: Annotated[bool, typer.Option("--pure-onnx", help="Use standard ONNX operators alone.")] = False,
    accuracy_level: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", help="Precision of products with codes: 4 rounds activations to int8, 1 keeps float32."
        ),
    ] = 4,
    genai_device: Annotated[
        str, typer.Option(metavar="NAME", help="Device that onnxruntime-genai will use: cpu, cuda or cuda:N.")
    ] = "cpu",
    web: Annotated[
        bool, typer.Option("--web", help="Add the outputs that examples/web draws attention maps from.")
    ] = False,
    revision: Revision = None,
    push: Push = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a model for ONNX Runtime."""
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
        kv_bits=cache_bits(kv),
        dtype=dtype,
        embed_bits=embed,
        cache=not no_cache,
        opset=opset,
        pure=pure_onnx,
        accuracy_level=accuracy_level,
        genai_device=genai_device,
        web=web,
    )
    check_push(push)
    progress = progress_for("export")
    source = ONNX.check(at_revision(model, revision), output, options, overwrite)
    note_if_transformer(source)
    ranges: Ranges | Path | None = scales
    if options.kv_bits < 16 and scales is None:
        ranges = calibrate_cache(source, Recipe(weights=options.weights, logits=options.logits), progress=progress)
    report = ONNX.write(source, output, options, ranges, overwrite, progress)
    typer.echo(to_json(report) if as_json else report.summary())
    push_folder(output, push, as_json)


@verb("verify model-onnx model")
def verify(
    folder: Exported,
    model: Model,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Largest relative RMS error of logits; by default what rounding explains."),
    ] = None,
    threads: Threads = 0,
    device: Device = "auto",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Prove that an export computes what its checkpoint does.

    The exit code is 4 where it does not.
    """
    from diffquant.export import require

    require()
    from diffquant.errors import ToleranceError
    from diffquant.export.verification.verify import verify as run

    try:
        verification = run(folder, at_revision(model, revision), tolerance, threads, device, progress_for("verify"))
    except ToleranceError as missed:
        if as_json:
            typer.echo(to_json(missed.report))
        raise
    typer.echo(to_json(verification) if as_json else str(verification))


@verb("run model-onnx --prompt 'Once upon a time'")
def run(
    folder: Exported,
    prompt: Prompt,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    chat: Chat = False,
    threads: Threads = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt in ONNX Runtime.

    Speed and memory go to stderr.
    """
    from diffquant.export import require

    require()
    from diffquant.export.runtime.device import on_cpu_text
    from diffquant.export.runtime.generation import Generator

    generator = Generator(folder, threads, device=device)
    if device == "auto" and generator.model.device.kind != "cpu":
        typer.echo(f"runs on {generator.model.device.name}", err=True)
    if fallbacks := generator.model.fallbacks:
        typer.echo(on_cpu_text(fallbacks), err=True)
    text = sys.stdin.read() if prompt == "-" else prompt
    echo_pieces(text, generator.stream(text, max_new_tokens, temperature, seed, chat), as_json)
    typer.echo(str(generator.speed), err=True)
