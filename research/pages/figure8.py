"""Figures of the page on Figure 8, over trainings as protocol.md lays down, and of the retrieving models."""

from collections.abc import Iterable
from statistics import fmean, stdev

from diffquant.measure.stats import Difference, mean_interval
from research.figure8.comparisons import (
    CONTROLS,
    FAR,
    LARGER,
    LONGER,
    MAIN,
    OF_SIZE,
    ON_PURPOSE,
    PAPER_RATIO,
    PARTS,
    PRIMARY,
    RATIOS,
    SIX,
    THREE,
    Comparison,
    Measure,
    as_ratio,
    bits_won,
    break_even,
    perplexity_ratio,
    range_won,
    sensitivity_won,
    won_at_ratio,
    won_by_steps,
)
from research.figure8.deciding import DIFF_VERDICTS, LEVEL, against_zero, holm, p_value, verdicts
from research.figure8.direction import along, place_of
from research.figure8.plan import GRID, KINDS, OUTLIERS, best_rate, grid_name, results
from research.figure8.scoring import FORMATS, SCHEMES
from research.pages import raw
from research.pages.render import ends, fixed, interval, negative, signed, table

THERE = results(raw.ROOT / raw.TRAININGS)
NAMES = dict(zip(KINDS, ("Transformer", "DIFF V1", "DIFF V2"), strict=True))
DIFF = ("diff-v1", "diff-v2")
PAPER = PAPER_RATIO
# Comparisons of V1 and of V2 with the Transformer, by experiment.
GROUPS = {"e1": MAIN, "e2": LONGER, "e3": LARGER, "equal ranges": CONTROLS[2:], "large": ON_PURPOSE}
SHOWN = {
    "e1": "1.25 M parameters, 6 trainings",
    "e2": "1.25 M, three times the tokens, 3",
    "e3": "5.3 M parameters, 3",
}
MEASURES: dict[str, Measure] = {
    "primary": bits_won(PRIMARY),
    "range": range_won,
    "sensitivity": sensitivity_won,
    "perplexity": perplexity_ratio,
    **PARTS,
    **{scheme: bits_won(scheme) for scheme in SCHEMES},
    **{f"r = {ratio}": won_at_ratio(ratio) for ratio in RATIOS},
    **{name: bits_won(name, among="kl_of_formats") for name in FORMATS},
    **OF_SIZE,
}


def comparison(kind: str, group: str = "e1") -> Comparison:
    """The comparison of a kind in an experiment; controls that are not DIFF have a group of their own."""
    if group == "control":
        return next(each for each in CONTROLS if each.kind == kind)
    return GROUPS[group][DIFF.index(kind)]


def values(kind: str, measure: str = "primary", group: str = "e1") -> list[float]:
    """A measure of a kind over the Transformer, by seed."""
    return comparison(kind, group).values(THERE, MEASURES[measure])


def won(kind: str, measure: str = "primary", group: str = "e1") -> Difference:
    """Mean over trainings with its 95 % interval."""
    return mean_interval(values(kind, measure, group))


def more(kind: str, measure: str = "primary", group: str = "e1") -> Difference:
    """Bits that a kind needs more than the Transformer, which is what it wins with the other sign."""
    return negative(won(kind, measure, group))


def level(kind: str, group: str = "e1") -> Difference:
    """Ratio of ranges at which a kind wins nothing."""
    return as_ratio(comparison(kind, group).values(THERE, break_even))


def over_all(measure: str) -> tuple[float, float]:
    """Smallest and largest mean over both kinds and three experiments."""
    return ends(won(kind, measure, group).mean for group in SHOWN for kind in DIFF)


def level_ends() -> tuple[float, float]:
    """Smallest and largest ratio of ranges at which a kind wins nothing."""
    return ends(level(kind, group).mean for group in SHOWN for kind in DIFF)


def doubled_steps(*steps: int) -> tuple[float, float]:
    """Smallest and largest mean of bits won by DIFF at one step and the Transformer at another."""
    each = (comparison(kind, group) for group in SHOWN for kind in DIFF)
    return ends(fmean(of.values(THERE, won_by_steps(*steps))) for of in each)


def over_formats(operand: str) -> tuple[float, float]:
    """Smallest and largest mean of bits that DIFF needs more with an operand in FP8 or NVFP4, in E2 and E3."""
    formats = [f"{operand} e4m3:row", f"{operand} nvfp4"]
    return ends(more(kind, name, group).mean for kind in DIFF for name in formats for group in ("e2", "e3"))


def is_ratio(measure: str) -> bool:
    """Whether a measure is a ratio to the Transformer's, and no difference."""
    return "over the Transformer's" in measure


def holds_zero(mean: Difference) -> bool:
    """Whether an interval contains zero."""
    return mean.low < 0 < mean.high


# Tables


