"""The figures of research/pages/figure8.md, computed as the analysis of the trainings computes them."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean, stdev

from diffquant.evals.stats import mean_interval
from research.check import raw
from research.check.numbers import ends
from research.check.page import Page
from research.figure8.analysis import (
    CONTROLS,
    LARGER,
    LEVEL,
    LONGER,
    MAIN,
    OF_CONTROLS,
    ON_PURPOSE,
    PARTS,
    PRIMARY,
    SIX,
    THREE,
    Comparison,
    Measure,
    bits_won,
    holm,
    largest_logit_ratio,
    p_value,
    perplexity_ratio,
    range_won,
    sensitivity_won,
    verdict,
)
from research.figure8.plan import GRID, KINDS, OUTLIERS, best_rate, grid_name, results
from research.figure8.scoring import BITS, FORMATS, SCHEMES

PAGE = Page("research/pages/figure8.md")
THERE = results()
NAMES = dict(zip(("Transformer", "DIFF V1", "DIFF V2"), KINDS, strict=True))
OF_KIND = dict(zip(list(NAMES)[1:], MAIN, strict=True))


def values(name: str, measure: Measure) -> list[float]:
    """A measure of a DIFF kind against the Transformer, by seed."""
    return OF_KIND[name].values(THERE, measure)


def interval(name: str, measure: Measure) -> list[float]:
    """Mean and 95 % interval over trainings."""
    return interval_of(values(name, measure))


def interval_of(found: list[float]) -> list[float]:
    return list(raw.interval(mean_interval(found)))


# Rates

RATES = {f"{rate * 1000:g}e-3": rate for rate in GRID}
PAGE.table(
    "perplexity on held-out windows | 1e-3 | 2e-3 | 4e-3 | 8e-3",
    lambda row, column: [THERE[grid_name(NAMES[row], RATES[column])]["validation"]["perplexity"]],
)
PAGE.means("All three kinds do best at 4e-3", {best_rate(kind, THERE) for kind in KINDS} == {4e-3})

# The primary comparisons

WON = {name: values(name, bits_won(PRIMARY)) for name in OF_KIND}
P = dict(zip(WON, holm([p_value(each) for each in WON.values()]), strict=True))
VERDICTS = {name: verdict(fmean(won), P[name]) for name, won in WON.items()}
# Bits that a kind needs more, with their interval: what it wins, with the other sign.
MORE = {name: [-won[at] for at in (0, 2, 1)] for name in WON for won in [interval(name, bits_won(PRIMARY))]}


def primary(row: str, column: str) -> list[float] | str:
    if column == "verdict":
        return VERDICTS[row]
    if column == "mean":
        return interval(row, bits_won(PRIMARY))
    return [P[row]] if column == "p, Holm" else [WON[row][int(column) - 101]]


PAGE.table("bits won at `4:tensor` | 101 | 102 | 103 | 104 | 105 | 106 | mean | p, Holm | verdict", primary)

# All schemes

ALL = {(name, scheme): values(name, bits_won(scheme)) for scheme in SCHEMES for name in OF_KIND}
LEADS_WHERE_ALIKE = all(
    (fmean(won) > 0) == (name == "DIFF V2" and scheme.endswith(":alike")) for (name, scheme), won in ALL.items()
)
REMAINING = {at for at, p in zip(ALL, holm([p_value(each) for each in ALL.values()]), strict=True) if p < LEVEL}


def _of_schemes(name: str) -> Callable[[str, str], list[float]]:
    return lambda row, column: interval(name, bits_won(f"{column.split()[0]}:{row}"))


for _name in OF_KIND:
    PAGE.table(f"{_name}, bits won | 8 bits | 6 bits | 4 bits | 3 bits", _of_schemes(_name))

# What the loss is made of

PAGE.table("mean over six trainings | DIFF V1 | DIFF V2", lambda row, column: interval(column, PARTS[row]))

# Controls

_CONTROLS = dict(
    zip(
        ("half the heads, of V1's width", "gates behind attention", *(f"{name}, equal ranges" for name in OF_KIND)),
        CONTROLS,
        strict=True,
    )
)


def control(row: str, column: str) -> list[float]:
    return interval_of(_CONTROLS[row].values(THERE, OF_CONTROLS[column]))


PAGE.table("over the Transformer, three trainings | bits won at `4:tensor` | range | sensitivity | perplexity", control)
PAGE.says(
    "no second map wins {} [{}, {}] bits, and one with gates behind attention {} [{}, {}]",
    *(x for row in list(_CONTROLS)[:2] for x in control(row, "bits won at `4:tensor`")),
)
_EQUAL = {name: control(f"{name}, equal ranges", "bits won at `4:tensor`") for name in WON}
PAGE.says("V1 needs {} [{}, {}] bits more and V2 {} [{}, {}]", *(-x[at] for x in _EQUAL.values() for at in (0, 2, 1)))


def _missed(comparison: Comparison) -> float:
    """By how much the parts of range and sensitivity miss the bits won that they are parts of."""
    won, *parts = (fmean(comparison.values(THERE, m)) for m in (bits_won(PRIMARY), range_won, sensitivity_won))
    return abs(sum(parts) - won)


_MISSED = [_missed(comparison) for comparison in CONTROLS[2:]]
PAGE.says("they miss V1's bits won by {} and V2's by {}", *_MISSED)
PAGE.means(
    "The two parts add up less well there than elsewhere",
    min(_MISSED) > max(_missed(comparison) for comparison in (*MAIN, *CONTROLS[:2], *LONGER)),
)
# The protocol's sixth result: an interval that holds zero and leaves out the primary mean.
PAGE.means(
    "[equal ranges](#controls)",
    not any(low < 0 < high and not low <= fmean(WON[name]) <= high for name, (_, low, high) in _EQUAL.items()),
)

# Large logits on purpose

_MAGNITUDES = {"largest logit": ("logits", "1"), "largest hidden state": ("hidden", "1")}


def _on_purpose(row: str, column: str) -> list[float]:
    name, seed = row.split(", seed ")
    found = THERE[f"e1-{NAMES[name]}{OUTLIERS}-seed-{seed}"]
    if column == "perplexity":
        return [found["validation"]["perplexity"]]
    if column.startswith("KL"):
        return [fmean(found["books"]["kl"][column.split("`")[1]])]
    operand, rank = _MAGNITUDES[column]
    return [found["outliers"]["overall"][operand]["top"][rank]]


PAGE.table(
    "trained at four times the best rate | largest logit | largest hidden state | perplexity "
    "| KL, nats, `8:tensor` | KL, nats, `4:tensor` | KL, nats, `4:row:shift`",
    _on_purpose,
)
_LARGE = dict(zip(list(NAMES)[1:], ON_PURPOSE, strict=True))
_OF_LARGE: dict[str, Measure] = {
    **{f"{bits}:tensor": bits_won(f"{bits}:tensor") for bits in BITS},
    **{scheme: bits_won(scheme) for scheme in ("8:row", "6:row", "4:row", "4:row:shift")},
    **{f"logits in steps of {step}": bits_won(step, among="kl_of_steps") for step in ("1", "2", "4", "8")},
    "largest logit over the Transformer's": largest_logit_ratio,
    "perplexity over the Transformer's": perplexity_ratio,
}


def _of_large(row: str, column: str) -> list[float]:
    return interval_of(_LARGE[column].values(THERE, _OF_LARGE[row]))


PAGE.table("bits won over the Transformer of that rate, three trainings | DIFF V1 | DIFF V2", _of_large)
_LARGEST_OF_TRANSFORMER = [_on_purpose(f"Transformer, seed {seed}", "largest logit")[0] for seed in THREE]
PAGE.says("and here it has {}, {} and {}", *_LARGEST_OF_TRANSFORMER)
_WON_LARGE = {name: _of_large(PRIMARY, name) for name in _LARGE}
for _words in (
    "V1 wins {} [{}, {}] bits over the Transformer at `4:tensor`, and V2 {} [{}, {}]",
    "V1 wins {} [{}, {}] bits there and V2 {} [{}, {}]",
):
    PAGE.says(_words, *(x for each in _WON_LARGE.values() for x in each))
PAGE.says("at `8:tensor` ({} [{}, {}] bits)", *_of_large("8:tensor", "DIFF V2"))
_OF_BITS = [row for row in _OF_LARGE if "Transformer's" not in row]
PAGE.means("Of the\ntwelve rows of bits", len(_OF_BITS) == 12)
PAGE.means(
    "V2's interval lies above zero in four, at `8:tensor` (0.55 [0.17, 0.94] bits), `8:row`, `6:row` and in steps of 8",
    {row for row in _OF_BITS if _of_large(row, "DIFF V2")[1] > 0}
    == {"8:tensor", "8:row", "6:row", "logits in steps of 8"},
)
PAGE.means(
    "V1's below\nzero in six: `4:row`, `4:row:shift` and all fixed steps",
    {row for row in _OF_BITS if _of_large(row, "DIFF V1")[2] < 0}
    == {"4:row", "4:row:shift", *(row for row in _OF_BITS if "steps" in row)},
)


def _dearer(kind: str) -> float:
    """Perplexity at four times the best rate over that at the best, the mean of three trainings."""
    return fmean(
        perplexity_ratio(THERE[f"e1-{kind}{OUTLIERS}-seed-{seed}"], THERE[f"e1-{kind}-seed-{seed}"]) for seed in THREE
    )


_DEARER = {kind: _dearer(kind) for kind in KINDS}
PAGE.means(
    "it costs perplexity, V2 least", min(_DEARER, key=_DEARER.__getitem__) == "diff-v2" and min(_DEARER.values()) > 1
)


def _medians(kind: str, seeds: Iterable[int]) -> list[float]:
    """Median magnitude of each training's logits."""
    return [THERE[f"e1-{kind}-seed-{seed}"]["outliers"]["overall"]["logits"]["median"] for seed in seeds]


