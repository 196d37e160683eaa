"""The commands on checkpoints: quantize, convert, inspect, generate."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    Seed,
    V,
    Weights,
    to_json,
)
from diffquant.recipe import Recipe, RoundingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from diffquant.model.causal import CausalModel
    from diffquant.source.source import Source
    from diffquant.source.weight_source import WeightSource


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
        str | None,
        typer.Option(
            help="nearest, the default: absmax; mse: scales of the least squared error; gptq: and compensated over a "
            "text."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="Text for gptq; some prose ships.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Of the text that gptq reads; 16384 by default.")] = None,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="Choose weights by name, whatever the architecture; so it is done too where model_type is unknown.",
        ),
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", help="PATTERN of tensors to leave as they are, beside those of the rules."),
    ] = None,
    weight_rules: Annotated[
        Path | None, typer.Option(help="YAML with linears, experts or keep, in place of the rules that ship.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(
            help="Of the matrices that are not packed; the source's by default, bfloat16 where that is float32."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a checkpoint into compressed-tensors' format, streaming."""
    from diffquant.quantization.plan import plan_quantization
    from diffquant.quantization.quantize import quantize as run
    from diffquant.support.devices import as_dtype

    wanted = RecipeOptions(weights, kv, k, v, logits, residual, override, recipe).required()
    wanted = replace(wanted, rounding=_rounding(wanted.rounding, rounding, text, tokens))
    opened = _opened(source, weights_only, tuple(keep or ()), weight_rules)
    if dry_run:
        typer.echo(plan_quantization(opened, wanted, as_dtype(dtype)).table())
        return
    report = run(opened, output, wanted, dtype=dtype, overwrite=overwrite)
    typer.echo(to_json(report) if as_json else report.summary())


@app.command()
def convert(
    source: Model,
    output: Destination,
    to: Annotated[
        Literal["diffllama", "diff-v2", "llama"],
        typer.Option(help="diffllama from unilm's V1, diff-v2 from llama, llama from DEX; all exact."),
    ],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of the matrices; the source's by default, of a GGUF file with codes bfloat16."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Rewrite a checkpoint in another format, computing the same function."""
    from diffquant.conversion import convert as run

    report = run(source, output, to, dtype=dtype, overwrite=overwrite)
    typer.echo(report.summary())


@app.command()
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Say what a checkpoint is: family member, pairs, λ of each layer, size at each width."""
    from diffquant.errors import UnknownModelTypeError
    from diffquant.inspection import Inspection, WeightInspection, inspect_checkpoint, inspect_weights

    inspection: Inspection | WeightInspection
    try:
        inspection = inspect_checkpoint(model)
    except UnknownModelTypeError:
        inspection = inspect_weights(model)
    typer.echo(json.dumps(inspection.to_dict(), indent=2) if as_json else str(inspection))


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
    seed: Seed = 0,
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


def _opened(path: Path, weights_only: bool, keep: tuple[str, ...], rules_file: Path | None) -> "Source | WeightSource":
    """The checkpoint as a model that is known, or as weights by name where that is asked for or all there is."""
    from diffquant.errors import UnknownModelTypeError
    from diffquant.source.source import open_source
    from diffquant.source.weight_rules import WeightRules
    from diffquant.source.weight_source import open_weights

    if not (weights_only or keep or rules_file):
        try:
            return open_source(path)
        except UnknownModelTypeError as error:
            typer.echo(f"note: {error}; its weights are chosen by name", err=True)
    return open_weights(path, WeightRules.read(rules_file, keep))


def _rounding(settings: RoundingSettings, name: str | None, text: Path | None, tokens: int | None) -> RoundingSettings:
    """A recipe's rounding with what the command line says of it; another rule than the recipe's starts afresh."""
    if name is not None and name != settings.name:
        settings = RoundingSettings(name)
    return replace(settings, text=text or settings.text, tokens=tokens or settings.tokens)


def _load(
    path: Path, recipe: Recipe | None, dtype: str | None, device: str, scales: Path | None
) -> "tuple[CausalModel, PreTrainedTokenizerBase]":
    from diffquant.loading import load
    from diffquant.source.ranges import check_ranges_used
    from diffquant.source.source import open_source
    from diffquant.support.devices import check_device, resolve_dtype

    check_device(device)
    torch_dtype = resolve_dtype(dtype, device) if dtype else None
    source = open_source(path)
    tokenizer = source.tokenizer
    model = load(source, recipe, torch_dtype, device, scales=scales)
    check_ranges_used(scales, [model.recipe])
    return model, tokenizer
