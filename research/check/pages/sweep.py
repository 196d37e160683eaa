"""The figures of docs/evaluate.md, docs/report.md and research/pages/sweeps.md, and of logits on docs/schemes.md."""

import math
from statistics import median
from typing import Any

import numpy as np

from diffquant.evals.stats import Difference, mean_interval, paired_difference
from diffquant.sweep.compare import compare
from diffquant.sweep.table import text_table
from research.check.page import RESULTS, Page, Unmeasured
from research.check.pages.schemes import PAGE as SCHEMES
from research.check.raw import difference, interval, measured, points, raw, sweep
from research.studies.resolution import items_needed

GGUF, V2 = "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-diff-v2"
PAGE, REPORT = (Page(f"docs/{name}.md", is_guide=True) for name in ("evaluate", "report"))
SHOWN = Page("research/pages/sweeps.md")
PAGES = [PAGE, REPORT, SHOWN]
SHOWN.shows(
    "diffquant sweep SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m-diff-v2 -o logits",
    lambda: text_table(sweep("smollm2-logits-500")).splitlines(),
)
SHOWN.shows(
    "diffquant sweep SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m-diff-v2 smollm2-onnx",
    lambda: text_table(sweep("smollm2-onnx-500", (("smollm2-onnx", GGUF), ("smollm2-diff-v2-onnx", V2)))).splitlines(),
)

# Sweeps

_AT_3_ROW, _AT_3_TENSOR = (difference("smollm2-logits-500", GGUF, f"3:{g}") for g in ("row", "tensor"))
SHOWN.says(
    "At 3 bits, one scale per row loses {} points and one per tensor {} [{}, {}]",
    *(-x for x in (points(_AT_3_ROW)[0], points(_AT_3_TENSOR)[0])),
    *(-x for x in reversed(points(_AT_3_TENSOR)[1:])),
)
SHOWN.says(
    "3-bit logits with one scale per tensor lose {} points [{}, {}]; with `shift` there is no measurable "
    "change, {} [{}, {}]",
    -points(_AT_3_TENSOR)[0],
    *(-x for x in reversed(points(_AT_3_TENSOR)[1:])),
    *points(difference("smollm2-logits-500-shift", GGUF, "3:tensor:shift")),
)
_FIRST, _SECOND = (measured(f"smollm2-{name}-500", GGUF, "16").score for name in ("logits", "onnx"))
SHOWN.says("Its {} bits are {} % where the first sweep has {} %", 16, 100 * _SECOND, 100 * _FIRST)
SHOWN.leaves("with its 95 % interval, paired over the items", "the interval's level")
SCHEMES.table(
    "logits | 8 bits | 6 bits | 4 bits | 3 bits",
    lambda row, head: [measured("smollm2-logits-kl", GGUF, f"{head[0]}:{row}").details["kl"]],
)
SCHEMES.says(
    "SmolLM2-135M on {} characters of prose (perplexity {} at 16 bits)",
    sweep("smollm2-logits-kl").settings["options"]["characters"],
    measured("smollm2-logits-kl", GGUF, "16").details["perplexity"],
)
BFLOAT16_EXCESS = max(
    measured("smollm2-logits-kl-bfloat16", GGUF, f"8:{scheme}").details["kl"]
    / measured("smollm2-logits-kl", GGUF, f"8:{scheme}").details["kl"]
    for scheme in ("tensor", "row", "tensor:shift", "row:shift")
)
SHOWN.says("the 8-bit column was up to {} times as large", BFLOAT16_EXCESS)
SHOWN.says(
    "At 3 bits with one scale per row, perplexity is {} with plain absmax and {} with `shift`",
    measured("smollm2-logits-kl", GGUF, "3:row").details["perplexity"],
    measured("smollm2-logits-kl", GGUF, "3:row:shift").details["perplexity"],
)

# Loss by place

SHOWN.shows(
    "diffquant sweep prose-transformer prose-diff-v1 prose-diff-v2 -o nll",
    lambda: text_table(sweep("pocket-nll")).splitlines(),
)
_NLL = {
    cell.point.model.name: cell.result.details
    for cell in sweep("pocket-nll").cells
    if cell.point.is_baseline and cell.result is not None
}
TRIO = ("prose-transformer", "prose-diff-v1", "prose-diff-v2")
SHOWN.says(
    "Up to the sixteenth position the mean is {} (Transformer), {} (DIFF V1) and {} (DIFF V2), and over all {} it is "
    "{}, {} and {}",
    *(_NLL[model]["cumulative_nll"][_NLL[model]["positions"].index(16)] for model in TRIO),
    _NLL[TRIO[0]]["positions"][-1],
    *(_NLL[model]["cumulative_nll"][-1] for model in TRIO),
)