def _widest_step(kind: str, seed: int) -> float:
    """Step of the layer whose step is the widest, the root mean square over sequences."""
    layers = THERE[f"e1-{kind}{OUTLIERS}-seed-{seed}"]["books"]["layers"]
    return math.sqrt(12 * max(variance for layer in layers for variance in layer["errors"][PRIMARY]["variance"]))


_EARLY = KINDS[:2]
PAGE.says(
    "with medians of {} to {} where six trainings at the best\nrate have {} to {}; V2's, of {} to {}, are not",
    *ends(x for kind in _EARLY for x in _medians(kind + OUTLIERS, THREE)),
    *ends(x for kind in _EARLY for x in _medians(kind, SIX)),
    *ends(_medians("diff-v2" + OUTLIERS, THREE)),
)
PAGE.says(
    "has one of {} to {} in the Transformer, {} to {} in V1 and {} to {} in V2",
    *(x for kind in KINDS for x in ends(_widest_step(kind, seed) for seed in THREE)),
)
PAGE.leaves("its largest logit must exceed 100", "the protocol's")
for _words in ("Both intervals hold zero", "which decide nothing"):
    PAGE.means(_words, all(low < 0 < high for _, low, high in _WON_LARGE.values()))
PAGE.says(
    "its largest logit is {} [{}, {}] of the Transformer's. V1's is {} [{}, {}]",
    *(x for name in ("DIFF V2", "DIFF V1") for x in _of_large("largest logit over the Transformer's", name)),
)
PAGE.means(
    "four times the best rate, which makes logits large",
    all(
        THERE[f"e1-{kind}{OUTLIERS}-seed-{seed}"]["rate"] == 4 * THERE[f"e1-{kind}-seed-{seed}"]["rate"]
        for seed in THREE
        for kind in KINDS
    )
    and min(_LARGEST_OF_TRANSFORMER) > 100,
)

