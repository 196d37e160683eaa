"""Words of research/pages/figure8-one-rate.md: shares, counts and verdicts, each computed as its figures are."""

import math
from statistics import median

from research.check.pages.figure8_one_rate import (
    AHEAD,
    CELLS,
    DIFF,
    KINDS,
    LEADS,
    NEEDLE,
    PAGE,
    PASSAGES,
    PROSE,
    PROSE1,
    beside,
    bits,
    by_book,
    errors,
    gained,
    growth,
    is_wide,
    perplexity,
    ratios,
)
from research.check.raw import measured
from research.studies.figure8_model import advantage, by_passage

SCHEMES = [f"4:{shared}" for shared in ("tensor", "map", "head", "pair", "row", "tensor:shift", "row:shift")]


def _loses_everywhere(kind: str, scheme: str) -> bool:
    """Whether a kind has more KL than the Transformer on every passage, and so on every book."""
    ours, plain = (by_passage(PASSAGES[name], PASSAGES[name]["kl"][scheme]) for name in (kind, "transformer"))
    return all(a > b for a, b in zip(ours, plain, strict=True))


_ON_EVERY_BOOK = all(by_book(kind, scheme)[1] < 0 for kind in DIFF for scheme in SCHEMES)
PAGE.means(
    "In every row DIFF loses on every book, and on each of the 16 passages",
    _ON_EVERY_BOOK
    and all(_loses_everywhere(kind, scheme) for kind in DIFF for scheme in SCHEMES)
    and PASSAGES["transformer"]["reading"]["passages"] == 16,
)
PAGE.means(
    "With one scale per tensor, as we read the paper, **DIFF loses**",
    all(bits(PASSAGES, kind, "4:tensor") < 0 for kind in DIFF),
)
PAGE.means(
    "That holds at 4 bits under every granularity that was tried, on each of four English books",
    PASSAGES["transformer"]["reading"]["books"] == 4 and _ON_EVERY_BOOK,
)


# Retrieval: V1's and V2's lead in each cell of the first training.
_V1, _V2 = LEADS.values()
PAGE.means(
    "V1 wins four, at 3 bits per tensor and per head, by 44 to 56 points, and loses one; V2 wins none and loses four",
    [row for row, lead in zip(CELLS, _V1, strict=True) if lead[1] > 0] == CELLS[6:10]
    and sum(lead[2] < 0 for lead in _V1) == 1
    and not any(lead[1] > 0 for lead in _V2)
    and sum(lead[2] < 0 for lead in _V2) == 4,
)
PAGE.means(
    "leads in two thirds of the cells, with `alike` or without, and V2 in five of twelve",
    len(CELLS) == 12
    and [len(AHEAD[place]) for place in (("diff-v1", False), ("diff-v1", True), ("diff-v2", True))] == [8, 8, 5],
)
# Sensitivity, in bits: what remains when the noise maps are exact.


def _cost(kind: str, exact_noise: bool) -> float:
    """Bits that a kind's sensitivity costs it beside the Transformer's."""
    layers = [layer["sensitivity"] for layer in PROSE[kind]["layers"]]
    ours = sum(layer["first"] + (0 if exact_noise else layer["second"]) for layer in layers)
    return math.log2(ours / sum(layer["sensitivity"]["first"] for layer in PROSE["transformer"]["layers"])) / 2


_LEFT = {kind: _cost(kind, True) / _cost(kind, False) for kind in DIFF}
PAGE.means(
    "Two thirds of V1's cost and over half of V2's remain when the noise maps are exact",
    0.62 < _LEFT["diff-v1"] < 0.71 and 0.5 < _LEFT["diff-v2"] < 0.62,
)
PAGE.means(
    "The norm adds at most a fifth",
    1.1 < max(a / b for a, b in zip(errors("diff-v1"), errors("diff-v1", "before_norm"), strict=True)) <= 1.2,
)
PAGE.means(
    "KL doubles from step 600 to the end in the Transformer and V1",
    all(1.85 < growth(kind) < 2.15 for kind in ("transformer", "diff-v1")),
)
PAGE.means("V2's largest is half the Transformer's", 0.45 < beside("diff-v2", "hidden") < 0.55)

# Rounding both maps alike


def _won_back(kind: str, scheme: str) -> float:
    """The share of a kind's loss that `alike` takes off."""
    return gained(kind, f"{scheme}:alike", scheme) / -bits(PASSAGES, kind, scheme)


