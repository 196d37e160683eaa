"""The cost of rounding queries and keys beside that of rounding their logits, from a sweep of both.

The tables of research/pages/qk.md: `python -m research.studies.qk research/results/figure8-qk`.
"""

from pathlib import Path
from typing import Annotated

import typer

from diffquant.evals.stats import Difference, mean_interval
from diffquant.evals.task_result import TaskResult
from diffquant.report.tables import markdown
from diffquant.sweep.result import SweepResult, read_sweep

MODELS = {"Transformer": "prose-transformer", "DIFF V1": "prose-diff-v1", "DIFF V2": "prose-diff-v2"}
# What is rounded, as a row of the table names it: target and granularity.
ROWS = {
    f"{target} {granularity}": (target, granularity)
    for shared in ("tensor", "head", "b64", "row")
    for target, granularity in (("logits", shared), ("qk", shared), ("qk", f"{shared}:smooth"))
}
BITS = 4
OTHER_BITS = (8, 6, 3)


class Measured:
    """KL of next tokens by what is rounded to this many bits, over the windows of one text."""

    def __init__(self, sweep: SweepResult, bits: int = BITS) -> None:
        self._bits = bits
        self._results: dict[tuple[str, str, str], TaskResult] = {
            (cell.point.model.name, cell.point.target, cell.point.scheme): cell.result
            for cell in sweep.cells
            if cell.result is not None
        }

    def kl(self, model: str, row: str) -> Difference:
        """Mean KL over windows, with its 95 % interval, of a model in `MODELS` and a row of `ROWS`."""
        by_window, tokens = self.windows(model, row)
        return mean_interval(by_window, tokens)

    def windows(self, model: str, row: str) -> tuple[list[float], list[int]]:
        """KL of each window, and the tokens that it is a mean over."""
        target, granularity = ROWS[row]
        details = self._results[MODELS[model], target, f"{self._bits}:{granularity}"].details
        return details["kl_by_window"], details["tokens_by_window"]

    def cell(self, row: str, model: str) -> str:
        """A cell of the table: KL with its interval, in thousandths of a nat."""
        kl = self.kl(model, row)
        return f"{1000 * kl.mean:.2f} [{1000 * kl.low:.2f}, {1000 * kl.high:.2f}]"

    def change(self, ours: tuple[str, str], others: tuple[str, str]) -> Difference:
        """The change of KL from one model and row to another, over the same windows, with its 95 % interval."""
        (values, tokens), (baseline, _) = self.windows(*ours), self.windows(*others)
        return mean_interval([a - b for a, b in zip(values, baseline, strict=True)], tokens)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep of logits and of queries and keys.")],
) -> None:
    """Print the tables of research/pages/qk.md: 4 bits, and then the others."""
    sweep = read_sweep(folder / "sweep.json")
    print("\n".join(markdown(["rounded", *MODELS], _rows(Measured(sweep)))))
    others = [[f"{bits} bits", *row] for bits in OTHER_BITS for row in _rows(Measured(sweep, bits))]
    print("\n" + "\n".join(markdown(["bits", "rounded", *MODELS], others)))


def _rows(measured: Measured) -> list[list[str]]:
    return [[row, *(measured.cell(row, model) for model in MODELS)] for row in ROWS]


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