# Three times the tokens

_LONGER = dict(zip(OF_KIND, LONGER, strict=True))


def _of_tokens(row: str, column: str) -> list[float]:
    after, before = (
        comparison.values(THERE, bits_won(PRIMARY))
        for comparison in (_LONGER[row], replace(_LONGER[row], experiment="e1"))
    )
    found = {
        "22 million tokens": after,
        "7.4 million tokens": before,
        "moved by": [x - y for x, y in zip(after, before, strict=True)],
    }
    return interval_of(found[column]) if column in found else [after[int(column) - 101]]


PAGE.table(
    "bits won at `4:tensor` | 101 | 102 | 103 | 22 million tokens | 7.4 million tokens | moved by",
    _of_tokens,
)
OF_TRAININGS = {**PARTS, **{name: bits_won(name, among="kl_of_formats") for name in FORMATS}}


def _of_longer(row: str, column: str) -> list[float]:
    return interval_of(_LONGER[column].values(THERE, OF_TRAININGS[row]))


PAGE.table("mean over three trainings of 22 million tokens | DIFF V1 | DIFF V2", _of_longer)

LONGER_WON = {name: _of_tokens(name, "22 million tokens") for name in OF_KIND}
# Bits that a kind needs more after three times the tokens, with their interval.
LONGER_MORE = {name: [-won[at] for at in (0, 2, 1)] for name, won in LONGER_WON.items()}
FLOATS_OF = {target: [name for name in FORMATS if re.match(rf"{target} [a-z]", name)] for target in ("logits", "qk")}
_RATES = {THERE[f"e2-{kind}-seed-{seed}"]["rate"] for kind in KINDS for seed in THREE}
PAGE.says("at {}e-3 for every kind", *(1000 * rate for rate in _RATES))
PAGE.leaves("makes of 4e-3", "the protocol's")
PAGE.says("trains seeds 101 to 103 on {} million tokens", THERE["e2-transformer-seed-101"]["tokens"] / 1e6)
PAGE.says("V1 by {} [{}, {}] bits and V2 by {} [{}, {}]", *(x for more in LONGER_MORE.values() for x in more))
for _words in (
    "**With three times the tokens both lose on average**",
    "Both kinds lose at `4:tensor` in each of the three trainings",
):
    PAGE.means(_words, all(_of_tokens(name, str(seed))[0] < 0 for name in OF_KIND for seed in THREE))
