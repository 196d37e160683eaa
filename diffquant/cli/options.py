"""Arguments and options that several commands share."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diffquant.errors import UsageError
from diffquant.evals.tasks import task_kinds
from diffquant.recipe import NEAREST, PRESETS, Recipe
from diffquant.scheme import Scheme
from diffquant.support.comma_lists import split_numbers

if TYPE_CHECKING:
    from diffquant.source.source import Source
    from diffquant.source.weight_source import WeightSource

_CHECKPOINT = "checkpoint folder (safetensors), .gguf file, or ORG/NAME[@REVISION] on the Hugging Face hub"
Model = Annotated[Path, typer.Argument(metavar="MODEL", help=f"A {_CHECKPOINT}.")]
Models = Annotated[
    list[Path],
    typer.Argument(metavar="MODELS", help=f"Each a {_CHECKPOINT}; for instance a DIFF model and its Transformer."),
]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a model on the hub; main by default.")
]
Destination = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to create.")]
Push = Annotated[
    str | None,
    typer.Option(metavar="ORG/NAME", help="Upload the folder, with its model card, to this model on the hub."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Preset = Annotated[
    Literal["int4", "int8", "kv-4bit-best", "paper"] | None,
    typer.Option(
        help="int4: weights 4:g32, known as w4a16. int8: weights 8:row and a KV cache of 8 bits. kv-4bit-best: a KV "
        "cache of k 4:c32, v 4:row:rotated and residual 64. paper: logits 4:tensor, the fewest bits in the DIFF "
        "paper's Figure 8."
    ),
]
Weights = Annotated[
    str,
    typer.Option(metavar="SCHEME", help="Scheme of the weights, as BITS[:GRANULARITY]: 4:g32, 6:channel or 16."),
]
Kv = Annotated[str, typer.Option("--kv", metavar="SCHEME", help="Scheme of the KV cache: 8, 4:token, 4:g32 or 16.")]
K = Annotated[
    str | None,
    typer.Option(
        "--k",
        metavar="SCHEME",
        help="Scheme of keys, in place of --kv's; 4:c64 has one scale per channel and 64 tokens.",
    ),
]
V = Annotated[str | None, typer.Option("--v", metavar="SCHEME", help="Scheme of values, in place of --kv's.")]
Logits = Annotated[
    str,
    typer.Option(
        metavar="SCHEME",
        help="Scheme of attention logits, whose rounding is simulated: 6:row, 4:tensor, 4:row:shift or 16.",
    ),
]
Qk = Annotated[
    str,
    typer.Option(
        metavar="SCHEME",
        help="Scheme of the queries and keys of Q·Kᵀ, whose rounding is simulated: 8:row, 4:b64:smooth or 16.",
    ),
]
Residual = Annotated[
    int, typer.Option(metavar="TOKENS", help="Number of newest tokens of the KV cache that stay 16-bit.")
]
Override = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=SCHEME",
        help="Scheme for some weights, or layers' .k, .v, .logits and .qk: '*.mlp.*=6:row', '*.layers.3.*.k=8'; "
        "the first match wins. May be repeated.",
    ),
]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", metavar="FILE", help="YAML file of a recipe, in place of these options.")
]
Scales = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Ranges that diffquant calibrate wrote, for static schemes such as --kv 8:static."
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="NUMBER", min=0, max=2**32 - 1, help="Seed of the random choice where the temperature is above 0."
    ),
]

Exported = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `diffquant export` wrote.")]
Threads = Annotated[
    int, typer.Option(metavar="NUMBER", min=0, help="Number of ONNX Runtime's threads; 0 takes all cores.")
]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:N; auto uses CUDA where there is a CUDA device.")
]
DeviceMap = Annotated[
    Literal["auto"] | None,
    typer.Option(help="Spread models over devices, then main memory, then the disk, in place of --device."),
]
OffloadFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where --device-map puts what only the disk has room for.")
]
Prompt = Annotated[str, typer.Option(metavar="TEXT", help="Text to continue; - reads standard input.")]
NewTokens = Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Largest number of tokens to add to the prompt.")]
Temperature = Annotated[
    float, typer.Option(metavar="NUMBER", min=0.0, help="Randomness of the choice of tokens; 0 takes the likeliest.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")]

Tasks = Annotated[
    str,
    typer.Option(metavar="LIST", help=f"Tasks, separated by commas: {', '.join(kind.usage for kind in task_kinds())}."),
]
Lengths = Annotated[str, typer.Option(metavar="LIST", help="Lengths of needle prompts in tokens, such as 256,1K,4K.")]
Attention = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Attention backend: auto, naive, flashdiff1, flashdiff2, triton, triton-int8, ..."
    ),
]
EvalDtype = Annotated[
    str, typer.Option(metavar="NAME", help="auto (bfloat16 where it is native), float32, bfloat16 or float16.")
]


@dataclass(frozen=True)
class RecipeOptions:
    """The recipe options that several commands share."""

    weights: Weights = "16"
    kv: Kv = "16"
    k: K = None
    v: V = None
    logits: Logits = "16"
    residual: Residual = 0
    override: Override = None
    recipe: RecipeFile = None
    preset: Preset = None
    qk: Qk = "16"

    def given(self) -> Recipe | None:
        """The recipe that the options make; None where none was given.

        Raises:
            UsageError: a scheme is malformed, or a file is given along with other options.
        """
        options = (self.weights, self.kv, self.k, self.v, self.logits, self.qk, self.residual, self.override)
        if options == ("16", "16", None, None, "16", "16", 0, None):
            return self._ready_made()
        if self.recipe is not None or self.preset is not None:
            option = "--preset" if self.recipe is None else "--recipe"
            raise UsageError(f"{option} replaces the other recipe options; give one or the other")
        overrides = dict(_split_override(text) for text in self.override or ())
        return Recipe.of(self.weights, self.kv, self.k, self.v, self.logits, self.residual, overrides, qk=self.qk)

    def _ready_made(self) -> Recipe | None:
        if self.recipe is not None and self.preset is not None:
            raise UsageError("--recipe and --preset are two recipes; give one or the other")
        if self.preset is not None:
            return Recipe.of(**PRESETS[self.preset])
        return None if self.recipe is None else Recipe.read(self.recipe)

    def required(self) -> Recipe:
        """The recipe that the options make, which quantizes something.

        Raises:
            UsageError: nothing would be quantized, or as `given` says.
        """
        recipe = self.given()
        if recipe is None or replace(recipe, rounding=NEAREST) == Recipe():
            raise UsageError(
                "nothing to quantize: give --preset, --weights, --kv, --logits or --recipe, such as --preset int4"
            )
        return recipe


def chosen_device(device: str) -> str:
    """The device that a model runs on; where "auto" found another than the processor, it is said.

    Raises:
        UsageError: there is no such device.
    """
    from diffquant.support.devices import describe_device, resolve_device

    chosen = resolve_device(device)
    if device == "auto" and chosen != "cpu":
        typer.echo(f"runs on {describe_device(chosen)}", err=True)
    return chosen


def at_revision(model: Path, revision: str | None) -> Path:
    """A model as it is named with a revision of the hub."""
    return model if revision is None else Path(f"{model}@{revision}")


def note_if_transformer(source: "Source | WeightSource") -> None:
    """Say on stderr that a model has no differential attention, since a DIFF model may have been meant."""
    from diffquant.source.source import Source

    if isinstance(source, Source) and source.spec.maps == 1:
        typer.echo(f"note: {source.path} is a plain Transformer, without differential attention", err=True)


def cache_bits(scheme: str) -> int:
    """The bits of an exported model's KV cache, whose scales are calibrated.

    Raises:
        UsageError: the scheme has another granularity.
    """
    bits, _, granularity = scheme.partition(":")
    if granularity not in ("", "static"):
        raise UsageError(f"--kv {scheme}: an exported cache has calibrated scales, one per channel; give {bits}")
    return Scheme.parse(scheme, default="static").bits


def widths(text: str) -> tuple[int, ...]:
    """The numbers of a --bits option."""
    return split_numbers("bits", text, "16,8,6,4")


def lengths_of(text: str) -> tuple[int, ...]:
    """The numbers of a --lengths option."""
    return split_numbers("lengths", text, "256,1K,4K")


def _split_override(text: str) -> tuple[str, str]:
    pattern, separator, scheme = text.partition("=")
    if not separator or not pattern:
        raise UsageError(f"cannot read override {text!r}: expected PATTERN=SCHEME, such as '*.mlp.*=6:row'")
    return pattern, scheme


def echo_pieces(prompt: str, pieces: Iterator[str], as_json: bool) -> None:
    """Print text as it is made, or all of it with its prompt as JSON."""
    if as_json:
        typer.echo(json.dumps({"prompt": prompt, "text": "".join(pieces)}))
        return
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def to_json(report: Any) -> str:
    """A report's dataclass as JSON."""
    from dataclasses import asdict

    return json.dumps(asdict(report), indent=2, default=str)
