"""The figures of research/pages/figure8-one-rate.md."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from diffquant.evals.stats import mean_interval, paired_difference
from research.check.numbers import About, Expected, ends
from research.check.page import Page, Unmeasured, Values
from research.check.pages import figure8
from research.check.pages.pocket import accuracy
from research.check.raw import interval, measured, points, raw, values_of
from research.figure8.analysis import SIX, perplexity_ratio, sensitivity_won
from research.studies.figure8_model import advantage_by_book, bits_won, by_passage, mean_kl, parts_won, predicted

PAGE = Page("research/pages/figure8-one-rate.md")
KINDS = ("transformer", "diff-v1", "diff-v2")
DIFF = KINDS[1:]
PROSE, PASSAGES, PROSE1, NEEDLE, AT600, AT1200 = (
    {kind: raw(f"{place}{kind}{end}.json") for kind in KINDS}
    for place, end in (
        ("figure8-prose-kl/prose-", ""),
        ("figure8-passages/prose-", ""),
        ("figure8-prose-kl-seed-1/prose-", ""),
        ("figure8-needle-kl/needle-", ""),
        ("figure8-training/", "-600"),
        ("figure8-training/", "-1200"),
    )
)
SMOLLM2 = raw("figure8-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf.json")
Trio = dict[str, Any]


def kind_of(column: str) -> str:
    """The kind of model that a column's head names."""
    return "transformer" if column.startswith("Transformer") else f"diff-{column.removeprefix('DIFF ')[:2].lower()}"


def bits(trio: Trio, kind: str, scheme: str) -> float:
    """Bits won over the Transformer by measured KL."""
    return bits_won(trio[kind], trio["transformer"], scheme)


def split(trio: Trio, kind: str) -> tuple[float, float]:
    """Bits won per tensor by range and by sensitivity."""
    return parts_won(trio[kind], trio["transformer"], "4:tensor")


def change(kind: str, scheme: str) -> tuple[float, float, float]:
    """The paired difference of KL from the Transformer's over passages, with its interval."""
    of_kinds = (by_passage(PASSAGES[each], PASSAGES[each]["kl"][scheme]) for each in (kind, "transformer"))
    return interval(paired_difference(*of_kinds))


def by_book(kind: str, scheme: str) -> tuple[float, float]:
    """Least and largest number of bits won on a book."""
    return ends(advantage_by_book(PASSAGES[kind], PASSAGES["transformer"], scheme))


# Table 5

_OUTLIERS = {
    model["name"]: model["overall"]
    for file in ("figure8-outliers", "smollm2-outliers")
    for model in raw(f"{file}/outliers.json")["models"]
}


def outliers(row: str) -> list[Values]:
    if row.startswith("the paper"):
        return [Unmeasured("the paper's Table 5")] * 6
    magnitudes = _OUTLIERS["SmolLM2-135M-Instruct.Q4_1.gguf" if row == "SmolLM2-135M" else row]
    of_operands = (magnitudes[operand] for operand in ("logits", "hidden"))
    return [[value] for each in of_operands for value in (each["top"]["1"], each["top"]["10"], each["median"])]


PAGE.rows(" | logits, top 1 | top 10 | median | hidden, top 1 | top 10 | median", outliers)


def beside(kind: str, operand: str) -> float:
    """A kind's largest magnitude over the Transformer's."""
    ours, plain = (_OUTLIERS[f"prose-{each}"][operand]["top"]["1"] for each in (kind, "transformer"))
    return float(ours / plain)


PAGE.says("V1's largest is {} and V2's {} of the Transformer's", *(beside(kind, "hidden") for kind in DIFF))
PAGE.says("(the paper: {})", 1688.2 / 3608.6)


def _beside_by_layer(kind: str, operand: str) -> list[float]:
    """A kind's largest magnitude over the Transformer's, layer by layer."""
    by_name = {model["name"]: model["layers"] for model in raw("figure8-outliers/outliers.json")["models"]}
    ours, plain = ([layer[operand]["top"]["1"] for layer in by_name[f"prose-{x}"]] for x in (kind, "transformer"))
    return [a / b for a, b in zip(ours, plain, strict=True)]


