"""Cost of a low-bit KV cache: what shares a scale, with keys and values rotated first and without.

    python -m research.studies.kv MODEL --json research/results/kv/MODEL.json
    python -m research.studies.kv --show research/results/kv/*.json

Weights and logits stay at 16 bits. Keys and values are read as a cache stores them, over windows of prose that ships
and of HellaSwag's contexts, and KL is that of the model's own predictions at 16 bits. Each result is on the disk before
the next is measured.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from diffquant.measure.stats import Difference
from diffquant.measure.sweep.subject import kv_bytes_per_token
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.reports.tables import markdown
from diffquant.support.progress import Progress, progress_for, report_nothing
from research.studies.kv_results import TEXTS, KVResults, kl_change, references_of, scores_of, settings_of, texts_of
from research.studies.results import read_json

# Schemes of keys and values at b bits: each rotated one stands behind the one that it is compared with.
FORMS = (
    ("{b}:row", "{b}:row"),
    ("{b}:row:rotated", "{b}:row"),
    ("{b}:row", "{b}:row:rotated"),
    ("{b}:row:rotated", "{b}:row:rotated"),
    ("{b}:c32", "{b}:row"),
    ("{b}:c32", "{b}:row:rotated"),
    ("{b}:c32:rotated", "{b}:row:rotated"),
)
_WINDOW = 256


def main(
    paths: Annotated[list[Path], typer.Argument(help="A checkpoint; with --show, results.")],
    characters: Annotated[int, typer.Option(help="Characters that are scored of either text.")] = 24576,
    bits: Annotated[str, typer.Option(help="Widths, with commas.")] = "4,3",
    file: Annotated[Path | None, typer.Option("--json", help="Where the numbers are and go.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Measure what a low-bit KV cache costs a model, rotated and not."""
    if show:
        print(cost_table([read_json(path) for path in paths]))
        return
    if len(paths) != 1 or file is None:
        raise UsageError("give one model and --json, or --show and results")
    widths = [int(width) for width in bits.split(",")]
    print(cost_table([measure_caches(paths[0], widths, characters, file, progress_for("kv"))]))


def measure_caches(
    path: Path, widths: Sequence[int], characters: int, file: Path, progress: Progress = report_nothing
) -> dict[str, Any]:
    """Measure every form at every width, writing the file after each; what it holds already is kept.

    Raises:
        UsageError: the file holds results of another model, text or length.
    """
    source = open_source(path)
    model, tokenizer = load(source, Recipe(), torch.float32, "cpu"), source.tokenizer
    texts = texts_of(characters)
    results = KVResults(file, settings_of(source, texts, characters, window=_WINDOW))
    references = references_of(TorchModel(model, tokenizer), texts, _WINDOW)
    todo = [recipe for width in widths for recipe in recipes(width) if cache_name(recipe) not in results.rows]
    for number, recipe in enumerate(todo):
        progress(number, len(todo), cache_name(recipe))
        model.apply_recipe(recipe)
        scores = scores_of(TorchModel(model, tokenizer), texts, _WINDOW, references)
        results.add(cache_name(recipe), {"bytes": kv_bytes_per_token(model), **scores})
    progress(len(todo), len(todo), "done")
    return results.to_dict()


def recipes(width: int) -> list[Recipe]:
    """A width's recipes, in the order of `FORMS`."""
    return [Recipe.of(k=keys.format(b=width), v=values.format(b=width)) for keys, values in FORMS]


def cache_name(recipe: Recipe) -> str:
    """Name of a cache's schemes, keys first."""
    return f"{recipe.k}, {recipe.v}"


def unrotated(name: str) -> str:
    """Name of the same schemes without rotation."""
    return name.replace(":rotated", "")


def gain(results: Mapping[str, Any], name: str, text: str) -> Difference | None:
    """The change of KL when keys or values are rotated, over the same windows; None if none is rotated."""
    if name == unrotated(name):
        return None
    return kl_change(results[name][text], results[unrotated(name)][text])


def cost_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with a row for each model and cache: bytes, and KL on both texts with its change by rotation."""
    heads = ["model", "keys, values", "bytes per token", "KL, nats", "elsewhere: KL, nats"]
    rows = [[one["settings"]["model"], name, *cost_cells(one, name)] for one in results for name in one["results"]]
    return "\n".join(markdown(heads, rows))


def cost_cells(result: Mapping[str, Any], name: str) -> list[str]:
    """Cells of a cache's row after its name."""
    row = result["results"][name]
    return [f"{row['bytes']:.0f}", *(_cost(result["results"], name, text) for text in TEXTS)]


def _cost(results: Mapping[str, Any], name: str, text: str) -> str:
    kl, change = f"{results[name][text]['kl']:.4f}", gain(results, name, text)
    return kl if change is None else f"{kl} ({change.mean:+.4f} [{change.low:+.4f}, {change.high:+.4f}])"


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
