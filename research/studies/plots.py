"""Redraw every plot among the results from the raw files beside it.

    python -m research.studies.plots [FOLDER or PICTURE...]     # all by default

Each picture holds a digest of those files and of the code that draws, by which `is_stale` knows it without
drawing. A plot that no program here draws is named, and the command fails: a picture without its numbers proves
nothing.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator
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

from diffquant.calib.outlier_result import plot_outliers, read_outliers
from diffquant.errors import UsageError
from diffquant.support.files import list_matching_files, read_text_or_xz
from research.figure8.comparisons import LARGER, LONGER, MAIN
from research.figure8.growth import USUAL
from research.figure8.growth_plot import plot_growth
from research.figure8.plan import RESULTS as TRAININGS
from research.figure8.plan import results as trainings
from research.figure8.plot import plot_bits_won, plot_by_ratio
from research.studies.rounding_plot import plot_against_size, read_contest

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "research" / "results", ROOT / "bench" / "results", TRAININGS)

# The name of the text inside a picture that says what it was drawn from.
STAMP = "diffquant digest"
COLOURS = 32
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
            digest.update(read_text_or_xz(file).encode())
        for name in ("diffquant/reports/plots.py", *self.code):
            digest.update(_statements(ROOT / name).encode())
        return digest.hexdigest()


# The drawings of a file.
_Drawn = Callable[[Path], Iterator[tuple[str, Drawing]]]


def main(
    places: Annotated[
        list[Path] | None, typer.Argument(help="Pictures to draw, or folders whose pictures are; all by default.")
    ] = None,
) -> None:
    """Draw plots of results from the raw files beside them."""
    pictures: list[Path] = []
    for place in map(Path.absolute, places or RESULTS):
        pictures += [place] if place.suffix == ".png" else sorted(place.rglob("*.png"))
    unknown = [picture for picture in pictures if picture.name not in drawings(picture.parent)]
    if unknown:
        raise UsageError(f"nothing here draws {', '.join(map(str, unknown))}; add it to research/studies/plots.py")
    draw_again(pictures)


def draw_again(pictures: Iterable[Path]) -> None:
    """Draw pictures from the raw files beside them."""
    for picture in pictures:
        _draw(drawings(picture.parent)[picture.name], picture)
        typer.echo(f"drew {picture}")


def stale_pictures() -> list[Path]:
    """Pictures among the results that were drawn from other numbers, or by other code, than there are now."""
    return [picture for folder in RESULTS for picture in sorted(folder.rglob("*.png")) if is_stale(picture)]


def is_stale(picture: Path) -> bool:
    """Whether a picture was drawn from other numbers, or by other code, than there are now."""
    with Image.open(picture) as image:
        return image.info.get(STAMP) != drawings(picture.parent)[picture.name].digest()


@cache
def drawings(folder: Path) -> dict[str, Drawing]:
    """Drawings that a folder's raw files allow, by the picture's name."""
    return {
        name: drawing
        for file in list_matching_files(folder, "*.json")
        for pattern, of_file in _DRAWN_FROM.items()
        if file.match(pattern)
        for name, drawing in of_file(file)
    }


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


def _of_contest(file: Path) -> Iterator[tuple[str, Drawing]]:
    levels = file.parents[1] / "codebooks" / file.name
    code = ("research/studies/rounding_plot.py",)

    def draw(path: Path) -> None:
        plot_against_size(read_contest(file, levels), path)

    yield f"{file.stem}.png", Drawing(draw, (file, levels), code)


def _one(name: str, read: Callable[[Path], Any], draw: Callable[[Any, Path], object], code: str) -> _Drawn:
    """A picture of one file, named after it where the name says so."""

    def of_file(file: Path) -> Iterator[tuple[str, Drawing]]:
        yield name.format(file.stem), Drawing(lambda path: draw(read(file), path), (file,), (code,))

    return of_file


def _of_trainings(file: Path) -> Iterator[tuple[str, Drawing]]:
    """The pictures of all trainings that are compared, which a file of one of them stands for."""
    usual = ["plot", "comparisons"]
    drawn = {
        "bits-won.png": (plot_bits_won, MAIN, usual),
        "bits-by-range.png": (plot_by_ratio, [*MAIN, *LONGER, *LARGER], usual),
        "range-by-tokens.png": (plot_growth, [*USUAL, *LONGER, *MAIN], ["growth_plot", "growth", *usual]),
    }
    for name, (figure, comparisons, modules) in drawn.items():
        code = tuple(f"research/figure8/{module}.py" for module in modules)
        files = tuple(TRAININGS / f"{run}.json" for each in comparisons for pair in each.names for run in pair)
        if file == files[0]:
            yield name, Drawing(partial(_draw_trainings, figure), files, code)


def _draw_trainings(figure: Callable[[Any], Any], path: Path) -> None:
    figure(trainings(TRAININGS)).savefig(path, dpi=150)


_DRAWN_FROM: dict[str, _Drawn] = {
    "outliers.json": _one("outliers.png", read_outliers, plot_outliers, "calib/outlier_result.py"),
    "figure8/results/*.json": _of_trainings,
    # Of models whose contest has all sizes and a second text.
    "rounding/prose-*.json": _of_contest,
    "rounding/smollm2-*.json": _of_contest,
}


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