_OF_V1 = _beside_by_layer("diff-v1", "logits")
PAGE.says("in the other layers its largest is {} to {} of the Transformer's", *ends([*_OF_V1[:1], *_OF_V1[2:]]))
PAGE.means(
    "both are smaller in every layer", all(share < 1 for kind in DIFF for share in _beside_by_layer(kind, "hidden"))
)


def _needle_hidden(file: str) -> list[float]:
    by_kind = {model["generation"]: model["overall"]["hidden"]["top"]["1"] for model in raw(file)["models"]}
    return [by_kind[kind] for kind in ("Transformer", "DIFF V1", "DIFF V2")]


PAGE.says(
    "the largest hidden states are {} (Transformer), {} (V1) and {} (V2), and of a second seed {}, {} and {}",
    *_needle_hidden("pocket-needle-outliers/outliers.json"),
    *_needle_hidden("pocket-needle-seed-1/outliers.json"),
)
PAGE.says("in the noise map of a layer with λ = {};", PROSE["diff-v1"]["layers"][1]["lam"]["mean"])
PAGE.says("a hundred times as large, reach {}.", _OUTLIERS["SmolLM2-135M-Instruct.Q4_1.gguf"]["logits"]["top"]["1"])

# Figure 8, perplexity and KL


def perplexity(kind: str, scheme: str, target: str = "logits") -> dict[str, float]:
    folder = "figure8-prose" if target == "logits" else "figure8-prose-stored"
    return measured(folder, f"prose-{kind}", scheme, target=target).details


def _rise_and_kl(row: str, column: str) -> list[Expected]:
    kind = kind_of(column)
    rounded, full = perplexity(kind, row), perplexity(kind, "16")
    return [100 * (rounded["perplexity"] / full["perplexity"] - 1), rounded["kl"]]


PAGE.table("logits | Transformer | DIFF V1 | DIFF V2", _rise_and_kl, row="6:tensor")
PAGE.says("is {} (Transformer), {} (V1) and {} (V2): V1", *(perplexity(kind, "16")["perplexity"] for kind in KINDS))


def _won(row: str) -> list[Values]:
    scheme = f"4:{row}"
    return [
        cell for kind in DIFF for cell in ([bits(PASSAGES, kind, scheme)], by_book(kind, scheme), change(kind, scheme))
    ]


PAGE.rows("logits | V1, bits | by book | KL | V2, bits | by book | KL", _won)
_BEFORE = ("tensor", "head", "pair", "row", "tensor:shift", "row:shift")
PAGE.says(
    "gave {}, {}, {}, {}, {} and {} for V1 (without `map`) and {}, {}, {}, {}, {} and {} for V2",
    *(bits(PROSE, kind, f"4:{granularity}") for kind in DIFF for granularity in _BEFORE),
)


def gained(kind: str, scheme: str, less: str = "4:tensor") -> float:
    """Bits that a scheme wins more than another."""
    return bits(PASSAGES, kind, scheme) - bits(PASSAGES, kind, less)


PAGE.says("more than the Transformer, by {} bits (V1) and {} (V2)", *(gained(kind, "4:head") for kind in DIFF))
PAGE.says(
    "V1 needs {} to {} bits more than the Transformer, V2 {} to {}",
    *(end for kind in DIFF for end in ends(-bits(PASSAGES, kind, f"4:{granularity}") for granularity in _BEFORE)),
)

# Figure 8, retrieval


_ALIKE = "figure8-needle-alike"


def _retrieved(row: str, column: str) -> list[Expected]:
    model = f"needle-{kind_of(column)}"
    return [accuracy(_ALIKE if "alike" in scheme else "pocket-needle", model, scheme, 4) for scheme in row.split(" → ")]


PAGE.table("logits | Transformer | DIFF V1 | DIFF V2", _retrieved, row="4:head")


# The folders that have the plain schemes and those with `alike`, of the first training and of the second.
_AGAIN = f"{_ALIKE}-seed-1"
FIRST, SECOND = ("pocket-needle", _ALIKE), (_AGAIN, _AGAIN)


def _schemes_and_needles(row: str) -> tuple[list[str], str]:
    """A row's plain scheme and the one under `alike`, and the number of needles."""
    schemes, _, needles = row.rpartition(", ")
    return schemes.split(" → "), needles


