"""The figures of docs/quantize.md: what quantizing takes, by the size of the model."""

from collections.abc import Mapping
from typing import Any

from research.check.numbers import Expected
from research.check.page import Page, Unmeasured
from research.check.raw import medians, raw, recorded

PAGE = Page("docs/quantize.md", is_guide=True)
PAGE.shows("diffquant inspect", lambda: recorded("diffquant inspect"))
PAGE.table("`--rounding`, `--effort` | what it does | take it", Unmeasured("rules"))
PAGE.table("key | takes | meaning", Unmeasured("a grammar"))
PAGE.table("`quant_method` | read | refused by name", Unmeasured("layouts"))
PAGE.leaves("stores 4.5 bits per weight", "arithmetic: 4 + 16 / 32")
PAGE.leaves("Scales take 16 bits", "a format")
PAGE.leaves("the first 16,384 tokens", "a default")

_SIX_GB, _MOTIF, _TEXTS = (raw(f"quantize-{name}.json") for name in ("6gb", "motif-2-12.7b", "roundings"))
_RUNS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "SmolLM2-135M, 0.1 GB of GGUF, gptq": (_TEXTS, _TEXTS["roundings"]["gptq"]),
    "SmolLM2-135M, 0.1 GB of GGUF, tuned": (_TEXTS, _TEXTS["roundings"]["tuned"]),
    "random weights, 6.0 GB, nearest": (_SIX_GB, _SIX_GB["whole"]),
    "Motif-2-12.7B's shapes, 25.4 GB, nearest": (_MOTIF, _MOTIF["whole"]),
}


def _taken(row: str, column: str) -> list[Expected] | Unmeasured:
    run = next(run for name, (_, run) in _RUNS.items() if row.startswith(name))
    columns = {"seconds": run["process_seconds"], "MB beyond the mapped files": run["peak_anonymous"] / 1e6}
    return [columns[column]]


PAGE.table("checkpoint | rounding | processor | seconds | MB beyond the mapped files", _taken, names=3)
PAGE.means("each in one run on two cores", {about["environment"]["cores"] for about, _ in _RUNS.values()} == {2})
PAGE.says(
    "Imports alone take {} MB of the third row and {} MB of the fourth",
    *(about["anonymous_bytes_of_imports"] / 1e6 for about in (_SIX_GB, _MOTIF)),
)
PAGE.says("the {} GB run held {} GB at most", _SIX_GB["source_bytes"] / 1e9, _SIX_GB["whole"]["peak_resident"] / 1e9)
PAGE.says(
    "reads headers alone: {} s for the {} GB",
    medians(raw("inspect-motif-2-12.7b.json")["turns"]["diffquant inspect"], "seconds"),
    _MOTIF["source_bytes"] / 1e9,
)
PAGE.says(
    "the {} GB, killed after {} s, took {} s more",
    _MOTIF["source_bytes"] / 1e9,
    _MOTIF["killed"]["process_seconds"],
    _MOTIF["resumed"]["process_seconds"],
)
PAGE.means("came to the same bytes", _MOTIF["byte_identical"])
