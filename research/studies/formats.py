"""KL of every number format on every kind of tensor: the raw results of research/pages/formats.md.

    python -m research.studies.formats MODEL... -o research/results/formats
    python -m research.studies.formats --show research/results/formats

One rule for all: scales from largest magnitudes, nothing calibrated or chosen on a text. Each result is on the disk
before the next is measured, and the same command goes on where it was interrupted.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant import data
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.texts import text_digest
from diffquant.measure.stats import Difference, mean_interval
from diffquant.model.causal import CausalModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.recipe.presets import LIKE
from diffquant.reports.tables import markdown
from diffquant.support.progress import Progress, progress_for
from research.figure8.scoring import web_text
from research.studies.figure8 import Settings, prose_readings
from research.studies.figure8_model import advantage, passage_means
from research.studies.kv_results import KVResults
from research.studies.logit_noise import Reading, divergences, losses, predictions_of
from research.studies.results import read_json

TEXTS = ("books", "web")
TARGETS = ("weights", "k", "v", "logits", "qk", "p", "pv")
# Formats with a scale for each 32 neighbours along the axis that a product sums over (nvfp4: 16), and the bits that a
# value takes with its share of a scale.
FINE = {"8:g32": 8.5, "e4m3:g32": 8.5, "mxfp8": 8.25, "6:g32": 6.5, "mxfp6": 6.25}
FINE |= {"4:g32": 4.5, "nvfp4": 4.5, "mxfp4": 4.25}
# The coarsest scales that kernels have of each.
COARSE = {"weights": "row", "logits": "row", "qk": "head", "p": "row", "pv": "column"}
COARSE_FORMATS = ("8", "e4m3", "6", "4")
# Whose row divides by the sum of unrounded weights.
FULL_SUMS = ("8:row", "e4m3:row", "4:row", "nvfp4")
# No block of 16 divides the widths of the pocket models' networks, so these matrices stay at 16 bits in all.
KEPT = {"*.down_proj": "16"}


def recipes() -> dict[str, Recipe]:
    """Every recipe by the name of its row: target and scheme, or "like" and a kernel's name."""
    rows = {}
    for target in TARGETS:
        coarse = [f"{name}:{COARSE[target]}" for name in COARSE_FORMATS] if target in COARSE else []
        sums = [f"{scheme}:fullsum" for scheme in FULL_SUMS] if target == "p" else []
        for scheme in (*FINE, *coarse, *sums):
            overrides = KEPT if target == "weights" else {}
            rows[f"{target} {scheme}"] = Recipe.from_dict({target: scheme, "overrides": overrides})
    return rows | {f"like {name}": Recipe.of(**operands) for name, operands in LIKE.items()}