def _scores(row: str, kind: str, folders: tuple[str, str]) -> list[float]:
    schemes, needles = _schemes_and_needles(row)
    cells = zip(folders, schemes, strict=True)
    return [accuracy(folder, f"needle-{kind}", scheme, int(needles)) for folder, scheme in cells]


def lead(row: str, kind: str, folder: str, is_alike: bool = True) -> tuple[float, float, float]:
    """Points that a kind, under `alike` or plain, is ahead of the Transformer."""
    schemes, needles = _schemes_and_needles(row)
    schemes_by_kind = {kind: schemes[is_alike], "transformer": schemes[0]}
    results = [
        measured(folder, f"needle-{each}", scheme, f"needle:{needles}:1") for each, scheme in schemes_by_kind.items()
    ]
    return points(paired_difference(*map(values_of, results)))


def _under_alike(row: str, folders: tuple[str, str]) -> list[Sequence[float]]:
    of_diff = [cell for kind in DIFF for cell in (_scores(row, kind, folders), lead(row, kind, folders[1]))]
    return [_scores(row, "transformer", folders)[:1], *of_diff]


for _section, _folders in {
    "Rounding both maps alike": FIRST,
    "Retrieval with a second training": SECOND,
}.items():
    PAGE.rows(
        "logits | N | Transformer | V1 | less Transformer | V2 | less Transformer",
        partial(_under_alike, folders=_folders),
        section=_section,
        names=2,
    )
PAGE.says(
    "({}, {} and {} at `4:tensor`; {}, {} and {} at",
    *(
        accuracy("pocket-needle-seed-1", f"needle-{kind}", scheme, 4)
        for scheme in ("4:tensor", "3:row")
        for kind in KINDS
    ),
)
_KEPT = [
    cell["result"]["score"]
    for cell in raw("pocket-needle/sweep.json")["cells"]
    if cell["task"] == "needle:4:1" and (cell["bits"] == 6 or cell["granularity"] == "row:shift")
]
PAGE.says("all keep at least {} at 6 bits and under `row:shift` down to 3 bits", min(_KEPT))
CELLS = [f"{bits_}:{g} → {bits_}:{g}:alike, {n}" for bits_ in (4, 3) for g in ("tensor", "head", "row") for n in (1, 4)]
# By kind, in the order of the table.
LEADS = {kind: [lead(row, kind, _ALIKE) for row in CELLS] for kind in DIFF}
_WON = [mean for leads in LEADS.values() for mean, low, _ in leads if low > 0]
PAGE.says("at 3 bits per tensor and per head, by {} to {} points", *ends(_WON))
PAGE.says("by {} to {} of 100 numbers, and V2 nowhere", *ends(_WON))


def _gains(kind: str, folders: tuple[str, str]) -> list[int]:
    """Points that `alike` gives a kind, by cell."""
    scores = [_scores(row, kind, folders) for row in CELLS]
    return [round(100 * (alike - plain)) for plain, alike in scores]


AHEAD = {
    (kind, is_alike): [row for row in CELLS if lead(row, kind, _AGAIN, is_alike)[1] > 0]
    for kind in DIFF
    for is_alike in (False, True)
}
PAGE.means(
    "V1 wins eight and V2 five, and neither loses one. "
    "V1 does not owe that to `alike`: rounded plainly it wins the same eight",
    len(AHEAD["diff-v1", True]) == 8
    and len(AHEAD["diff-v2", True]) == 5
    and AHEAD["diff-v1", False] == AHEAD["diff-v1", True]
    and not any(lead(row, kind, _AGAIN)[2] < 0 for row in CELLS for kind in DIFF),
)
_TO_V1, _TO_V2 = (_gains(kind, SECOND) for kind in DIFF)
PAGE.says(
    "it gives {} and {} points at 3 bits per tensor and takes {} and {} away at 3 bits per head",
    *_TO_V1[6:8],
    *(-gain for gain in _TO_V1[8:10]),
)
PAGE.says("To V2 it gives {} and {} at 3 bits per row", *_TO_V2[10:12])
PAGE.says("and {} to {} in the other cells of 3 bits or one scale per tensor", *ends([*_TO_V2[:2], *_TO_V2[6:10]]))