def _behind(model: str, position: int) -> tuple[float, float, float]:
    """How much more NLL than the Transformer's a model has up to a position, paired over windows."""
    at = _NLL[model]["positions"].index(position)
    ours, plain = ([w[at] for w in _NLL[name]["cumulative_nll_by_window"]] for name in (model, TRIO[0]))
    return interval(paired_difference(ours, plain))


def _ahead(model: str, position: int) -> list[float]:
    mean, low, high = _behind(model, position)
    return [-mean, -high, -low]


SHOWN.says(
    "DIFF V1 is behind the Transformer over all 256, by {} [{}, {}], and V2 cannot be told from it, {} [{}, {}]",
    *(x for model in TRIO[1:] for x in _behind(model, 256)),
)
SHOWN.says("Up to the sixteenth V2 is ahead, by {} [{}, {}]", *_ahead(TRIO[2], 16))
SHOWN.says("of V1 that cannot be said, {} [{}, {}]", *_ahead(TRIO[1], 16))


def _apart(cell: Any) -> Difference:
    """The change of AR-hits less that of other tokens, a difference of two ratios over windows, to first order."""
    before, now = _NLL[cell.point.model.name], cell.result.details
    residuals, means = [], []
    for what, weights in (("ar_hit", "ar_hits_by_window"), ("other", "others_by_window")):
        weight = np.array(now[weights], float)
        change = np.subtract(now[f"{what}_nll_by_window"], before[f"{what}_nll_by_window"])
        means.append(float(weight @ change / weight.sum()))
        residuals.append(weight * (change - means[-1]) / weight.mean())
    return mean_interval(list(means[0] - means[1] + residuals[0] - residuals[1]))


SHOWN.means(
    "the interval of the difference of their changes contains zero in each row",
    all(
        (apart := _apart(cell)).low < 0 < apart.high for cell in sweep("pocket-nll").cells if not cell.point.is_baseline
    ),
)
SHOWN.says(
    "One text, {} windows and {} AR-hits",
    len(_NLL[TRIO[0]]["ar_hits_by_window"]),
    sum(_NLL[TRIO[0]]["ar_hits_by_window"]),
)
SHOWN.leaves("the English models of 1.25 M parameters", "a count")


# Speeds of kinds of cells

_CELLS = {"after": raw("sweep-cells-padded.json")["cells"], "before": raw("sweep-cells.json")["cells"]}


def _speeds(when: str, dtype: str) -> dict[str, dict[str, Any]]:
    return {cell["path"]: cell for cell in _CELLS[when] if f", {dtype}," in cell["workload"]}


SHOWN.table(
    "kind of cell | items per second | × 16 bits | × 16 bits before",
    lambda row, head: [
        _speeds("before" if "before" in head else "after", "float32")[row]["median" if "items" in head else "ratio"]
    ],
)
SHOWN.says(
    "differ by up to a factor of {}, and before by up to {}",
    *(max(max(cell["values"]) / min(cell["values"]) for cell in cells) for cells in _CELLS.values()),
)
SHOWN.means("medians of five turns", {len(cell["values"]) for cells in _CELLS.values() for cell in cells} == {5})
SHOWN.leaves("in float32, 20 HellaSwag items", "a setting")

# What resolves a change

REPORT.shows(
    "diffquant sweep SmolLM2-135M-Instruct.Q4_1.gguf -o margins",
    lambda: text_table(sweep("smollm2-margins")).splitlines(),
)


def _compared() -> list[str]:
    sides = (f"{RESULTS / 'smollm2-margins'}@{words}" for words in ("16", "6:tensor"))
    return ["A is margins@16", "B is margins@6:tensor", *compare(*sides).summary().splitlines()[2:]]


PAGE.shows("diffquant compare margins@16 margins@6:tensor", _compared)


def _needed(measure: str) -> list[float]:
    """Items that a measure needs at 6 bits per tensor, with its interval; or the lower end and the items there were."""
    (row,) = (
        each
        for each in raw("smollm2-margins/items.json")["rows"]
        if (each["scheme"], each["measure"]) == ("6:tensor", measure)
    )
    if row["items_needed"] is None:
        return [row["items_needed_low"], row["n"]]
    return [row[f"items_needed{end}"] for end in ("", "_low", "_high")]


def _told_apart(wide: str, narrow: str) -> float:
    """Items after which KL tells two widths apart, paired over items, each weighed by its tokens."""
    cells = [measured("smollm2-margins", GGUF, scheme).details for scheme in (narrow, wide)]
    tokens = np.array(cells[0]["tokens_by_item"])
    less = np.subtract(*(np.array(cell["kl_by_item"]) for cell in cells))
    return items_needed(less * tokens / tokens.mean())


