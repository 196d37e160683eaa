"""The commands on checkpoints: quantize, convert, inspect, generate."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from diffquant.cli.app import verb
from diffquant.cli.hub import check_push, push_folder
from diffquant.cli.options import (
    AsJson,
    Attention,
    Chat,
    Destination,
    Device,
    DeviceMap,
    K,
    Kv,
    Logits,
    Model,
    NewTokens,
    OffloadFolder,
    Override,
    Overwrite,
    Preset,
    Prompt,
    Push,
    RecipeFile,
    RecipeOptions,
    Residual,
    Revision,
    Scales,
    Seed,
    Temperature,
    V,
    Weights,
    at_revision,
    chosen_device,
    echo_pieces,
    note_if_transformer,
    to_json,
)
from diffquant.recipe import Recipe, RoundingSettings
from diffquant.source.places import Places

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from diffquant.model.causal import CausalModel
    from diffquant.source.source import Source
    from diffquant.source.weight_source import WeightSource


@verb("quantize model -o model-4bit --preset int4")
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
    preset: Preset = None,
    rounding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="nearest, the default, takes each scale from the largest magnitude; mse searches the scale of the "
            "least squared error; gptq also compensates errors over a text; tuned goes on from there by "
            "gradients, for the least loss, and takes several times as long.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Text for gptq and tuned; by default the prose that ships."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=2,
            help="Number of tokens of the text to read; 16384 by default.",
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="Choose weights by their names, whatever the architecture; automatic where the model_type is unknown.",
        ),
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="PATTERN",
            help="Do not quantize tensors with such names, nor those that the rules keep. May be repeated.",
        ),
    ] = None,
    weight_rules: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file of rules (linears, experts, keep), in place of diffquant's own."),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(
            metavar="NAME",
            help="bfloat16, float16 or float32 for matrices that are not packed; by default the source's, or bfloat16 "
            "where that is float32.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop.")] = False,
    revision: Revision = None,
    push: Push = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a checkpoint's weights, KV cache and logits.

    Tensors stream through memory, so a checkpoint may be larger than the memory. The folder has
    compressed-tensors' format.
    """
    from diffquant.quantization.plan import plan_quantization
    from diffquant.quantization.quantize import quantize as run
    from diffquant.support.devices import as_dtype

    wanted = RecipeOptions(weights, kv, k, v, logits, residual, override, recipe, preset).required()
    wanted = replace(wanted, rounding=_rounding(wanted.rounding, rounding, text, tokens))
    check_push(push)
    opened = _opened(at_revision(source, revision), weights_only, tuple(keep or ()), weight_rules)
    note_if_transformer(opened)
    if dry_run:
        typer.echo(plan_quantization(opened, wanted, as_dtype(dtype)).table())
        return
    report = run(opened, output, wanted, dtype=dtype, overwrite=overwrite)
    typer.echo(to_json(report) if as_json else report.summary())
    push_folder(output, push, as_json)


@verb("convert model -o model-diff-v2 --to diff-v2")
def convert(
    source: Model,
    output: Destination,
    to: Annotated[
        Literal["diffllama", "diff-v2", "llama"],
        typer.Option(help="Makes diffllama from unilm's V1, diff-v2 from llama, llama from DEX."),
    ],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(
            metavar="NAME",
            help="bfloat16, float16 or float32 for matrices; by default the source's, or bfloat16 for a GGUF "
            "file's codes.",
        ),
    ] = None,
    revision: Revision = None,
    push: Push = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint as another kind with the same function."""
    from diffquant.conversion import convert as run

    check_push(push)
    report = run(at_revision(source, revision), output, to, dtype=dtype, overwrite=overwrite)
    typer.echo(to_json(report) if as_json else report.summary())
    push_folder(output, push, as_json)


@verb("inspect model")
def inspect(model: Model, revision: Revision = None, as_json: AsJson = False) -> None:
    """Say what a checkpoint is: its kind, λ, and sizes.

    It reads only headers and λ parameters, and gives sizes at several widths.
    """
    from diffquant.errors import UnknownModelTypeError
    from diffquant.inspection import Inspection, WeightInspection, inspect_checkpoint, inspect_weights

    inspection: Inspection | WeightInspection
    try:
        inspection = inspect_checkpoint(at_revision(model, revision))
    except UnknownModelTypeError:
        inspection = inspect_weights(at_revision(model, revision))
    typer.echo(json.dumps(inspection.to_dict(), indent=2) if as_json else str(inspection))


@verb("generate model --prompt 'Once upon a time' --kv 8")
def generate(
    model: Model,
    prompt: Prompt,
    weights: Weights = "16",
    kv: Kv = "16",
    k: K = None,
    v: V = None,
    logits: Logits = "16",
    residual: Residual = 0,
    override: Override = None,
    recipe: RecipeFile = None,
    preset: Preset = None,
    scales: Scales = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    chat: Chat = False,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="float32, bfloat16 or float16; the checkpoint's by default."),
    ] = None,
    attention: Attention = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    offload_folder: OffloadFolder = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, token by token."""
    import transformers

    from diffquant.attention import check_backend
    from diffquant.generation import stream

    check_backend(attention)
    transformers.set_seed(seed)
    wanted = RecipeOptions(weights, kv, k, v, logits, residual, override, recipe, preset).given()
    text = sys.stdin.read() if prompt == "-" else prompt
    places = Places.of(device, device_map, offload_folder)
    loaded, tokenizer = _load(at_revision(model, revision), wanted, dtype, chosen_device(device), scales, places)
    loaded.use_attention(attention)
    echo_pieces(text, stream(loaded, tokenizer, text, max_new_tokens, temperature, chat), as_json)


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
    path: Path, recipe: Recipe | None, dtype: str | None, device: str, scales: Path | None, places: Places | None
) -> "tuple[CausalModel, PreTrainedTokenizerBase]":
    from diffquant.loading import load
    from diffquant.source.ranges import check_ranges_used
    from diffquant.source.source import open_source
    from diffquant.support.devices import resolve_dtype

    torch_dtype = resolve_dtype(dtype, device) if dtype else None
    source = open_source(path)
    tokenizer = source.tokenizer
    model = load(source, recipe, torch_dtype, device, scales=scales, device_map=places)
    check_ranges_used(scales, [model.recipe])
    return model, tokenizer
