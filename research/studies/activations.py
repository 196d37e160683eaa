"""Cost of low-bit activations, projection by projection: which input is the one that cannot be rounded?

    python -m research.studies.activations MODEL -o research/results/activations
    python -m research.studies.activations --show research/results/activations

Weights have 8 bits per output channel, rounded to nearest, in every row, "weights" among them, in which no input is
rounded. KL is that of the 16-bit model's predictions, over windows of the bundled prose. Each result is on the disk
before the next is measured.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.reports.tables import markdown
from diffquant.support.progress import progress_for
from research.studies.kv_results import KVResults, kl_change, references_of, scores_of, settings_of, texts_of
from research.studies.results import read_json

# Whose inputs are rounded, and the names of these modules. Those of q, k and v are one tensor.
PARTS = {
    "all": ("*",),
    "q": ("*.q_proj",),
    "k": ("*.k_proj",),
    "v": ("*.v_proj",),
    "o": ("*.o_proj",),
    "gate and up": ("*.gate_proj", "*.up_proj"),
    "down": ("*.down_proj",),
}
WIDTHS = (8, 4)
MODELS = {"Transformer": "prose-transformer", "DIFF V1": "prose-diff-v1", "DIFF V2": "prose-diff-v2"}
_TEXT, _WINDOW = "prose", 256


def recipes() -> dict[str, Recipe]:
    """Every recipe by the name of its row."""
    rows = {"weights": Recipe.of(weights="8:row")}
    for width in WIDTHS:
        for part, modules in PARTS.items():
            inputs = {f"{module}.activations": f"{width}:row" for module in modules}
            rows[f"{width} {part}"] = Recipe.of(weights="8:row", overrides=inputs)
    return rows


def main(
    path: Annotated[Path, typer.Argument(help="A checkpoint; with --show, the folder of results.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of a file a model.")] = None,
    characters: Annotated[int, typer.Option(help="Characters that are scored.")] = 16384,
    only: Annotated[str, typer.Option(help="Rows to measure, separated by commas; all by default.")] = "",
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Measure what low-bit activations of each projection cost a model."""
    if show:
        print(cost_table({name: read_json(path / f"{file}.json") for name, file in MODELS.items()}))
        return
    if output is None:
        raise UsageError("give the folder of results, --output")
    measure(path, output, characters, set(filter(None, only.split(","))) or set(recipes()))


def measure(path: Path, output: Path, characters: int, rows: Collection[str]) -> None:
    """Measure those rows that a model's file does not hold yet, writing the file after each.

    Raises:
        UsageError: the file holds results of another model, text or length.
    """
    source, progress = open_source(path), progress_for("activations")
    texts = {_TEXT: texts_of(characters)[_TEXT]}
    output.mkdir(parents=True, exist_ok=True)
    results = KVResults(output / f"{path.name}.json", settings_of(source, texts, characters, window=_WINDOW))
    exact = TorchModel(load(source, Recipe(), torch.float32, "cpu"), source.tokenizer)
    references = references_of(exact, texts, _WINDOW)
    todo = {name: recipe for name, recipe in recipes().items() if name in rows and name not in results.rows}
    model = load(source, recipes()["weights"], torch.float32, "cpu")
    for number, (name, recipe) in enumerate(todo.items()):
        progress(number, len(todo), name)
        model.apply_recipe(recipe)
        results.add(name, scores_of(TorchModel(model, source.tokenizer), texts, _WINDOW, references)[_TEXT])
        model.check_quantizers_ran()
    progress(len(todo), len(todo), "done")


def cost_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown with a row for each part and width: KL in thousandths of a nat beyond that of the weights."""
    rows = [[name, *(_cost(each["results"], name) for each in results.values())] for name in recipes()]
    return "\n".join(markdown(["bits, inputs", *results], rows))


def _cost(rows: Mapping[str, Any], name: str) -> str:
    if name == "weights":
        return f"{1000 * rows[name]['kl']:.2f}"
    change = kl_change(rows[name], rows["weights"])
    return f"{1000 * change.mean:+.2f} [{1000 * change.low:+.2f}, {1000 * change.high:+.2f}]"


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