def ratios_table() -> str:
    """Bits won by the ratio of the logits' ranges."""
    rows = [
        [
            f"{NAMES[kind]}, {SHOWN[group]}",
            *(interval(won(kind, f"r = {ratio}", group), 2, True) for ratio in RATIOS),
            interval(level(kind, group)),
        ]
        for group in SHOWN
        for kind in DIFF
    ]
    return table(["bits won by DIFF", *(f"r = {ratio}" for ratio in RATIOS), "break-even r"], rows)


PRIMARY_COMPARISONS = verdicts({kind: against_zero(values(kind)) for kind in DIFF}, DIFF_VERDICTS)


def primary_table() -> str:
    """The primary comparison by seed."""
    rows = [
        [NAMES[kind], *map(signed, values(kind)), interval(mean, 2, True), f"{p:.2g}", said]
        for kind, (mean, p, said) in PRIMARY_COMPARISONS.items()
    ]
    return table([f"bits won at `{PRIMARY}`", *map(str, SIX), "mean", "p, Holm", "verdict"], rows)


ALL = {(kind, scheme): values(kind, scheme) for scheme in SCHEMES for kind in DIFF}
REMAINING = {at for at, p in zip(ALL, holm([p_value(each) for each in ALL.values()]), strict=True) if p < LEVEL}


def leads() -> set[tuple[str, str]]:
    """Kinds and schemes in which DIFF needs fewer bits on average."""
    return {at for at, each in ALL.items() if fmean(each) > 0}


MORE_BITS_LIKE_FOUR = max(
    abs(won(kind, scheme).mean - won(kind, f"4{scheme[1:]}").mean)
    for kind in DIFF
    for scheme in SCHEMES
    if scheme.startswith(("6:", "8:"))
)


def schemes_table() -> str:
    """Bits won under the schemes of 4 and 3 bits; those that Holm's correction leaves are bold."""

    def cell(kind: str, scheme: str) -> str:
        shown = interval(won(kind, scheme), 2, True)
        return f"**{shown}**" if (kind, scheme) in REMAINING else shown

    columns = [(kind, bits) for kind in DIFF for bits in (4, 3)]
    rows = [
        [f"`{each}`", *(cell(kind, f"{bits}:{each}") for kind, bits in columns)]
        for each in dict.fromkeys(scheme.partition(":")[2] for scheme in SCHEMES)
    ]
    return table(["bits won", *(f"{NAMES[kind]}, {bits} bits" for kind, bits in columns)], rows)


# Measures like a neighbouring one, which `python -m research.figure8.analysis` prints.
NOT_SHOWN = {
    "logits in steps of 2",
    "logits in steps of 4",
    "logits in steps of 8",
    "queries and keys, 4:head",
    "queries and keys, 4:row",
    "web, 4:row:shift",
    "web, 4:row",
}


def parts_table() -> str:
    """What the loss is made of, over both kinds and three experiments."""
    heads = [f"{NAMES[kind]}, {group.upper()}" for group in SHOWN for kind in DIFF]
    rows = [
        [f"`{name}`", *(interval(won(kind, name, group), 2, not is_ratio(name)) for group in SHOWN for kind in DIFF)]
        for name in PARTS
        if name not in NOT_SHOWN
    ]
    return table(["mean over trainings", *heads], rows)


def controls_table() -> str:
    """Controls over the Transformer."""
    named = {
        "half the heads, of V1's width": ("half-heads", "control"),
        "gates behind attention": ("gated", "control"),
        **{f"{NAMES[kind]}, equal ranges": (kind, "equal ranges") for kind in DIFF},
    }
    columns = ("primary", "range", "sensitivity")
    rows = [
        [
            name,
            *(interval(won(kind, column, group), 2, True) for column in columns),
            interval(won(kind, "perplexity", group), 3),
        ]
        for name, (kind, group) in named.items()
    ]
    return table(
        ["over the Transformer, 3 trainings", f"bits won at `{PRIMARY}`", "range", "sensitivity", "perplexity"], rows
    )


def rates_table() -> str:
    """Perplexity on held-out windows by learning rate."""
    rows = [
        [NAMES[kind], *(fixed(THERE[grid_name(kind, rate)]["validation"]["perplexity"]) for rate in GRID)]
        for kind in KINDS
    ]
    return table(["perplexity on held-out windows", *(f"{1000 * rate:g}e-3" for rate in GRID)], rows)


def rates() -> set[float | None]:
    """Best rates of the kinds."""
    return {best_rate(kind, THERE) for kind in KINDS}


def tops(
    kind: str, operand: str = "logits", group: str = "e1", seeds: Iterable[int] = SIX, end: str = ""
) -> list[float]:
    """Largest magnitude of each training of a kind."""
    found = (THERE[f"{group}-{kind}{end}-seed-{seed}"]["outliers"]["overall"] for seed in seeds)
    return [each[operand]["top"]["1"] for each in found]