for _words in ("V2's interval holds zero", "whose interval holds zero"):
    PAGE.means(_words, LONGER_WON["DIFF V2"][1] < 0 < LONGER_WON["DIFF V2"][2])
PAGE.means(
    "the last column holds\nzero widely",
    all(low < -0.2 and high > 0.2 for _, low, high in (_of_tokens(name, "moved by") for name in OF_KIND)),
)
_LONGER_RANGE, _LONGER_SENSITIVITY = (f"{PRIMARY}, from the {part}" for part in ("range", "sensitivity"))
LONGER_V2_RANGE = _of_longer(_LONGER_RANGE, "DIFF V2")
PAGE.says(
    "a smaller range wins it {} [{}, {}] bits, and its sensitivity costs {} [{}, {}]",
    *LONGER_V2_RANGE,
    *(-_of_longer(_LONGER_SENSITIVITY, "DIFF V2")[at] for at in (0, 2, 1)),
)
PAGE.says("V1's range wins {} [{}, {}], so that its loss is one of", *_of_longer(_LONGER_RANGE, "DIFF V1"))
_RATIO = "perplexity over the Transformer's"
PAGE.means(
    "V1 comes closer to the Transformer's perplexity, and V2 no longer equals it",
    _of_longer(_RATIO, "DIFF V1")[2] < fmean(values("DIFF V1", perplexity_ratio))
    and _of_longer(_RATIO, "DIFF V2")[1] > 1.01,
)
PAGE.means(
    "Logits in e4m3,\nNVFP4 or MXFP4 cost both kinds more than the Transformer",
    all(_of_longer(row, name)[2] < 0 for row in FLOATS_OF["logits"] for name in OF_KIND),
)
PAGE.means(
    "Queries and keys in those formats cost V1 three quarters of a bit and V2 a tenth",
    all(
        abs(_of_longer(row, name)[0] + cost) < 0.1
        for name, cost in (("DIFF V1", 0.75), ("DIFF V2", 0.1))
        for row in FLOATS_OF["qk"]
    ),
)
PAGE.means(
    "which two of its four intervals\ndo not tell from none",
    sum(_of_longer(row, "DIFF V2")[2] > 0 for row in FLOATS_OF["qk"]) == 2 and len(FLOATS_OF["qk"]) == 4,
)
PAGE.means(
    "Softmax weights of 8 bits cost V1 about what they cost the Transformer",
    abs(_of_longer("p 8:row", "DIFF V1")[0]) < 0.05,
)
PAGE.says("and V2 {} bits more; in e4m3", -_of_longer("p 8:row", "DIFF V2")[0])
PAGE.says("in e4m3 V1 loses {} bits and V2 {}", *(-_of_longer("p e4m3:row", name)[0] for name in OF_KIND))

