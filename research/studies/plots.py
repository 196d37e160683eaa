"""Redraw every plot among the results from the raw files beside it.

    python -m research.studies.plots [FOLDER or PICTURE...]

Pictures that a page shows are kept; any other, such as research/results/pocket-needle/plot.png, is drawn when it is
named. Each picture holds a digest of those files and of the code that draws, by which `is_stale` knows it without
drawing. A plot that no program here draws is named, and the command fails: a picture without its numbers proves
nothing.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffquant.bench.cells import read_result
from diffquant.bench.plots import plots as bench_plots
from diffquant.calib.analysis.attention_map_outputs import plot_attention
from diffquant.calib.analysis.outlier_outputs import plot_outliers
from diffquant.calib.analysis.outlier_result import read_outliers
from diffquant.calib.search.plots import heat_map, plot_pareto
from diffquant.calib.search.result import read_search
from diffquant.errors import UsageError
from diffquant.evals.tasks import task_kinds
from diffquant.support.xz import named, read_text
from diffquant.sweep.outputs import plotted_cells
from diffquant.sweep.plot import plot
from diffquant.sweep.result import read_sweep
from research.figure8.analysis import LARGER, LONGER, MAIN
from research.figure8.plan import RESULTS as TRAININGS
from research.figure8.plan import results as trainings
from research.figure8.plot import plot_bits_won, plot_by_ratio
from research.studies.figure8_plots import plot_against_prediction, plot_by_bits
from research.studies.results import read_attention_maps, read_json
from research.studies.rounding_plot import plot_against_size
from research.train.solved_report import write_plot

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "research" / "results", ROOT / "bench" / "results", TRAININGS)

# The name of the text inside a picture that says what it was drawn from.
STAMP = "diffquant digest"
COLOURS = 24
# Bytes of a picture at most; one that would have more is drawn with fewer dots.
LARGEST = 55_000

_Draw = Callable[[Path], object]


@dataclass(frozen=True)
class Drawing:
    """A picture that can be drawn again.

    Attributes:
        draw: function that draws it into a file.
        raw: files that its numbers come from.
        code: files of the code that draws, from the root of the checkout.
    """

    draw: _Draw
    raw: tuple[Path, ...]
    code: tuple[str, ...]

    def digest(self) -> str:
        """SHA-256 of the raw files and the code, the latter without comments and docstrings."""
        digest = hashlib.sha256()
        for file in self.raw:
            digest.update(read_text(file).encode())
        for name in ("diffquant/report/plots.py", *self.code):
            digest.update(_statements(ROOT / name).encode())
        return digest.hexdigest()


_OF_SEARCH = "calib/search/plots.py"
# The drawings of a file.
_Drawn = Callable[[Path], Iterator[tuple[str, Drawing]]]


def main(
    places: Annotated[
        list[Path] | None, typer.Argument(help="Pictures to draw, or folders whose pictures are; all by default.")
    ] = None,
) -> None:
    """Draw plots of results from the raw files beside them."""
    pictures: list[Path] = []
    for place in places or RESULTS:
        pictures += [place] if place.suffix == ".png" else sorted(place.rglob("*.png"))
    unknown = [picture for picture in pictures if picture.name not in drawings(picture.parent)]
    if unknown:
        raise UsageError(f"nothing here draws {', '.join(map(str, unknown))}; add it to research/studies/plots.py")
    for picture in pictures:
        drawing = drawings(picture.parent)[picture.name]
        _draw(drawing, picture)
        typer.echo(f"drew {picture}")


def is_stale(picture: Path) -> bool:
    """Whether a picture was drawn from other numbers, or by other code, than there are now."""
    with Image.open(picture) as image:
        return image.info.get(STAMP) != drawings(picture.parent)[picture.name].digest()


@cache
def drawings(folder: Path) -> dict[str, Drawing]:
    """Drawings that a folder's raw files allow, by the picture's name."""
    drawn = {
        name: drawing
        for file in named(folder, "*.json")
        for pattern, of_file in _DRAWN_FROM.items()
        if file.match(pattern)
        for name, drawing in of_file(file)
    }
    retrieved = tuple(sorted(folder.glob("*/retrieved.json")))
    if retrieved:
        runs = [read_json(file) for file in retrieved]
        drawn["solved.png"] = Drawing(partial(write_plot, runs), retrieved, ("research/train/solved_report.py",))
    return drawn


def _draw(drawing: Drawing, picture: Path) -> None:
    """Draw a picture in few colours and a resolution that keeps it small, with the digest of what it shows."""
    info = PngInfo()
    info.add_text(STAMP, drawing.digest())
    for share in (1.0, 0.85, 0.7, 0.6, 0.5, 0.42):
        with _resolution(share):
            drawing.draw(picture)
        with Image.open(picture) as image:
            # A palette takes a third of the bytes.
            few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            few.save(picture, pnginfo=info, dpi=image.info.get("dpi", (160, 160)), optimize=True)
        if picture.stat().st_size <= LARGEST:
            return


@contextmanager
def _resolution(share: float) -> Iterator[None]:
    """Have matplotlib save figures at a share of the resolution that the drawing functions ask for."""
    save = Figure.savefig

    def saved(figure: Figure, path: Any, dpi: float, **options: Any) -> None:
        save(figure, path, dpi=share * dpi, **options)

    with patch.object(Figure, "savefig", saved):
        yield


@cache
def _statements(file: Path) -> str:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""
    return ast.unparse(tree)


def _of_sweep(file: Path) -> Iterator[tuple[str, Drawing]]:
    shown = ("columns", "margin_columns", "position_columns", "text_columns", "stats")
    columns = tuple(f"diffquant/evals/{name}.py" for name in shown)
    yield "plot.png", Drawing(lambda path: plot(read_sweep(file), path), (file,), ("diffquant/sweep/plot.py", *columns))
    for kind in task_kinds():
        for name, draw in kind.plots.items():
            code = f"{draw.__module__.replace('.', '/')}.py"
            yield name, Drawing(partial(_draw_task, draw, kind, file), (file,), (code, *columns))


def _draw_task(draw: Any, kind: Any, file: Path, path: Path) -> None:
    draw(plotted_cells(read_sweep(file), kind), path)


def _one(name: str, read: Callable[[Path], Any], draw: Callable[[Any, Path], object], code: str) -> _Drawn:
    """A picture of one file, named after it where the name says so."""

    def of_file(file: Path) -> Iterator[tuple[str, Drawing]]:
        yield name.format(file.stem), Drawing(lambda path: draw(read(file), path), (file,), (code,))

    return of_file


def _of_search(file: Path) -> Iterator[tuple[str, Drawing]]:
    yield from _one("{}.png", read_search, heat_map, _OF_SEARCH)(file)
    searches = tuple(named(file.parent, "search-*.json"))
    drawing = Drawing(lambda path: plot_pareto(list(map(read_search, searches)), path), searches, (_OF_SEARCH,))
    yield "pareto.png", drawing


def _of_bench(file: Path) -> Iterator[tuple[str, Drawing]]:
    for drawn in bench_plots(read_result(file)):
        yield f"{drawn.name}.png", Drawing(partial(drawn.figure.savefig, dpi=160), (file,), ("bench/plots.py",))


def _of_figure8(file: Path) -> Iterator[tuple[str, Drawing]]:
    """A file a model in one folder, a Transformer first, as the study takes them."""
    files = tuple(each for each in named(file.parent, "*.json") if "kl" in read_json(each))
    if files:
        code = ("research/studies/figure8_plots.py", "research/studies/figure8_model.py")
        for name, figure in (("kl.png", plot_by_bits), ("prediction.png", plot_against_prediction)):
            yield name, Drawing(partial(_draw_figure8, figure, files), files, code)


def _of_trainings(file: Path) -> Iterator[tuple[str, Drawing]]:
    """The pictures of all trainings that are compared, which a file of one of them stands for."""
    code = ("research/figure8/plot.py", "research/figure8/analysis.py")
    drawn = {"bits-won.png": (plot_bits_won, MAIN), "bits-by-range.png": (plot_by_ratio, [*MAIN, *LONGER, *LARGER])}
    for name, (figure, comparisons) in drawn.items():
        files = tuple(TRAININGS / f"{run}.json" for each in comparisons for pair in each.names for run in pair)
        if file == files[0]:
            yield name, Drawing(partial(_draw_trainings, figure), files, code)


def _draw_trainings(figure: Callable[[Any], Any], path: Path) -> None:
    figure(trainings(TRAININGS)).savefig(path, dpi=150)


def _draw_figure8(figure: Callable[[list[Any]], Any], files: tuple[Path, ...], path: Path) -> None:
    results = [read_json(file) for file in files]
    results.sort(key=lambda result: (result["generation"] != "Transformer", result["generation"]))
    figure(results).savefig(path, dpi=150)


_DRAWN_FROM: dict[str, _Drawn] = {
    "sweep.json": _of_sweep,
    "outliers.json": _one("outliers.png", read_outliers, plot_outliers, "calib/analysis/outlier_outputs.py"),
    "attention-map.json": _one(
        "attention-map.png", read_attention_maps, plot_attention, "calib/analysis/attention_map_outputs.py"
    ),
    "search-*.json": _of_search,
    "bench.json": _of_bench,
    "figure8-*/*.json": _of_figure8,
    "figure8/results/*.json": _of_trainings,
    # Of models whose contest has all sizes and a second text.
    "rounding/prose-*.json": _one("{}.png", read_json, plot_against_size, "research/studies/rounding_plot.py"),
}


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