def directions(kind: str, folders: tuple[str, str]) -> tuple[int, int, int]:
    """In how many cells `alike` retrieves more than plain rounding, fewer, and as many."""
    gains = _gains(kind, folders)
    return sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains), gains.count(0)


PAGE.says(
    "In this training `alike` raises V1 in all {} cells and V2 in {}", *(directions(kind, FIRST)[0] for kind in DIFF)
)
PAGE.means(
    "For V1 `alike` is above plain rounding in five of the 12 cells, below it in five, and equal in two",
    directions("diff-v1", SECOND) == (5, 5, 2),
)

# What decides it


def ratios(result: dict[str, Any], keep: Callable[[str], bool]) -> list[float]:
    """Measured KL over the predicted."""
    return [mean_kl(result, scheme).mean / predicted(result, scheme) for scheme in result["kl"] if keep(scheme)]


def is_wide(scheme: str) -> bool:
    return scheme.split(":", 1)[1] in ("tensor", "head", "pair")


PAGE.says(
    "is {} to {} for the three models ({} to {} at 4 bits on the 16 passages). For SmolLM2-135M, on two windows of 256 "
    "tokens (the first 3,000 characters), it is {} to {}, with one exception: {} at `3:head`",
    *(end for trio in (PROSE, PASSAGES) for end in ends(x for each in trio.values() for x in ratios(each, is_wide))),
    *ends(ratios(SMOLLM2, lambda scheme: is_wide(scheme) and scheme != "3:head")),
    *ratios(SMOLLM2, lambda scheme: scheme == "3:head"),
)
_ROW = [each for kind in ("transformer", "diff-v2") for each in ratios(PROSE[kind], lambda s: s.endswith(":row"))]
_ROW += ratios(SMOLLM2, lambda s: s.endswith(":row"))
_ROW_V1 = ratios(PROSE["diff-v1"], lambda s: s.endswith(":row"))
PAGE.says("Per row it is {} to {}, for V1 {} to {}", *ends(_ROW), *ends(_ROW_V1))
_SHIFT = [each for result in PROSE.values() for each in ratios(result, lambda s: s.endswith(":shift"))]
PAGE.says("it is about half ({} to {})", *ends(_SHIFT))
_NLL = {kind: result["nll"] for kind, result in NEEDLE.items()}
PAGE.says(
    "{} nats in the Transformer, {} in V2 and {} in V1, where one context has {} nats; their medians are {}, {} and {}",
    *(sum(_NLL[kind]) / len(_NLL[kind]) for kind in ("transformer", "diff-v2", "diff-v1")),
    max(_NLL["diff-v1"]),
    *(median(_NLL[kind]) for kind in ("transformer", "diff-v2", "diff-v1")),
)
_WIDE_WIDTHS, _NARROW = ("8:", "6:"), ("4:", "3:")


def _needle_ratios(widths: tuple[str, ...]) -> list[float]:
    return [each for result in NEEDLE.values() for each in ratios(result, lambda s: s.startswith(widths))]


PAGE.says(
    "measured means are 1/{} (V2, `8:head`) to {} times",
    1 / min(_needle_ratios(_WIDE_WIDTHS)),
    max(_needle_ratios(_WIDE_WIDTHS)),
)
PAGE.says("at 4 and 3 bits up to {} times", About(max(_needle_ratios(_NARROW)), 0.01))


def _top_share(kind: str, scheme: str) -> float:
    """Percent of the KL that the context with the most of it has."""
    kl = NEEDLE[kind]["kl"][scheme]
    return 100 * max(kl) / sum(kl)


_TOP = {
    kind: {s: _top_share(kind, s) for s in NEEDLE[kind]["kl"] if s.startswith(_WIDE_WIDTHS)}
    for kind in ("diff-v1", "diff-v2")
}
_TOP_ALIKE = _TOP["diff-v1"].pop("8:row:alike")
PAGE.says(
    "one context in forty makes {} to {} % of V1's at 8 and 6 bits ({} % at `8:row:alike`) and {} to {} % of V2's",
    *ends(_TOP["diff-v1"].values()),
    _TOP_ALIKE,
    *ends(_TOP["diff-v2"].values()),
)
PAGE.says("({} times as much at 3 bits per head)", *ratios(SMOLLM2, lambda scheme: scheme == "3:head"))
PAGE.leaves("a factor of 1.4", "arithmetic: half a bit is the square root of 2")
PAGE.leaves("from 0.0001 to 0.5 nats", "a range in words")