_BACK = {kind: [_won_back(kind, f"4:{granularity}") for granularity in ("head", "row")] for kind in DIFF}
PAGE.means(
    "Per head and row, V1 then wins back a third to a half of its loss",
    min(_BACK["diff-v1"]) > 0.3 and max(_BACK["diff-v1"]) < 0.55,
)
PAGE.means("V2 wins back more than all of it", min(_BACK["diff-v2"]) > 1)
_ALIKE = ("4:tensor:alike", "4:head:alike", "4:row:alike")
PAGE.means(
    "V2 is then better than this Transformer at each granularity, V1 at none",
    all(bits(PASSAGES, "diff-v2", scheme) > 0 > bits(PASSAGES, "diff-v1", scheme) for scheme in _ALIKE),
)


def _of_map(kind: str, of: str) -> float:
    """What a scale for each map wins per tensor, beside what another form wins."""
    return gained(kind, "4:map") / gained(kind, of)


PAGE.means(
    "Per tensor, the second scale alone is half of what V1 gains", 0.45 < _of_map("diff-v1", "4:tensor:alike") < 0.55
)
PAGE.means("and a quarter of what V2 gains", 0.22 < _of_map("diff-v2", "4:tensor:alike") < 0.29)
PAGE.means(
    "One scale per map is already enough for all of V1's gain and half of V2's",
    0.9 < _of_map("diff-v1", "4:head") < 1.1 and 0.4 < _of_map("diff-v2", "4:head") < 0.6,
)
PAGE.means(
    "Both seeds agree on the order, on the cost of sensitivity and on V2's lead under `alike`",
    all(bits(trio, "diff-v1", "4:tensor") < bits(trio, "diff-v2", "4:tensor") < 0 for trio in (PROSE, PROSE1))
    and all(bits(trio, "diff-v2", scheme) > 0 for trio in (PROSE, PROSE1) for scheme in _ALIKE),
)
_WIDE = [each for result in PROSE.values() for each in ratios(result, is_wide)]
PAGE.means(
    "the two predict the KL of the small English models within about a quarter", min(_WIDE) > 0.74 and max(_WIDE) < 1.26
)

# Table 5, errors of a layer, retrieval in the median context


PAGE.means("V1's largest is a quarter larger than the Transformer's", 1.2 < beside("diff-v1", "logits") < 1.3)
_ERRORS = list(zip(errors("diff-v1"), errors("transformer"), strict=True))
PAGE.means(
    "there the error is almost one and a half times the Transformer's",
    1.4 < max(ours / theirs for ours, theirs in _ERRORS) < 1.5,
)
PAGE.means(
    "In its other layers V1's outputs have a *smaller* error than the Transformer's",
    sum(ours < theirs for ours, theirs in _ERRORS) == len(_ERRORS) - 1,
)


def _median(kind: str, scheme: str) -> float:
    return median(NEEDLE[kind]["kl"][scheme])


PAGE.means(
    "In the median context V1 loses less than the Transformer down to 4 bits per head or row, and more at 4 bits per "
    "tensor",
    all(
        _median("diff-v1", f"{bits}:{granularity}") < _median("transformer", f"{bits}:{granularity}")
        for bits in (8, 6, 4)
        for granularity in ("head", "row")
    )
    and _median("diff-v1", "4:tensor") > _median("transformer", "4:tensor"),
)

# Cache and weights


def _kl(kind: str, bits: int, target: str) -> float:
    return perplexity(kind, f"{bits}:row", target)["kl"]


_WEIGHTS = [[_kl(kind, bits, "weights") for kind in KINDS] for bits in (6, 4, 3)]
PAGE.means(
    "Quantized weights cost the three models about as much, V1 most",
    all(max(trio) == trio[1] and max(trio) < 1.25 * min(trio) for trio in _WEIGHTS),
)
PAGE.means(
    "V2's costs as much as the Transformer's",
    all(0.9 < _kl("diff-v2", b, "kv") / _kl("transformer", b, "kv") < 1.1 for b in (6, 4, 3)),
)
_NARROW = [
    measured("figure8-prose-stored-g32", "prose-diff-v1", f"{b}:g32").details["kl"] / _kl("diff-v1", b, "kv")
    for b in (6, 4, 3)
]
PAGE.means("So the wider scale explains a fifth of its KL", all(0.75 < ratio < 0.85 for ratio in _NARROW))
PAGE.means(
    "V1's cache needs one bit more than the others'",
    all(0.8 < advantage(_kl("transformer", b, "kv"), _kl("diff-v1", b, "kv")) < 1.2 for b in (6, 4, 3)),
)
