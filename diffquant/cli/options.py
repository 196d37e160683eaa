"""Arguments and options that several commands share."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.errors import UsageError
from diffquant.evals.tasks import task_kinds
from diffquant.recipe import NEAREST, Recipe
from diffquant.support.comma_lists import split_numbers

Model = Annotated[Path, typer.Argument(help="Checkpoint folder (safetensors) or .gguf file.")]
Destination = Annotated[Path, typer.Option("--output", "-o", help="Folder to create.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Weights = Annotated[str, typer.Option(help="Weights, as BITS[:GRANULARITY]: 4:g32, 6:row, 8:tensor, 16.")]
Kv = Annotated[str, typer.Option("--kv", help="KV cache: 8, 4:g32, 16.")]
K = Annotated[str | None, typer.Option("--k", help="Keys, where they differ from --kv: 4:c64 is per channel.")]
V = Annotated[str | None, typer.Option("--v", help="Values, where they differ from --kv.")]
Logits = Annotated[str, typer.Option(help="Attention logits (simulated): 6:row, 4:tensor, 4:row:shift, 16.")]
Residual = Annotated[int, typer.Option(help="Newest tokens of the KV cache that stay 16-bit.")]
Override = Annotated[
    list[str] | None,
    typer.Option(
        help="PATTERN=SCHEME for some weights, or layers' .k, .v and .logits: '*.mlp.*=6:row', '*.layers.3.*.k=8'; "
        "the first match wins."
    ),
]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="All of this from a YAML file instead.")]
Scales = Annotated[
    Path | None, typer.Option(help="From diffquant calibrate, for static schemes such as --kv 8:static.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the draws where the temperature is above 0.")]

Exported = Annotated[Path, typer.Argument(help="Folder that `diffquant export` wrote.")]
Threads = Annotated[int, typer.Option(min=0, help="Of ONNX Runtime; 0 takes all cores.")]
RuntimeDevice = Annotated[str, typer.Option("--device", help="Of ONNX Runtime: cpu, cuda or cuda:N.")]

Tasks = Annotated[str, typer.Option(help=f"{', '.join(kind.usage for kind in task_kinds())}; several with commas.")]
Lengths = Annotated[str, typer.Option(help="Tokens of needle prompts, such as 1024,4096.")]
Attention = Annotated[
    str, typer.Option(help="Attention backend: auto, naive, flashdiff1, flashdiff2, triton, triton-int8, ...")
]
EvalDtype = Annotated[str, typer.Option(help="auto (bfloat16 where native), float32, bfloat16 or float16.")]


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

    def given(self) -> Recipe | None:
        """The recipe that the options make; None where none was given.

        Raises:
            UsageError: a scheme is malformed, or a file is given along with other options.
        """
        options = (self.weights, self.kv, self.k, self.v, self.logits, self.residual, self.override)
        if options == ("16", "16", None, None, "16", 0, None):
            return None if self.recipe is None else Recipe.read(self.recipe)
        if self.recipe is not None:
            raise UsageError("--recipe replaces the other recipe options; give one or the other")
        overrides = dict(_split_override(text) for text in self.override or ())
        return Recipe.of(self.weights, self.kv, self.k, self.v, self.logits, self.residual, overrides)

    def required(self) -> Recipe:
        """The recipe that the options make, which quantizes something.

        Raises:
            UsageError: nothing would be quantized, or as `given` says.
        """
        recipe = self.given()
        if recipe is None or replace(recipe, rounding=NEAREST) == Recipe():
            raise UsageError("nothing to quantize: give --weights, --kv, --logits or --recipe, such as --weights 4:g32")
        return recipe


def widths(text: str) -> tuple[int, ...]:
    """The numbers of a --bits option."""
    return split_numbers("--bits", text, "16,8,6,4")


def lengths_of(text: str) -> tuple[int, ...]:
    """The numbers of a --lengths option."""
    return split_numbers("--lengths", text, "1024,4096")


def _split_override(text: str) -> tuple[str, str]:
    pattern, separator, scheme = text.partition("=")
    if not separator or not pattern:
        raise UsageError(f"cannot read override {text!r}: expected PATTERN=SCHEME, such as '*.mlp.*=6:row'")
    return pattern, scheme


def to_json(report: Any) -> str:
    """A report's dataclass as JSON."""
    from dataclasses import asdict

    return json.dumps(asdict(report), indent=2, default=str)