def main(
    paths: Annotated[list[Path], typer.Argument(help="Checkpoints; with --show, the folder of results.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of a file a model.")] = None,
    passages: Annotated[int, typer.Option(help="Passages read of either text.")] = 16,
    windows: Annotated[int, typer.Option(help="Windows of 256 tokens read of each passage.")] = 1,
    schemes: Annotated[str, typer.Option(help="Schemes that are measured, with commas; all by default.")] = "",
    texts: Annotated[str, typer.Option(help="Texts that are read, with commas.")] = ",".join(TEXTS),
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Measure what every number format costs on every kind of tensor."""
    if not show:
        for path in paths:
            wanted = [row for row in recipes() if not schemes or row.split()[1] in schemes.split(",")]
            measure(path, output or Path(), Settings(passages=passages, windows=windows), texts.split(","), wanted)
        return
    print(tables(Measured(paths[0])))


def measure(
    path: Path,
    output: Path,
    settings: Settings,
    texts: Sequence[str],
    rows: Sequence[str],
    progress: Progress | None = None,
) -> None:
    """Measure those rows' recipes on a model that its file does not hold yet, and write the file after each.

    Raises:
        UsageError: the file holds results of another model or text.
    """
    source = open_source(path)
    name = source.checkpoint.name.removesuffix(".gguf")
    model = load(source, Recipe(), torch.float32, "cpu")
    read = {text: _readings(model, source, text, settings) for text in texts}
    about = {"passages": settings.passages, "windows": settings.windows, "window": settings.window}
    digests = {text: text_digest(_text(text)) for text in texts}
    output.mkdir(parents=True, exist_ok=True)
    results = KVResults(
        output / f"{name}.json",
        {"model": name, "fingerprint": source.fingerprint, "rule": "absmax", **about, **digests},
    )

    def short(values: Sequence[float]) -> list[float]:
        """Means over passages in six digits, which are more than another machine's sums agree in."""
        return [float(f"{x:.6g}") for x in passage_means(values, settings.windows)]

    with torch.inference_mode():
        exact = {text: predictions_of(model, readings) for text, readings in read.items()}
        if "16" not in results.rows:
            results.add("16", {text: short(losses(read[text], exact[text])) for text in texts})
        shown = progress or progress_for(name)
        todo = [row for row in rows if row not in results.rows]
        for number, row in enumerate(todo):
            shown(number, len(todo), row)
            measured = _under(source, model, recipes()[row])
            kl = {text: divergences(exact[text], predictions_of(measured, read[text])) for text in texts}
            measured.check_quantizers_ran()
            results.add(row, {text: short(values) for text, values in kl.items()})
        shown(len(todo), len(todo), "done")


def _under(source: Source, model: CausalModel, recipe: Recipe) -> CausalModel:
    """The model under a recipe, loaded anew where weights are rounded."""
    if recipe.weights.quantizes:
        return load(source, recipe, torch.float32, "cpu")
    model.apply_recipe(recipe)
    return model


def _text(name: str) -> str:
    return data.books_text() if name == "books" else web_text()


def _readings(model: CausalModel, source: Source, text: str, settings: Settings) -> list[Reading]:
    return prose_readings(model, source.tokenizer, _text(text), settings)


MODELS = {"Transformer": "prose-transformer", "DIFF V1": "prose-diff-v1", "DIFF V2": "prose-diff-v2"}
DIFF = tuple(MODELS)[1:]
# A Transformer of another size, which was measured in some rows of 4 bits alone.
LARGER = {"SmolLM2-135M": "SmolLM2-135M-Instruct.Q4_1"}
FOUR_BITS = ("4:g32", "nvfp4", "mxfp4")
MISSING = "—"
# A table's columns: KL on the prose, and what DIFF loses on either text.
COLUMNS = (*MODELS, *(f"{model} loses, {text}" for text in TEXTS for model in DIFF))


class Measured:
    """KL of the trio and of SmolLM2 by row of `recipes`, text and model, from the raw files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.results: dict[str, Mapping[str, Any]] = {
            model: read_json(folder / f"{name}.json") for model, name in (MODELS | LARGER).items()
        }

    def rows(self, model: str, target: str = "") -> list[str]:
        """Rows, of one target or of all, that a model was measured in."""
        measured = self.results[model]["results"]
        return [row for row in recipes() if row in measured and target in ("", row.split()[0])]

    def kl(self, model: str, row: str, text: str = "books") -> Difference:
        """Mean KL over passages with its 95 % interval, in nats."""
        return mean_interval(self.passages(model, row, text))

    def passages(self, model: str, row: str, text: str = "books") -> list[float]:
        values: list[float] = self.results[model]["results"][row][text]
        return values

    def lost(self, model: str, row: str, text: str = "books") -> Difference:
        """Bits that a DIFF model needs more than the Transformer for the same KL, with its 95 % interval over passages.

        Each passage has its own: half the binary logarithm of the ratio of both KLs.
        """
        return self.bits((model, row), ("Transformer", row), text)

    def bits(self, ours: tuple[str, str], others: tuple[str, str], text: str = "books") -> Difference:
        """The same between any two models and rows."""
        pairs = zip(self.passages(*ours, text), self.passages(*others, text), strict=True)
        return mean_interval([-advantage(a, b) for a, b in pairs])

    def verdicts(self, model: str, target: str) -> tuple[int, int, int]:
        """Of a target's rows: how many a DIFF model is punished in, forgiven in, and how many there are.

        Punished or forgiven is a row whose interval of bits lost lies on one side of zero on both texts.
        """
        rows = self.rows(model, target)
        lost = [[self.lost(model, row, text) for text in TEXTS] for row in rows]
        punished = sum(all(x.low > 0 for x in of_row) for of_row in lost)
        return punished, sum(all(x.high < 0 for x in of_row) for of_row in lost), len(rows)

    def cell(self, row: str, column: str) -> str:
        """A cell of the table: KL in thousandths of a nat, or bits lost with their interval; a dash is not measured."""
        if row not in self.rows(column.split(" loses, ", maxsplit=1)[0]):
            return MISSING
        if column in MODELS:
            kl = 1000 * self.kl(column, row).mean
            return f"{kl:.{max(0, 2 - math.floor(math.log10(kl)))}f}"
        model, text = column.split(" loses, ")
        return shown_bits(self.lost(model, row, text))

    def larger_cell(self, target: str, column: str) -> str:
        """A cell of SmolLM2's table: KL in thousandths of a nat, or bits that a format loses to `4:g32`."""
        (model,), scheme = LARGER, column.split(maxsplit=1)[0].strip("`")
        if column in FOUR_BITS:
            return f"{1000 * self.kl(model, f'{target} {scheme}').mean:.3g}"
        return shown_bits(self.bits((model, f"{target} {scheme}"), (model, f"{target} 4:g32")))


def shown_bits(lost: Difference) -> str:
    """Bits with their interval, as the page's tables have them."""
    return f"{lost.mean:+.2f} [{lost.low:+.2f}, {lost.high:+.2f}]".replace("-", "−")


def tables(measured: Measured) -> str:
    """Markdown with a row of KL and of bits lost for each of `recipes`, and a line of verdicts a target and model."""
    rows = [[row, *(measured.cell(row, column) for column in COLUMNS)] for row in recipes()]
    counts = [
        f"{model}, {target}: punished {punished}, forgiven {forgiven} of {rows_of}"
        for target in (*TARGETS, "like")
        for model in DIFF
        for punished, forgiven, rows_of in [measured.verdicts(model, target)]
    ]
    others = (*FOUR_BITS, *(f"`{scheme}` against `4:g32`" for scheme in FOUR_BITS[1:]))
    larger = [[target, *(measured.larger_cell(target, column) for column in others)] for target in TARGETS]
    return "\n".join(
        [*markdown(["rounded", *COLUMNS], rows), "", *counts, "", *markdown(["SmolLM2-135M", *others], larger)]
    )


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