def _predicted(trio: Trio, kind: str) -> list[float]:
    """Bits predicted, those of them by range and by sensitivity, and the bits measured."""
    parts = split(trio, kind)
    return [sum(parts), *parts, bits(trio, kind, "4:tensor")]


PAGE.rows(
    " | predicted | = range | + sensitivity | measured",
    lambda row: [[value] for value in _predicted(PASSAGES, kind_of(row))],
)
PAGE.says(
    "it is {} = {} − {} (measured {}) and {} = {} − {} ({})",
    *(
        value
        for kind in DIFF
        for total, size, cost, won in [_predicted(PROSE, kind)]
        for value in (total, size, -cost, won)
    ),
)


def _range(row: str) -> list[Sequence[float]]:
    plain, v1, v2 = (PROSE[kind]["layers"][int(row)] for kind in KINDS)
    lam = [v2["lam"][each] for each in ("mean", "min", "max")]
    return [plain["largest"], v1["largest"], [v1["lam"]["mean"]], v2["largest"], lam]


PAGE.rows("layer | Transformer | V1 | V1's λ | V2 | V2's λ, mean [range]", _range)
_NOISE = {"the signal map": ["first"], "the noise map": ["second"], "both, the same noise": ["both"]}


def _sensitivity(row: str, column: str) -> list[Expected]:
    layers = [layer["sensitivity"] for layer in PROSE[kind_of(column)]["layers"]]
    # A Transformer's only map takes all the noise there is.
    names = ["first"] if column == "Transformer" else _NOISE.get(row, ["first", "second"])
    return [sum(layer[name] for layer in layers for name in names)]


PAGE.table("noise on | Transformer | V1 | V2", _sensitivity)
_V1_LAYERS = PROSE["diff-v1"]["layers"]
_SECOND, _OTHERS = _V1_LAYERS[1], [layer for layer in _V1_LAYERS if layer is not _V1_LAYERS[1]]
PAGE.says(
    "In V1's second layer, where λ = {}, its noise costs as much as the signal map's ({} and {}); where λ is between "
    "{} and {}, only {} to {} %",
    _SECOND["lam"]["mean"],
    *(_SECOND["sensitivity"][of_map] for of_map in ("second", "first")),
    *ends(layer["lam"]["mean"] for layer in _OTHERS),
    *ends(100 * layer["sensitivity"]["second"] / layer["sensitivity"]["first"] for layer in _OTHERS),
)


def errors(kind: str, where: str = "after_norm") -> list[float]:
    """Percent by which rounding per tensor moves each layer's output."""
    return [100 * layer["errors"]["4:tensor"][where] for layer in PROSE[kind]["layers"]]


_ERRORS = [errors("transformer"), errors("diff-v1", "before_norm"), errors("diff-v1"), errors("diff-v2")]


def _norm_errors(row: str) -> list[list[float]]:
    plain, before, v1, v2 = ([of_layers[int(row)]] for of_layers in _ERRORS)
    of_v1, of_v2 = ([PROSE[kind]["layers"][int(row)]["cancellation"]] for kind in DIFF)
    return [plain, before, v1, of_v1, v2, of_v2]


PAGE.rows(
    "layer | Transformer | V1, before | V1, after | V1, terms over difference | V2 | V2, terms over difference",
    _norm_errors,
)


def _training(row: str) -> list[list[float]]:
    trio = {"600": AT600, "1,200": AT1200, "1,800": PROSE}[row]
    return [[value] for kind in DIFF for value in _predicted(trio, kind)[1:]]


PAGE.rows("step | V1: range | sensitivity | measured | V2: range | sensitivity | measured", _training)


def growth(kind: str) -> float:
    """How many times as much KL a kind has at its end as at step 600."""
    return mean_kl(PROSE[kind], "4:tensor").mean / mean_kl(AT600[kind], "4:tensor").mean


