"""What research/pages/figure8.md says of sensitivity and range as two factors: its first screen, and related work."""

from statistics import fmean

from research.check.numbers import ends
from research.check.pages.figure8 import LONGER_V2_RANGE, OF_KIND, PAGE, THERE, control, interval_of
from research.check.raw import interval as ends_of
from research.figure8.analysis import (
    LARGER,
    LONGER,
    PAPER_RATIO,
    RATIOS,
    Comparison,
    as_ratio,
    break_even,
    range_won,
    won_at_ratio,
    won_by_steps,
)

_GROUPS = {
    "1.25 million parameters": list(OF_KIND.values()),
    "three times the tokens": LONGER,
    "5.3 million parameters": LARGER,
}
ROWS: dict[str, Comparison] = {
    f"{name}, {group}": comparison
    for group, comparisons in _GROUPS.items()
    for name, comparison in zip(OF_KIND, comparisons, strict=True)
}


def won(row: str, ratio: int) -> list[float]:
    """Mean and interval of the bits that a row's DIFF models win at a ratio of ranges."""
    return interval_of(ROWS[row].values(THERE, won_at_ratio(ratio)))


def level(row: str) -> tuple[float, float, float]:
    """Ratio of ranges at which a row's DIFF models win nothing, with its interval."""
    return ends_of(as_ratio(ROWS[row].values(THERE, break_even)))


def _cell(row: str, column: str) -> list[float]:
    return list(level(row)) if column.startswith("break-even") else won(row, int(column.removeprefix("r = ")))


PAGE.table("bits won by DIFF | r = 1 | r = 2 | r = 4 | r = 8 | break-even r", _cell)

# Bits more that a kind needs at equal steps, with their interval.
SENSITIVITY = {name: [-won(f"{name}, 1.25 million parameters", 1)[at] for at in (0, 2, 1)] for name in OF_KIND}
PAGE.says(
    "DIFF V1 needs {} [{}, {}] bits more than the\n  Transformer to stay as close to its own 16-bit model, "
    "and V2 needs {} [{}, {}]",
    *(x for more in SENSITIVITY.values() for x in more),
)
PAGE.means("Sensitivity costs DIFF about half a bit", all(0.35 < -won(row, 1)[0] < 0.75 for row in ROWS))
LEVEL_ENDS = ends(level(row)[0] for row in ROWS)
PAGE.says("where the Transformer's logits are {} to {} times as\n  large as its own", *LEVEL_ENDS)
WON_AT_PAPERS = ends(won(row, RATIOS[-1])[0] for row in ROWS)
PAGE.says("the models trained here win {} to {} bits", *WON_AT_PAPERS)
for _words in ("In the paper's Table 5 they are {} times as large", "so its {} is of the largest logits alone"):
    PAGE.says(_words, PAPER_RATIO)
# Smallest and largest mean of the bits that the range wins, of the rows.
WON_BY_RANGE = ends(fmean(comparison.values(THERE, range_won)) for comparison in ROWS.values())
PAGE.says("the range earns {} to {} bits", *WON_BY_RANGE)
PAGE.says(
    "with both steps twice as large, r = 4 is worth {} to {} bits instead of {} to {}",
    *(
        end
        for steps in ((2, 8), (1, 4))
        for end in ends(fmean(comparison.values(THERE, won_by_steps(*steps))) for comparison in ROWS.values())
    ),
)
_RISES = [(won(row, 8)[0] - won(row, 1)[0]) / 3 for row in ROWS]
PAGE.means("Lines rise by about one bit for each doubling of r", all(abs(rise - 1) < 0.25 for rise in _RISES))
PAGE.means(
    "a range that is 8 times smaller wins DIFF more than the paper's two bits", all(won(row, 8)[0] > 2 for row in ROWS)
)
PAGE.says("a smaller range wins V2 {} [{}, {}] bits, over three trainings and uncorrected", *LONGER_V2_RANGE)
PAGE.means("which three longer trainings of V2 contradict", LONGER_V2_RANGE[1] > 0)
_EQUAL = control("DIFF V1, equal ranges", "bits won at `4:tensor`")
PAGE.says("V1's interval, of three trainings, misses zero by {}", -_EQUAL[2])
_GATES = {part: control("gates behind attention", part) for part in ("sensitivity", "bits won at `4:tensor`")}
PAGE.means(
    "Here gates lower\n  the sensitivity and not the bits needed at `4:tensor`",
    _GATES["sensitivity"][1] > 0 and abs(_GATES["bits won at `4:tensor`"][0]) < 0.05,
)
for _text, _why in (
    ("Logits that are r times smaller have steps r times smaller, which is worth about log2(r) bits", "arithmetic"),
    ("At r = 8 the", "a setting"),
    ("by which a range that is 8 times smaller", "a setting"),
    ("to steps of 1 and the Transformer's to steps of r", "settings"),
    ("the paper's ratio, 318 / 38.8", "the paper's"),
    ("the paper's finding, 4 bits for 6, is 2", "the paper's"),
):
    PAGE.leaves(_text, _why)