# Outliers


def largest(kind: str, what: str) -> list[float]:
    """Largest magnitude of each training of a kind."""
    operand, rank = _MAGNITUDES[what]
    return [THERE[f"e1-{kind}-seed-{seed}"]["outliers"]["overall"][operand]["top"][rank] for seed in SIX]


def _extremes(row: str, column: str) -> list[float]:
    found = largest(NAMES[row], column)
    return [fmean(found), *ends(found)]


PAGE.table("mean of six trainings, least to most | largest logit | largest hidden state", _extremes)

# Arithmetic


def moved(name: str) -> tuple[float, float]:
    """What float32 adds to the bits won of seed 101, and the protocol's limit: twice the deviation over seeds."""
    ours, theirs = (replace(OF_KIND[name], experiment=each, seeds=(101,)) for each in ("e1", "arithmetic"))
    (a,), (b,) = (each.values(THERE, bits_won(PRIMARY)) for each in (ours, theirs))
    return b - a, 2 * stdev(WON[name])


PAGE.says("Trained in float32, seed 101 moves by {} bits (V1) and {} (V2)", *(moved(name)[0] for name in WON))
PAGE.says("twice the standard deviation over the seeds, is {} and {}", *(moved(name)[1] for name in WON))
PAGE.means("the arithmetic\ndoes not matter", all(abs(by) <= limit for by, limit in map(moved, WON)))

# Sentences