PAGE.says(
    "at step 600, with a perplexity of {}, has {} of the KL at `4:tensor` that it has at its end, with {}",
    math.exp(mean_interval(AT600["transformer"]["nll"]).mean),
    1 / growth("transformer"),
    math.exp(mean_interval(PROSE["transformer"]["nll"]).mean),
)
PAGE.says("and grows {} times in V2", growth("diff-v2"))
PAGE.says("log2(318.0 / 38.8) = {} bits", math.log2(318.0 / 38.8))
PAGE.says("a step of 318.0 / 31 = {}, DIFF at 4 bits one of 38.8 / 7 = {}", 318.0 / 31, 38.8 / 7)
PAGE.says(
    "[it is there](figure8.md): {} bits for V1 and {} for V2",
    *(-figure8.interval(name, sensitivity_won)[0] for name in figure8.OF_KIND),
)
PAGE.means(
    "where all kinds were trained at that rate",
    {figure8.THERE[f"e1-{kind}-seed-{seed}"]["rate"] for kind in KINDS for seed in SIX} == {2 * 2e-3},
)
PAGE.means(
    "beside [one of twice the rate](figure8.md) it is the weaker again",
    figure8.interval("DIFF V1", perplexity_ratio)[1] > 1,
)
PAGE.means("and V1's loss is there", figure8.MORE["DIFF V1"][1] > 0)
PAGE.says("leaves {} bits for sensitivity", math.log2((318.0 / 31) / (38.8 / 7)))

# Rounding both maps alike


def _alike(row: str) -> list[Sequence[float]]:
    schemes = [f"4:{scheme}" for scheme in row.split(" → ")]
    return [
        *([mean_kl(PASSAGES[kind], scheme).mean for scheme in schemes] for kind in DIFF),
        *([bits(PASSAGES, kind, scheme) for scheme in schemes] for kind in DIFF),
        by_book("diff-v2", schemes[-1]),
        change("diff-v2", schemes[-1]),
    ]


PAGE.rows("logits | V1 | V2 | V1 against Transformer | V2 against Transformer | V2, by book | V2, KL", _alike)
for _text, _kind in (
    ("is half of what V1 gains ({} of {} bits)", "diff-v1"),
    ("what V2 gains ({} of {})", "diff-v2"),
):
    PAGE.says(_text, gained(_kind, "4:map"), gained(_kind, "4:tensor:alike"))
_PAIRS = (("4:tensor:alike", "4:map"), ("4:head:alike", "4:head"), ("4:row:alike", "4:row"))
PAGE.says(
    "`alike` is worth {} to {} bits to V1 and {} to {} to V2",
    *(end for kind in DIFF for end in ends(gained(kind, *pair) for pair in _PAIRS)),
)
_FAIR = ("4:head:alike", "4:row:alike")
PAGE.says(
    "it leads this Transformer by {} to {} bits ({} to {} with a second seed)",
    *(end for trio in (PASSAGES, PROSE1) for end in ends(bits(trio, "diff-v2", scheme) for scheme in _FAIR)),
)

# Cache and weights


def _stored(row: str, column: str) -> list[Expected]:
    target, _, width = row.partition(", ")
    scheme = f"{width[0]}:row"
    return [perplexity(kind_of(column), scheme, target.lower())["kl"]]


PAGE.table(" | Transformer | DIFF V1 | DIFF V2", _stored)
_CACHE = {kind: perplexity(kind, "4:row", "kv")["kl"] for kind in KINDS}
PAGE.says("(its KL is {} times theirs)", _CACHE["diff-v1"] / _CACHE["transformer"])
PAGE.says(
    "its KL is {}, {} and {} at 6, 4 and 3 bits",
    *(measured("figure8-prose-stored-g32", "prose-diff-v1", f"{width}:g32").details["kl"] for width in (6, 4, 3)),
)
PAGE.says(
    "with a cache of 3 it is {}, {} and {}",
    *(accuracy("pocket-needle-weights-kv", f"needle-{kind}", "3:row", 4, "kv") for kind in KINDS),
)
PAGE.says(
    "N = 4 keeps at least {} with 3-bit weights and with a 4-bit cache",
    min(
        accuracy("pocket-needle-weights-kv", f"needle-{kind}", scheme, 4, target)
        for kind in KINDS
        for scheme, target in (("3:row", "weights"), ("4:row", "kv"))
    ),
)