SHOWN.says(
    "{} of them tell 6 bits from 8 and {} tell 4 bits from 6",
    math.ceil(_told_apart("8:tensor", "6:tensor")),
    math.ceil(_told_apart("6:tensor", "4:tensor")),
)
_SHIFT_AGAINST_6 = [
    measured("figure8-prose", f"prose-{kind}", "4:tensor:shift").details["kl"]
    / measured("figure8-prose", f"prose-{kind}", "6:tensor").details["kl"]
    for kind in ("transformer", "diff-v2", "diff-v1")
]
SCHEMES.says("4 bits of `tensor:shift` have {} and {} times the KL of 6 bits of `tensor`", *_SHIFT_AGAINST_6[:2])
SCHEMES.means(
    "it holds for DIFF V1, and for the Transformer and DIFF V2 4 bits",
    _SHIFT_AGAINST_6[2] < 1 < min(_SHIFT_AGAINST_6[:2]),
)
SCHEMES.means(
    "So 4 bits of `tensor:shift` lose less than 6 of `tensor` here",
    measured("smollm2-logits-kl", GGUF, "4:tensor:shift").details["kl"]
    < measured("smollm2-logits-kl", GGUF, "6:tensor").details["kl"],
)
SHOWN.table("measure | items needed", lambda row, head: _needed({"accuracy": "acc_norm"}.get(row, row)))
_LOWEST = {
    scheme: mean_interval(cell.details["kl_by_item"], cell.details["tokens_by_item"])
    for scheme in ("8:tensor", "6:tensor", "4:tensor")
    if (cell := measured("smollm2-margins", GGUF, scheme))
}
_IS_ORDERED = all(_LOWEST[a].high < _LOWEST[b].low / 2 for a, b in (("8:tensor", "6:tensor"), ("6:tensor", "4:tensor")))
_IS_UNTOLD = all(
    change.low < 0 < change.high
    for scheme in _LOWEST
    for change in (
        difference("smollm2-margins", GGUF, scheme),
        mean_interval(
            [
                now - before
                for now, before in zip(
                    measured("smollm2-margins", GGUF, scheme).details["margins"],
                    measured("smollm2-margins", GGUF, "16").details["margins"],
                    strict=True,
                )
            ]
        ),
    )
)
SHOWN.means("KL orders all three widths with intervals far apart", _IS_ORDERED)
SHOWN.means("The margin and the accuracy tell none of them from 16 bits", _IS_UNTOLD)
REPORT.means("it orders the three widths, with intervals far apart", _IS_ORDERED)
REPORT.means("200 items tell no width from 16 bits\n  by accuracy", _IS_UNTOLD)
PAGE.means(
    "a few thousand tokens\ntell widths apart where 200 HellaSwag items do not",
    max(_told_apart("8:tensor", "6:tensor"), _told_apart("6:tensor", "4:tensor")) < 10 and _IS_UNTOLD,
)

# HellaSwag beside lm-eval


def turns(name: str, dtype: str, batch: int | None = None) -> list[float]:
    """Seconds of each turn."""
    (timing,) = (
        each
        for each in raw("hellaswag-speed.json")["timings"]
        if (each["name"], each["dtype"], each["batch_size"]) == (name, dtype, batch)
    )
    return list(timing["seconds"])


def _times(dtype: str, batch: int, ours: str | None = None) -> float:
    return median(turns("HFLM", dtype, batch)) / median(turns("diffquant", ours or dtype))


SHOWN.says(
    "it scored {} times the items per second in float32 and {} times in bfloat16 with HFLM at batch 8, and {} and {} "
    "times at its default batch of 1",
    _times("float32", 8),
    _times("bfloat16", 8),
    _times("float32", 1),
    _times("bfloat16", 1),
)
SHOWN.says("HFLM's two in float32 at batch 1 were {} and {} s", *sorted(turns("HFLM", "float32", 1)))
SHOWN.says("With each one's defaults it was {} times", _times("float32", 1, ours="bfloat16"))

SHOWN.leaves("brackets are 95 % intervals", "the intervals' level")
PAGE.table("task | what it measures", Unmeasured("names"))
PAGE.leaves("lm-eval 0.4.13 does not find it", "a version")
PAGE.table("question | command", Unmeasured("questions"))
PAGE.table("A or B | how | what it tells", Unmeasured("what can be compared"))
PAGE.table("you have | beside diffquant's 4 bits", Unmeasured("ways to compare"))
REPORT.table("column | what it says", Unmeasured("definitions"))
for _text, _why in {
    "the last 65,536 characters": "a default",
    "with 95 % intervals": "a level",
    "2 bytes for each scored token": "a format",
}.items():
    PAGE.leaves(_text, _why)
REPORT.leaves("An interval of ± 3 points", "an example")
REPORT.says("4 bits still have a KL of {}", measured("smollm2-margins", GGUF, "4:tensor").details["kl"])