PAGE.says(
    "V1 needs {} [{}, {}] bits more than the Transformer, and V2 needs\n{} [{}, {}]", *MORE["DIFF V1"], *MORE["DIFF V2"]
)
PAGE.means("so here DIFF loses.**", {*VERDICTS.values()} == {"DIFF loses"})
PAGE.means(
    "**At 4 bits with one scale per tensor both kinds lose in each of the six trainings.**",
    all(len(won) == 6 and max(won) < 0 for won in WON.values()),
)
PAGE.says("are {} secondary comparisons; {} remain at", len(ALL), len(REMAINING))
PAGE.leaves("remain at 5 % by Holm's correction", "a level")
PAGE.means("and all of them are losses", all(fmean(ALL[at]) < 0 for at in REMAINING))
PAGE.means(
    "V2's at `4:tensor`, which is certain as one of two comparisons, is not among them",
    ("DIFF V2", PRIMARY) not in REMAINING,
)
PAGE.means(
    "V1 loses on average in every scheme. V2 leads on average only where both maps are rounded alike",
    LEADS_WHERE_ALIKE,
)
PAGE.means(
    "V1 loses on average in every scheme below, and V2 in\n  all but those that round both maps alike",
    LEADS_WHERE_ALIKE,
)
PAGE.says(
    "by {} [{}, {}] bits at `4:tensor:alike` and {} [{}, {}] at `4:head:alike`",
    *interval("DIFF V2", bits_won("4:tensor:alike")),
    *interval("DIFF V2", bits_won("4:head:alike")),
)
_SENSITIVITY = {name: interval(name, sensitivity_won) for name in WON}
PAGE.says(
    "which costs V1 {} [{}, {}] bits and V2 {} [{}, {}]",
    *(-mean[at] for mean in _SENSITIVITY.values() for at in (0, 2, 1)),
)
PAGE.means(
    "The part\n  of the range has either sign, and its intervals contain zero",
    all(min(values(name, range_won)) < 0 < max(values(name, range_won)) for name in WON)
    and all(low < 0 < high for _, low, high in (interval(name, range_won) for name in WON)),
)
PAGE.means(
    "Rounded to fixed steps, where the range plays no part, both lose as well",
    all(interval(name, bits_won(step, among="kl_of_steps"))[2] < 0 for name in WON for step in ("1", "2", "4", "8")),
)
PAGE.says(
    "the losses are on average the same within {} bits at `4:tensor`",
    max(abs(fmean(values(name, bits_won(PRIMARY, "web"))) - fmean(WON[name])) for name in WON),
)
PAGE.says("V1 is the weaker model here, by {} % of perplexity", 100 * (fmean(values("DIFF V1", perplexity_ratio)) - 1))
PAGE.means("V2 equals the Transformer", abs(fmean(values("DIFF V2", perplexity_ratio)) - 1) < 0.01)


def mean_kl(kind: str, scheme: str) -> float:
    """KL of a scheme in nats, the mean over passages and trainings of a kind."""
    return fmean(fmean(THERE[f"e1-{kind}-seed-{seed}"]["books"]["kl"][scheme]) for seed in range(101, 107))


PAGE.says(
    "4 bits cost the Transformer {}, V1 {} and V2 {} nats", *(mean_kl(kind, "4:row:shift") for kind in NAMES.values())
)
# Whatever is compared and was not made to have large logits.
_COMPARED = {name for each in (*MAIN, *CONTROLS, *LONGER, *LARGER) for pair in each.names for name in pair}
_LARGEST = {name: THERE[name]["outliers"]["overall"]["logits"]["top"]["1"] for name in _COMPARED}
PAGE.says("here the largest of any\n  model is {}", max(_LARGEST.values()))
PAGE.means("of a V1 of 5.3 million parameters", max(_LARGEST, key=_LARGEST.__getitem__).startswith("e3-diff-v1-"))
PAGE.says(
    "trained at that rate with seeds 101 to 106, on {} million tokens",
    THERE["e1-transformer-seed-101"]["tokens"] / 1e6,
)
for _text, _why in (
    ("*At 1.25 million parameters it does not: DIFF loses*", "what the page said before"),
    ("models of 1.25 million parameters and windows of 256, trained on 7.4 million tokens", "sizes"),
    ("of [22 million tokens](#three-times-the-tokens) and of [5.3 million", "sizes"),
    ("models of 3 billion", "the protocol's"),
    ("the 28 of the paper's 3 B model", "the paper's"),
    ("five or six layers here", "sizes"),
    ("six trainings of each kind with 1.25 million parameters", "sizes"),
    ("Intervals are 95 %", "a level"),
    ("with less loss at 4 bits of weights and activations", "its authors'"),
    ("trains with 4-bit attention", "its authors'"),
    ("fixed steps of 1 to 8", "settings"),
    ("bars are 95 % intervals", "a level"),
    ("Means and 95 % intervals", "a level"),
    ("stays below 0.05 by Holm's correction for 72", "a level"),
    ("has logits up to 318, its DIFF up to 38.8", "the paper's"),
):
    PAGE.leaves(_text, _why)
