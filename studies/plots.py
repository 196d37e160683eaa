"""Redraw every plot in bench/results from the raw files beside it.

    python -m studies.plots [FOLDER...]

A plot that no program here draws is named, and the command fails: a picture without its numbers proves nothing.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.bench.cells import read_result
from diffquant.bench.plots import plots as bench_plots
from diffquant.calib.analysis.attention_map_outputs import plot_attention
from diffquant.calib.analysis.outlier_outputs import plot_outliers
from diffquant.calib.search.outputs import heat_map
from diffquant.errors import UsageError
from diffquant.evals.tasks import task_kinds
from diffquant.sweep.outputs import plotted_cells
from diffquant.sweep.plot import plot
from studies.figure8_plots import plot_against_prediction, plot_by_bits
from studies.results import read_attention_maps, read_json, read_outliers, read_search, read_sweep

RESULTS = Path(__file__).parents[1] / "bench" / "results"

_Draw = Callable[[Path], object]


def main(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders of results; all by default.")] = None,
) -> None:
    """Redraw every plot of a result from the raw files beside it."""
    pictures = [picture for folder in folders or [RESULTS] for picture in sorted(folder.rglob("*.png"))]
    unknown = [picture for picture in pictures if picture.name not in drawings(picture.parent)]
    if unknown:
        raise UsageError(f"nothing here draws {', '.join(map(str, unknown))}; add it to studies/plots.py")
    for picture in pictures:
        drawings(picture.parent)[picture.name](picture)
        typer.echo(f"drew {picture}")


@cache
def drawings(folder: Path) -> dict[str, _Draw]:
    """What can be drawn from the raw files of a folder, by the picture's name."""
    drawn = {
        name: draw
        for file in sorted(folder.glob("*.json"))
        for pattern, of_file in _DRAWN_FROM.items()
        if file.match(pattern)
        for name, draw in of_file(file).items()
    }
    return drawn | ({"solved.png": _draw_solved} if any(folder.glob("*/retrieved.json")) else {})


def _draw_solved(picture: Path) -> None:
    """Have the trainer's program draw, whose modules import each other as a program's do."""
    program = RESULTS.parents[1] / "examples" / "train" / "solved_report.py"
    subprocess.run([sys.executable, str(program), str(picture.parent)], check=True, stdout=subprocess.DEVNULL)


def _of_sweep(file: Path) -> dict[str, _Draw]:
    sweep = read_sweep(file)
    of_tasks = {
        name: partial(draw, plotted_cells(sweep, kind)) for kind in task_kinds() for name, draw in kind.plots.items()
    }
    return {"plot.png": partial(plot, sweep), **of_tasks}


def _of_outliers(file: Path) -> dict[str, _Draw]:
    return {"outliers.png": partial(plot_outliers, read_outliers(file))}


def _of_attention(file: Path) -> dict[str, _Draw]:
    return {"attention-map.png": partial(plot_attention, read_attention_maps(file))}


def _of_search(file: Path) -> dict[str, _Draw]:
    return {f"{file.stem}.png": partial(heat_map, read_search(file))}


def _of_bench(file: Path) -> dict[str, _Draw]:
    return {f"{drawn.name}.png": partial(drawn.figure.savefig, dpi=200) for drawn in bench_plots(read_result(file))}


def _of_figure8(file: Path) -> dict[str, _Draw]:
    """A file a model in one folder, a Transformer first, as the study takes them."""
    results = [content for each in sorted(file.parent.glob("*.json")) if "kl" in (content := read_json(each))]
    if not results:
        return {}
    results.sort(key=lambda result: (result["generation"] != "Transformer", result["generation"]))
    by_name = {"kl.png": plot_by_bits, "prediction.png": plot_against_prediction}
    return {name: partial(_save_figure8, figure, results) for name, figure in by_name.items()}


def _save_figure8(figure: Callable[[list[Any]], Any], results: list[Any], path: Path) -> None:
    figure(results).savefig(path, dpi=150)


_DRAWN_FROM: dict[str, Callable[[Path], dict[str, _Draw]]] = {
    "sweep.json": _of_sweep,
    "outliers.json": _of_outliers,
    "attention-map.json": _of_attention,
    "search-*.json": _of_search,
    "bench.json": _of_bench,
    "figure8-*/*.json": _of_figure8,
}


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
