"""The figures of docs/qk.md."""

from collections.abc import Iterable

from studies.figure8_model import advantage
from studies.qk import BITS, MODELS, ROWS, Measured
from tests.docs.page import Page, Unmeasured
from tests.docs.raw import sweep

PAGE = Page("docs/qk.md")
SWEEP = sweep("figure8-qk")
MEASURED = Measured(SWEEP)
SHARED = ("tensor", "head", "b64", "row")
DIFF = ("DIFF V1", "DIFF V2")
PAGE.table("granularity | one scale per", lambda *_: Unmeasured("definitions"))
PAGE.table("rounded | Transformer | DIFF V1 | DIFF V2", MEASURED.cell)
PAGE.says("or queries and keys, at {} bits", BITS)
PAGE.says(
    "{} characters of the prose that ships in windows of {} tokens",
    *(SWEEP.settings["options"][name] for name in ("characters", "window")),
)


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest of some values."""
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def _times(shared: str) -> tuple[float, float]:
    """KL of rounded logits over that of rounded queries and keys: the smallest and largest of the models."""
    return _ends(MEASURED.kl(m, f"logits {shared}").mean / MEASURED.kl(m, f"qk {shared}").mean for m in MODELS)


def _behind(model: str, target: str) -> tuple[float, float]:
    """Bits that a DIFF model is behind the Transformer by KL: the smallest and largest over granularities."""
    rows = [f"{target} {shared}" for shared in SHARED]
    return _ends(-advantage(MEASURED.kl(model, row).mean, MEASURED.kl("Transformer", row).mean) for row in rows)


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
    "DIFF V1 loses the most and the Transformer the least: every interval of the paired difference between a DIFF "
    "model and the Transformer lies above zero",
    all(
        MEASURED.change((model, row), ("Transformer", row)).low > 0
        and MEASURED.kl("DIFF V1", row).mean > MEASURED.kl("DIFF V2", row).mean
        for model in DIFF
        for row in ROWS
    ),
)
_SMOOTHED = {
    (model, shared): MEASURED.change((model, f"qk {shared}:smooth"), (model, f"qk {shared}"))
    for model in MODELS
    for shared in SHARED
}
PAGE.means(
    "Of twelve paired differences from the same scheme without, one lies below zero as a whole (DIFF V2 per tensor",
    [key for key, change in _SMOOTHED.items() if change.high < 0] == [("DIFF V2", "tensor")]
    and not [key for key, change in _SMOOTHED.items() if change.low > 0],
)
PAGE.says(
    "(DIFF V2 per tensor, {} % less KL)",
    -100 * _SMOOTHED["DIFF V2", "tensor"].mean / MEASURED.kl("DIFF V2", "qk tensor").mean,
)
PAGE.leaves("of 4-bit logits", "a width")
PAGE.leaves("Three models of 1.25 M parameters", "a count")
PAGE.leaves("hold 95 % intervals", "a level")
