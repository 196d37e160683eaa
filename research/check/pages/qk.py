"""The figures of research/pages/qk.md."""

from research.check.numbers import ends
from research.check.page import Page, Unmeasured
from research.check.raw import sweep
from research.studies.figure8_model import advantage
from research.studies.qk import BITS, MODELS, OTHER_BITS, ROWS, Measured

PAGE = Page("research/pages/qk.md")
SWEEP = sweep("figure8-qk")
MEASURED = Measured(SWEEP)
OTHERS = {f"{bits} bits": Measured(SWEEP, bits) for bits in OTHER_BITS}
SHARED = ("tensor", "head", "b64", "row")
DIFF = ("DIFF V1", "DIFF V2")
PAGE.table("granularity | one scale per", Unmeasured("definitions"))
PAGE.table("rounded | Transformer | DIFF V1 | DIFF V2", MEASURED.cell)
PAGE.table(
    "bits | rounded | Transformer | DIFF V1 | DIFF V2",
    lambda row, model: OTHERS[row.partition(", ")[0]].cell(row.partition(", ")[2], model),
    names=2,
)
PAGE.says("or queries and keys, at {} bits", BITS)
PAGE.says(
    "{} characters of the prose that ships in windows of {} tokens",
    *(SWEEP.settings["options"][name] for name in ("characters", "window")),
)


def _times(shared: str, measured: Measured = MEASURED) -> tuple[float, float]:
    """KL of rounded logits over that of rounded queries and keys: the smallest and largest of the models."""
    return ends(measured.kl(m, f"logits {shared}").mean / measured.kl(m, f"qk {shared}").mean for m in MODELS)


def _behind(model: str, target: str) -> tuple[float, float]:
    """Bits that a DIFF model is behind the Transformer by KL: the smallest and largest over granularities."""
    rows = [f"{target} {shared}" for shared in SHARED]
    return ends(-advantage(MEASURED.kl(model, row).mean, MEASURED.kl("Transformer", row).mean) for row in rows)


PAGE.says(
    "KL of 4-bit logits is {} to {} times as large per tensor, {} to {} times per head, {} to {} times by blocks and "
    "{} to {} times per row",
    *(end for shared in SHARED for end in _times(shared)),
)
PAGE.says(
    "DIFF V1 is {} to {} behind the Transformer without `smooth`, where with logits it is {} to {} behind, and DIFF V2 "
    "{} to {}, where with logits it is {} to {}",
    *(end for model in DIFF for target in ("qk", "logits") for end in _behind(model, target)),
)
PAGE.means(
    "At the same scheme and width DIFF V1 loses the most and the Transformer the least: every interval of the paired "
    "difference between a DIFF model and the Transformer lies above zero",
    all(
        measured.change((model, row), ("Transformer", row)).low > 0
        and measured.kl("DIFF V1", row).mean > measured.kl("DIFF V2", row).mean
        for measured in (MEASURED, *OTHERS.values())
        for model in DIFF
        for row in ROWS
    ),
)
PAGE.says(
    "At 8, 6 and 3 bits it is {} to {} times as large",
    *ends(end for measured in OTHERS.values() for shared in SHARED for end in _times(shared, measured)),
)
PAGE.means(
    "and least per row, too",
    all(
        _times("row", measured)[1] < min(_times(shared, measured)[0] for shared in SHARED[:3])
        for measured in OTHERS.values()
    ),
)
_SMOOTHED = {
    (measured, model, shared): measured.change((model, f"qk {shared}:smooth"), (model, f"qk {shared}"))
    for measured in (MEASURED, *OTHERS.values())
    for model in MODELS
    for shared in SHARED
}
_DECIDED = [(model, shared) for (_, model, shared), change in _SMOOTHED.items() if change.high < 0 or change.low > 0]
PAGE.says("Of {} paired differences from the same scheme without, over the four widths", len(_SMOOTHED))
PAGE.means(
    "four lie below zero as a whole and one above, each for another scheme or model",
    [sum(change.high < 0 for change in _SMOOTHED.values()), sum(change.low > 0 for change in _SMOOTHED.values())]
    == [4, 1]
    and len(set(_DECIDED)) == len(_DECIDED),
)
PAGE.leaves("At 8, 6 and 3 bits", "widths")
PAGE.leaves("(figure8-one-rate.md#figure-8), at 4 bits", "a width")
PAGE.leaves("of 4-bit logits", "a width")
PAGE.leaves("Three models of 1.25 M parameters", "a count")
PAGE.leaves("hold 95 % intervals", "a level")
