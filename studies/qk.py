"""What rounding queries and keys costs beside rounding the logits that they make, from a sweep of both.

The tables of docs/qk.md: `python -m studies.qk bench/results/figure8-qk`.
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
WIDTHS = (8, 6, 4, 3)


class Measured:
    """KL of next tokens by what is rounded, over the windows of one text."""

    def __init__(self, sweep: SweepResult) -> None:
        self._results: dict[tuple[str, str, str], TaskResult] = {
            (cell.point.model.name, cell.point.target, cell.point.scheme): cell.result
            for cell in sweep.cells
            if cell.result is not None
        }

    def kl(self, model: str, row: str, bits: int) -> Difference:
        """Mean KL over windows, with its 95 % interval, of a model in `MODELS` and a row of `ROWS`."""
        by_window, tokens = self.windows(model, row, bits)
        return mean_interval(by_window, tokens)

    def windows(self, model: str, row: str, bits: int) -> tuple[list[float], list[int]]:
        """KL of each window, and the tokens that it is a mean over."""
        target, granularity = ROWS[row]
        details = self._results[MODELS[model], target, f"{bits}:{granularity}"].details
        return details["kl_by_window"], details["tokens_by_window"]

    def cell(self, row: str, model: str, bits: int) -> str:
        """A cell of the table: KL with its interval, in thousandths of a nat."""
        kl = self.kl(model, row, bits)
        return f"{1000 * kl.mean:.2f} [{1000 * kl.low:.2f}, {1000 * kl.high:.2f}]"

    def cells(self, row: str, bits: int) -> str:
        """All models' KL without interval."""
        return ", ".join(f"{1000 * self.kl(model, row, bits).mean:.2f}" for model in MODELS)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep of logits and of queries and keys.")],
) -> None:
    """Print the tables of docs/qk.md."""
    measured = Measured(read_sweep(folder / "sweep.json"))
    heads = ["rounded, 4 bits", *MODELS]
    print("\n".join(markdown(heads, [[row, *(measured.cell(row, model, 4) for model in MODELS)] for row in ROWS])))
    others = [bits for bits in WIDTHS if bits != 4]
    heads = ["rounded", *(f"{bits} bits" for bits in others)]
    print("\n".join(["", *markdown(heads, [[row, *(measured.cells(row, bits) for bits in others)] for row in ROWS])]))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