# The second seed


PAGE.rows(
    "logits | V1: seed 0 | seed 1 | V2: seed 0 | seed 1",
    lambda row: [[bits(trio, kind, f"4:{row}")] for kind in DIFF for trio in (PROSE, PROSE1)],
)
PAGE.says(
    "range and sensitivity as {} and {} (V1) and {} and {} (V2)",
    *(part for kind in DIFF for part in split(PROSE1, kind)),
)
_BETWEEN = [
    abs(bits(PROSE, "diff-v2", scheme) - bits(PROSE1, "diff-v2", scheme))
    for scheme in ("4:head", "4:row", "4:row:shift")
]
PAGE.says("V2 differs by {} to {} bits between them", *ends(_BETWEEN))
_SEED_1 = paired_difference(PROSE1["diff-v2"]["kl"]["3:tensor:alike"], PROSE1["transformer"]["kl"]["3:tensor"])
PAGE.says("within its interval (KL {} [{}, {}])", *interval(_SEED_1))

# Heads and learning rate

_CONTROLS = {
    "Transformer": PROSE["transformer"],
    "Transformer with half the heads": raw("figure8-prose-kl-controls/prose-half-heads.json"),
    "DIFF V1": PROSE["diff-v1"],
    "DIFF V1 at twice the rate": raw("figure8-prose-kl-controls/prose-diff-v1-rate-4e-3.json"),
}


_HALF, _FAST = "Transformer with half the heads", "DIFF V1 at twice the rate"
_PLAIN_SCHEMES = ("4:tensor", "4:head", "4:row", "4:row:shift")


def ratio(name: str, other: str = "Transformer") -> list[float]:
    """Perplexity over another model's, with the interval of the paired difference of the windows' logarithms."""
    return list(map(math.exp, interval(paired_difference(_CONTROLS[name]["nll"], _CONTROLS[other]["nll"]))))


def _lost(name: str, scheme: str, other: str = "Transformer") -> float:
    """Bits that a model needs more than another."""
    return -bits_won(_CONTROLS[name], _CONTROLS[other], scheme)


def _control(row: str) -> list[list[float]]:
    won = [-_lost(row, scheme) for scheme in _PLAIN_SCHEMES]
    return [[value] for value in (*won, *parts_won(_CONTROLS[row], _CONTROLS["Transformer"], "4:tensor"))]


PAGE.rows(
    "seed 0 | perplexity | over the Transformer's",
    lambda row: [[math.exp(mean_interval(_CONTROLS[row]["nll"]).mean)], ratio(row)],
)
PAGE.rows("bits won | `tensor` | `head` | `row` | `row:shift` | range | sensitivity", _control)


def _cost(name: str, scheme: str) -> tuple[float, float, float]:
    """The paired difference of KL from the Transformer's, with its interval."""
    return interval(paired_difference(*(_CONTROLS[each]["kl"][scheme] for each in (name, "Transformer"))))


PAGE.says("cost it less (per tensor {} [{}, {}] nats)", *_cost(_HALF, "4:tensor"))
PAGE.means(
    "4 bits per tensor, head or row cost it less", all(_cost(_HALF, scheme)[2] < 0 for scheme in _PLAIN_SCHEMES[:3])
)
PAGE.says("V1's loss per tensor is larger, {} bits", _lost("DIFF V1", "4:tensor", _HALF))
PAGE.says(
    "Its perplexity is {} % lower and {} [{}, {}] of the Transformer's at the common rate",
    100 * (1 - ratio(_FAST, "DIFF V1")[0]),
    *ratio(_FAST),
)
PAGE.says(
    "In the four schemes above it loses {} to {} bits instead of {} to {}",
    *(end for name in (_FAST, "DIFF V1") for end in ends(_lost(name, scheme) for scheme in _PLAIN_SCHEMES)),
)


