"""What research/pages/figure8.md says of models of 5.3 million parameters: E3 of the protocol."""

import math
from statistics import fmean

from research.check.numbers import ends
from research.check.pages.figure8 import FLOATS_OF, NAMES, OF_KIND, OF_TRAININGS, PAGE, THERE, interval_of
from research.check.raw import interval as ends_of
from research.figure8.analysis import FAR, LARGER, OF_SIZE, PARTS, PRIMARY, THREE, bits_won
from research.figure8.direction import along, moved, place_of
from research.figure8.plan import CHECKS, KINDS

_LARGER = dict(zip(OF_KIND, LARGER, strict=True))


def trained(kind: str, seed: int) -> dict:
    return THERE[f"e3-{kind}-seed-{seed}"]


# Rates

_FACTORS = {"half the rate": 0.5, "the rate": 1.0, "twice the rate": 2.0}


def _checked(row: str, column: str) -> list[float]:
    return [THERE[f"e3-{NAMES[row]}-check{CHECKS[_FACTORS[column]]}"]["validation"]["perplexity"]]


PAGE.table("perplexity on held-out windows, 8 million tokens | half the rate | the rate | twice the rate", _checked)
PAGE.means(
    "each kind predicts held-out text better at that rate than at half or at\ntwice of it",
    all(
        _checked(name, "the rate") < min(_checked(name, other) for other in _FACTORS if other != "the rate")
        for name in NAMES
    ),
)

# Bits won

WON = {name: comparison.values(THERE, bits_won(PRIMARY)) for name, comparison in _LARGER.items()}


def _won(row: str, column: str) -> list[float]:
    return interval_of(WON[row]) if column.endswith("parameters") else [WON[row][int(column) - THREE[0]]]


PAGE.table("bits won at `4:tensor` | 101 | 102 | 103 | 5.3 million parameters", _won)


def of_trainings(row: str, column: str) -> list[float]:
    return interval_of(_LARGER[column].values(THERE, OF_TRAININGS[row]))


PAGE.table("mean over three trainings of 5.3 million parameters | DIFF V1 | DIFF V2", of_trainings)

# The line through both sizes

_MEASURES = {
    "largest logit" if "logit" in name else name.replace("`", ""): measure for name, measure in OF_SIZE.items()
}
_SIZES = [THERE[f"{experiment}-transformer-seed-101"]["parameters"] for experiment in ("e1", "e3")]


def of_line(row: str, column: str) -> list[float]:
    name, _, measure = row.partition(", ")
    small, large = (comparison.values(THERE, _MEASURES[measure]) for comparison in (OF_KIND[name], _LARGER[name]))
    if column == "six trainings of 1.25 million":
        return interval_of(small)
    if column == "three of 5.3 million":
        return interval_of(large)
    if column == "ten times the parameters":
        return list(ends_of(moved(small, large, math.log10(_SIZES[1] / _SIZES[0]))))
    return list(ends_of(along(small, large, place_of(FAR[column.removeprefix("at ")], *_SIZES))))


PAGE.table(
    "over the Transformer |  | six trainings of 1.25 million | three of 5.3 million | ten times the parameters "
    "| at 135 million | at 3 billion",
    of_line,
    names=2,
)

# Table 5


def _magnitudes(row: str, column: str) -> list[float]:
    name, _, layer = row.partition(", ")
    operand, rank = column.split(", ")
    found = [trained(NAMES[name], seed)["outliers"]["layers"][int(layer) - 1][operand] for seed in THREE]
    return [fmean(each["median"] if rank == "median" else each["top"][rank.removeprefix("top ")] for each in found)]


PAGE.table(
    "mean of three trainings | layer | logits, top 1 | logits, top 10 | logits, median "
    "| hidden, top 1 | hidden, top 10 | hidden, median",
    _magnitudes,
    names=2,
)

# Sentences

_ALL = [trained(kind, seed) for kind in KINDS for seed in THREE]
LARGER_WON = {name: interval_of(won) for name, won in WON.items()}
# Bits that a kind of 5.3 million parameters needs more, with their interval.
LARGER_MORE = {name: [-won[at] for at in (0, 2, 1)] for name, won in LARGER_WON.items()}
PAGE.says("E3 trains the same seeds on {} million tokens", *{each["tokens"] / 1e6 for each in _ALL})
PAGE.says("with {} million parameters: 256 wide", _SIZES[1] / 1e6)
PAGE.says("The protocol's rule makes {}e-3 of 4e-3 for every kind", *{1000 * each["rate"] for each in _ALL})
for _text, _why in (
    ("256 wide, six layers, eight heads of 32, V1 with four pairs", "the protocol's"),
    ("about six tokens for each parameter, as in E1", "the protocol's"),
    ("makes 1.251e-3 of 4e-3", "the protocol's"),
    ("of a V1 of 5.3 million parameters", "a size"),
    ("of the six trainings of 1.25 million and of the three of 5.3 million", "sizes"),
    ("V1 also has two pairs at the smaller size and four at the larger", "the protocol's"),
    ("V1 has two pairs, or four with 5.3 million parameters", "the protocol's"),
):
    PAGE.leaves(_text, _why)
