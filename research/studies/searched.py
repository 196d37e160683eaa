"""KL of searched widths beside one width for all weights, at equal stored bits.

    python -m research.studies.searched MODEL... -o FOLDER
    python -m research.studies.searched --show FOLDER/*.json

The budget of a search is what a uniform width stores, scales included, and any of the other widths may be chosen. The
costs are measured on the first half of the bundled text. Both recipes are then scored on its second half, and on
HellaSwag's contexts, which are another kind of text; KL is that of the model's own predictions at 16 bits. A file for
each model; those that are there are not measured again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.calib.search.allocation import Budget, average_bits
from diffquant.calib.search.search import Search
from diffquant.calib.search.units import find_units, to_recipe
from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from diffquant.measure.stats import Difference
from diffquant.measure.sweep.subject import weight_bytes
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.reports.tables import markdown
from diffquant.support.files import find_file_or_xz, write_json
from diffquant.support.progress import Progress, progress_for, report_nothing
from research.studies.kv_results import TEXTS, kl_change, references_of, scores_of, settings_of, texts_of
from research.studies.results import read_json

SEARCHED, UNIFORM = "searched", "uniform"
# The widths of the pocket models' matrices have no common group but 8, so a row is what shares a scale.
_WIDTHS, _GRANULARITY = (8, 7, 6, 5, 4, 3), "row"
_WINDOW = 256


def main(
    paths: Annotated[list[Path], typer.Argument(help="Checkpoints; with --show, results.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of a file for each model.")] = None,
    uniform: Annotated[str, typer.Option(help="Uniform widths whose size is the budget, with commas.")] = "4,5,6",
    characters: Annotated[int, typer.Option(help="Characters that are scored of either text.")] = 24576,
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Compare searched widths with a uniform one that stores as much."""
    if show:
        print(searched_table([read_json(path) for path in paths]))
        return
    if output is None:
        raise UsageError("give --output, the folder of the results, or --show and results")
    widths = [int(width) for width in uniform.split(",")]
    results = []
    for path in paths:
        file = output / f"{path.name}.json"
        if not find_file_or_xz(file).exists():
            output.mkdir(parents=True, exist_ok=True)
            measured = measure_searches(path, widths, characters, output, progress_for(path.name))
            write_json(file, measured)
        results.append(read_json(file))
    print(searched_table(results))


def measure_searches(
    path: Path, widths: Sequence[int], characters: int, folder: Path, progress: Progress = report_nothing
) -> dict[str, Any]:
    """Content of a model's file: by uniform width, both recipes and what they cost.

    Args:
        widths: uniform widths whose stored bits are the budgets.
        characters: number of characters of either text.
        folder: where the searches keep their measurements.
    """
    source = open_source(path)
    units = find_units(source, ("weights",), _GRANULARITY)
    texts = texts_of(characters)
    exact = TorchModel(load(source, Recipe(), torch.float32, "cpu"), source.tokenizer)
    references = references_of(exact, texts, _WINDOW)

    def costs(recipe: Recipe) -> dict[str, Any]:
        """Bytes of the checkpoint and scores of the texts under a recipe."""
        model = TorchModel(load(source, recipe, torch.float32, "cpu"), source.tokenizer)
        scores = scores_of(model, texts, _WINDOW, references)
        return {"bytes": weight_bytes(source, recipe), **scores}

    results: dict[str, Any] = {}
    for width in widths:
        same_width = dict.fromkeys(units, width)
        budget = Budget(bits=average_bits(same_width, "weights"))
        search = Search(source, budget, folder, widths=_WIDTHS, granularity=_GRANULARITY).run(progress)
        recipes = {UNIFORM: to_recipe(same_width), SEARCHED: search.recipe}
        results[str(width)] = {name: {"recipe": recipe.to_dict(), **costs(recipe)} for name, recipe in recipes.items()}
    return {
        "environment": describe_environment(),
        "settings": {
            **settings_of(source, texts, characters, window=_WINDOW),
            "widths": _WIDTHS,
            "granularity": _GRANULARITY,
        },
        "results": results,
    }


def gain(result: Mapping[str, Any], width: str, text: str) -> Difference:
    """The change of KL from the uniform width to the search's, over the same windows."""
    ours, plain = (result["results"][width][name][text] for name in (SEARCHED, UNIFORM))
    return kl_change(ours, plain)


def searched_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with a row for each model and uniform width: bytes of both, KL of both with the change's interval."""
    heads = ["model", "uniform", "bytes", "searched, bytes", "KL, nats", "elsewhere: KL, nats"]
    rows = [
        [one["settings"]["model"], f"{width} bits", *searched_cells(one, width)]
        for one in results
        for width in one["results"]
    ]
    return "\n".join(markdown(heads, rows))


def searched_cells(result: Mapping[str, Any], width: str) -> list[str]:
    """Cells of a row after the width."""
    sizes = [f"{result['results'][width][name]['bytes']:,}" for name in (UNIFORM, SEARCHED)]
    return [*sizes, *(_change(result, width, text) for text in TEXTS)]


def _change(result: Mapping[str, Any], width: str, text: str) -> str:
    plain, ours = (result["results"][width][name][text]["kl"] for name in (UNIFORM, SEARCHED))
    change = gain(result, width, text)
    return f"{plain:.4f} → {ours:.4f} ({change.mean:+.4f} [{change.low:+.4f}, {change.high:+.4f}])"


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