# Bits that every scheme wins at both rates.
AT_BOTH_RATES = {scheme: [-_lost(name, scheme) for name in ("DIFF V1", _FAST)] for scheme in _CONTROLS[_FAST]["kl"]}
REMAINS = {scheme: after / before for scheme, (before, after) in AT_BOTH_RATES.items()}
_STAYS = ["3:tensor", "3:head", "3:pair", "3:tensor:alike", "3:head:alike"]
PAGE.table(
    "logits | 8 bits | 6 bits | 4 bits | 3 bits",
    lambda row, column: [*AT_BOTH_RATES[f"{column[0]}:{row}"], 100 * REMAINS[f"{column[0]}:{row}"]],
)
PAGE.says(
    "it loses fewer bits in all of the {} schemes measured, and less than half as many in {} of them",
    sum(after > before for before, after in AT_BOTH_RATES.values()),
    sum(share < 0.5 for share in REMAINS.values()),
)
PAGE.says(
    "In the other five, all at {} bits, {} to {} % of the loss remains",
    3,
    *ends(100 * share for share in REMAINS.values() if share >= 0.5),
)
PAGE.means(
    "More than half of the loss remains in five schemes: `tensor`, `head`, `pair`, `tensor:alike` and `head:alike` at "
    "3 bits",
    [scheme for scheme in _STAYS if REMAINS[scheme] > 0.5] == _STAYS
    and sum(share > 0.5 for share in REMAINS.values()) == len(_STAYS)
    and all(before < 0 for before, _ in AT_BOTH_RATES.values()),
)
PAGE.means(
    "At 4 bits per tensor the formula puts all of that loss down to the range",
    _control(_FAST)[-1] > [0] > _control(_FAST)[-2],
)
PAGE.says(
    "There KL is higher than the Transformer's by {} [{}, {}], {} [{}, {}], {} [{}, {}], {} [{}, {}] and {} [{}, {}] "
    "nats",
    *(each for scheme in _STAYS for each in _cost(_FAST, scheme)),
)
PAGE.says("by {} [{}, {}] nats per tensor and {} [{}, {}] per row", *_cost(_FAST, "4:tensor"), *_cost(_FAST, "4:row"))
PAGE.says(
    "{} [{}, {}] nats per tensor, {} [{}, {}] per head and {} [{}, {}] per row",
    *(each for scheme in _PLAIN_SCHEMES[:3] for each in _cost(_FAST, f"{scheme}:alike")),
)
_V1_BEHIND = 100 * (perplexity("diff-v1", "16")["perplexity"] / perplexity("transformer", "16")["perplexity"] - 1)
PAGE.says("V1 is the weaker model, by {} % of perplexity", _V1_BEHIND)
_SHIFTED = [100 * (perplexity(k, "4:row:shift")["perplexity"] / perplexity(k, "16")["perplexity"] - 1) for k in KINDS]
PAGE.says("at 4 bits it costs each of the models {} % of perplexity or less", max(_SHIFTED))

# Not measured

PAGE.table("models | parameters | trained on | measured by", Unmeasured("sizes"))
PAGE.leaves("about 25 points of HellaSwag (Figure 8)", "the paper's")
PAGE.leaves("is 318.0 in the Transformer and 38.8 in DIFF, the largest hidden state 3608.6 and 1688.2", "the paper's")
PAGE.leaves("In the paper's Table 5 it is smaller by 8.2", "the paper's")
PAGE.leaves("on 32,768 characters", "a setting")
PAGE.leaves("Rise of perplexity, and KL in nats, 32,768 characters", "a setting")
PAGE.leaves("intervals are 95 %, Student's over 16 passages", "a level")
PAGE.leaves("the first 16,384 characters of Dracula in 21 windows", "settings")
PAGE.leaves("(700 and 720 bytes per token at 4 bits)", "arithmetic of the layouts")
PAGE.leaves("the paper's of 3 B", "the paper's")
PAGE.leaves("one standard error is at most 5 points", "binomial")
PAGE.leaves("normal noise of σ = 0.1", "a setting")
PAGE.leaves("(1,800 steps in all)", "a setting")
PAGE.leaves("until step 1,200", "a setting")
PAGE.leaves("log2(318.0 / 38.8)", "the paper's")
PAGE.leaves("318.0 / 31", "the paper's")
PAGE.leaves("38.8 / 7", "the paper's")
