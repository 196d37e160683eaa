"""Figures of weights scaled by AWQ's factors before they are rounded."""

from typing import Any

from diffquant.measure.stats import Difference
from research.pages.raw import raw
from research.pages.render import interval, table
from research.pages.weights import kl, row
from research.studies.kv_results import kl_change

MODEL = "SmolLM2-135M"
RESULTS: dict[str, dict[str, Any]] = raw("scaled/smollm2-135m.json")["results"]
METHODS = [name for name in RESULTS if name != "16 bits"]


def change(method: str) -> Difference:
    """KL of scaled weights minus that of the weights as they are, on text elsewhere, over the same windows."""
    return kl_change(RESULTS[method]["elsewhere"], row(MODEL, method)["elsewhere"])


LOWERS_MSE = all(change(method).high < 0 for method in METHODS if method.startswith("mse"))
RAISES_READERS = all(change(method).low > 0 for method in METHODS if not method.startswith("mse"))


def scaled_table() -> str:
    """KL in nats of each method on SmolLM2's weights and on the scaled ones, and the change."""
    rows = [
        [name, f"{kl(MODEL, name):.4f}", f"{RESULTS[name]['elsewhere']['kl']:.4f}", interval(change(name), 4, True)]
        for name in METHODS
    ]
    return table(["KL, nats", "as it is", "scaled", "change"], rows)