def tops_table() -> str:
    """Largest logits and hidden states."""

    def cell(kind: str, operand: str, group: str, seeds: Iterable[int], end: str = "") -> str:
        found = tops(kind, operand, group, seeds, end)
        low, high = ends(found)
        return f"{fixed(fmean(found), 1)}, {fixed(low, 1)} to {fixed(high, 1)}"

    rows = [
        [
            NAMES[kind],
            *(cell(kind, operand, "e1", SIX) for operand in ("logits", "hidden")),
            *(cell(kind, operand, "e3", THREE) for operand in ("logits", "hidden")),
            cell(kind, "logits", "e1", THREE, OUTLIERS),
        ]
        for kind in KINDS
    ]
    heads = [
        "logit, 1.25 M",
        "hidden state, 1.25 M",
        "logit, 5.3 M",
        "hidden state, 5.3 M",
        "logit, 1.25 M at four times the rate",
    ]
    return table(["largest, mean of trainings, least to most", *heads], rows)


def largest_of_all() -> float:
    """Largest logit of any model of the comparisons that were not made to have large ones."""
    compared = (*MAIN, *CONTROLS, *LONGER, *LARGER)
    names = {name for each in compared for pair in each.names for name in pair}
    return max(THERE[name]["outliers"]["overall"]["logits"]["top"]["1"] for name in names)


def line_at(kind: str, size: str, measure: str) -> Difference:
    """A measure along the line through both sizes, at another."""
    small, large = (values(kind, measure, group) for group in ("e1", "e3"))
    sizes = [THERE[f"{group}-transformer-seed-101"]["parameters"] for group in ("e1", "e3")]
    return along(small, large, place_of(FAR[size], *sizes))


def float32_moves(kind: str) -> tuple[float, float]:
    """What float32 adds to the bits won of seed 101, and the protocol's limit."""
    [ours], [theirs] = (
        Comparison(kind, experiment=name, seeds=(101,)).values(THERE, MEASURES["primary"])
        for name in ("e1", "arithmetic")
    )
    return theirs - ours, 2 * stdev(values(kind))


def mean_kl(kind: str, scheme: str) -> float:
    """KL of a scheme in nats, the mean over passages and trainings of a kind."""
    return fmean(fmean(THERE[f"e1-{kind}-seed-{seed}"]["books"]["kl"][scheme]) for seed in SIX)


def tokens(group: str) -> float:
    """Tokens of a training, in millions."""
    return float(THERE[f"{group}-transformer-seed-101"]["tokens"]) / 1e6


# Statements of the page

DIFF_LOSES = {said for _, _, said in PRIMARY_COMPARISONS.values()} == {"DIFF loses"}
LOSES_IN_ALL_TRAININGS = all(max(values(kind)) < 0 for kind in DIFF)
COSTS_HALF_A_BIT = all(-0.75 < end < -0.35 for end in over_all("r = 1"))
WINS_TWO_BITS_AT_8 = over_all("r = 8")[0] > 2
RANGES_HARDLY_DIFFER = all(abs(bits) < 0.35 for bits in over_all("range"))
REMAINING_ARE_LOSSES = all(fmean(ALL[at]) < 0 for at in REMAINING)
LEADS_WHERE_ALIKE = leads() == {at for at in ALL if at[0] == "diff-v2" and at[1].endswith(":alike")}
RANGES_HOLD_ZERO = all(holds_zero(won(kind, "range")) for kind in DIFF)
LOSES_EVERYWHERE = over_all("primary")[1] < 0
LINE_TELLS_NOTHING = all(holds_zero(line_at(kind, "3 billion", "primary")) for kind in DIFF)
FLOAT32_IS_WITHIN = all(abs(by) <= limit for by, limit in map(float32_moves, DIFF))
HIDDEN_STATES_ARE_SMALLER = all(
    max(tops(kind, "hidden", "e3", THREE)) < min(tops("transformer", "hidden", "e3", THREE)) for kind in DIFF
)
LOGITS_ARE_NOT_SMALLER = any(
    max(tops(kind, "logits", "e3", THREE)) > min(tops("transformer", "logits", "e3", THREE)) for kind in DIFF
)
LARGE_HOLD_ZERO = all(holds_zero(won(kind, "primary", "large")) for kind in DIFF)
CONTROLS_SHOW_NOTHING = all(won(kind, "primary", "control").high > 0 for kind in ("half-heads", "gated"))
EQUAL_RANGES_LOSE = all(won(kind, "primary", "equal ranges").high < 0 for kind in DIFF)
V2_EQUALS_IN_PERPLEXITY = abs(won("diff-v2", "perplexity").mean - 1) < 0.01
E2_RANGE_WINS_V2 = won("diff-v2", "range", "e2").low > 0