PAGE.says(
    "V1 {} [{}, {}] bits and V2 {} [{}, {}], over three trainings of 5.3 million",
    *(x for more in LARGER_MORE.values() for x in more),
)
for _words in (
    "**With four times the parameters both lose too**",
    "Both kinds lose at `4:tensor` in each of the three trainings here too",
):
    PAGE.means(_words, all(max(won) < 0 for won in WON.values()))
PAGE.means("and neither interval holds zero", all(high < 0 for _, _, high in LARGER_WON.values()))
_RANGE, _SENSITIVITY = (f"{PRIMARY}, from the {part}" for part in ("range", "sensitivity"))
PAGE.says(
    "Both losses are ones of sensitivity: {} [{}, {}] bits of it in V1 and {} [{}, {}] in V2",
    *(-of_trainings(_SENSITIVITY, name)[at] for name in OF_KIND for at in (0, 2, 1)),
)
PAGE.says(
    "The\nrange wins V1 {} [{}, {}] and V2 {} [{}, {}]", *(x for name in OF_KIND for x in of_trainings(_RANGE, name))
)
PAGE.means(
    "Both losses are ones of sensitivity",
    all(of_trainings(_SENSITIVITY, name)[2] < 0 < of_trainings(_RANGE, name)[0] for name in OF_KIND),
)


def _holds_zero(row: str, name: str) -> bool:
    _, low, high = of_trainings(row, name)
    return low < 0 < high


PAGE.means("and both intervals hold zero. Logits", all(_holds_zero(_RANGE, name) for name in OF_KIND))
PAGE.means(
    "Logits in e4m3, NVFP4 or MXFP4 cost both kinds more than\nthe Transformer",
    all(of_trainings(row, name)[2] < 0 for row in FLOATS_OF["logits"] for name in OF_KIND),
)
_QK = FLOATS_OF["qk"]
PAGE.means(
    "Of queries and keys in those\nformats V1 loses about half a bit, as three of its four intervals tell",
    all(abs(of_trainings(row, "DIFF V1")[0] + 0.5) < 0.1 for row in _QK)
    and [_holds_zero(row, "DIFF V1") for row in _QK].count(False) == 3
    and len(_QK) == 4,
)
PAGE.means(
    "V2's four hold zero, and so do both kinds' at 4 bits",
    all(_holds_zero(row, "DIFF V2") for row in _QK)
    and all(_holds_zero(row, name) for row in PARTS if row.startswith("queries") for name in OF_KIND),
)

_TENFOLD = {name: of_line(f"{name}, bits won at {PRIMARY}", "ten times the parameters") for name in OF_KIND}
PAGE.says(
    "Ten times the parameters move V1's bits by {} [{}, {}] and V2's by {} [{}, {}]",
    *(x for each in _TENFOLD.values() for x in each),
)
_RATIOS = ("perplexity", "largest logit")


def _told(name: str, measure: str) -> int:
    """On which side of the Transformer the line's interval at 3 billion lies, or 0 where that does not tell."""
    _, low, high = (end - (measure in _RATIOS) for end in of_line(f"{name}, {measure}", "at 3 billion"))
    return int(low > 0) - int(high < 0)


_TOLD = {(name, measure): side for name in OF_KIND for measure in _MEASURES if (side := _told(name, measure))}
_OF_PERPLEXITY = {("DIFF V1", "perplexity"): -1, ("DIFF V2", "perplexity"): 1}
for _words in (
    "At 3 billion only perplexity is told from the Transformer's: the line reads V1's below it and V2's above",
    "All intervals of bits won, range, sensitivity and the largest logit hold zero difference there",
    "A line through both sizes does not tell what models of 3 billion do",
):
    PAGE.means(_words, _TOLD == _OF_PERPLEXITY)


def _tops(what: str) -> dict[str, list[float]]:
    """Largest magnitude of each training, by kind."""
    return {
        name: [trained(kind, seed)["outliers"]["overall"][what]["top"]["1"] for seed in THREE]
        for name, kind in NAMES.items()
    }


_LOGITS, _HIDDEN = _tops("logits"), _tops("hidden")
PAGE.says("The largest logit of the nine is {}, of a V1", max(_LOGITS["DIFF V1"]))
PAGE.means("of a V1, so that these models are not", max(_LOGITS, key=lambda name: max(_LOGITS[name])) == "DIFF V1")
PAGE.means(
    "and no kind has smaller ones in all three trainings",
    len({min(NAMES, key=lambda name: _LOGITS[name][at]) for at in range(len(THREE))}) > 1,
)
PAGE.says(
    "their largest is {} to {} in V1 and {} to {} in V2, where the Transformer has {} to {}",
    *(x for name in ("DIFF V1", "DIFF V2", "Transformer") for x in ends(_HIDDEN[name])),
)
PAGE.means("Hidden states do agree with\nit", all(max(_HIDDEN[name]) < min(_HIDDEN["Transformer"]) for name in OF_KIND))
