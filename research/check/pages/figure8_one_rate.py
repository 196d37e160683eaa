"""The figures of research/pages/figure8-one-rate.md."""

import math
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from diffquant.evals.stats import mean_interval, paired_difference
from research.check.numbers import About, Expected
from research.check.page import Page, Unmeasured
from research.check.pages.pocket import accuracy
from research.check.raw import measured, points, raw, values_of
from research.studies.figure8_model import advantage, advantage_by_book, by_passage, mean_kl, parts, predicted

PAGE = Page("research/pages/figure8-one-rate.md")
KINDS = ("transformer", "diff-v1", "diff-v2")
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
    return advantage(mean_kl(trio[kind], scheme).mean, mean_kl(trio["transformer"], scheme).mean)


def bits_predicted(trio: Trio, kind: str, scheme: str) -> float:
    return advantage(predicted(trio[kind], scheme), predicted(trio["transformer"], scheme))


def bits_of_parts(trio: Trio, kind: str, scheme: str) -> tuple[float, float]:
    """Bits won by range and by sensitivity."""
    (size, cost), (plain_size, plain_cost) = parts(trio[kind], scheme), parts(trio["transformer"], scheme)
    return advantage(size, plain_size), advantage(cost, plain_cost)


def change(trio: Trio, kind: str, scheme: str, plain: str) -> list[Expected]:
    """The paired difference of KL from the Transformer's over passages, with its interval."""
    paired = paired_difference(
        by_passage(trio[kind], trio[kind]["kl"][scheme]),
        by_passage(trio["transformer"], trio["transformer"]["kl"][plain]),
    )
    return [paired.mean, paired.low, paired.high]


def by_book(kind: str, scheme: str, plain: str) -> list[Expected]:
    """Least and largest number of bits won on a book."""
    plain_result = PASSAGES["transformer"]
    stand_in = plain_result | {"kl": {scheme: plain_result["kl"][plain]}}
    won = advantage_by_book(PASSAGES[kind], stand_in, scheme)
    return [min(won), max(won)]


# Table 5

_OUTLIERS = {
    model["name"]: model["overall"]
    for file in ("figure8-outliers", "smollm2-outliers")
    for model in raw(f"{file}/outliers.json")["models"]
}
_RANKS = {"top 1": "1", "top 10": "10"}


def outliers(row: str, column: str) -> list[Expected] | Unmeasured:
    if row.startswith("the paper"):
        return Unmeasured("the paper's Table 5")
    kind, _, rank = column.partition(", ")
    name = "SmolLM2-135M-Instruct.Q4_1.gguf" if row == "SmolLM2-135M" else row
    magnitudes = _OUTLIERS[name][kind]
    return [magnitudes["median"] if rank == "median" else magnitudes["top"][_RANKS[rank]]]


PAGE.table(
    " | logits, top 1 | top 10 | median | hidden, top 1 | top 10 | median",
    outliers,
    columns=[f"{kind}, {rank}" for kind in ("logits", "hidden") for rank in ("top 1", "top 10", "median")],
)


def hidden(kind: str) -> float:
    return float(_OUTLIERS[f"prose-{kind}"]["hidden"]["top"]["1"])


PAGE.says(
    "V1's largest is {} and V2's {} of the Transformer's",
    hidden("diff-v1") / hidden("transformer"),
    hidden("diff-v2") / hidden("transformer"),
)
PAGE.says("(the paper: {})", 1688.2 / 3608.6)


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


def _won(row: str, column: str) -> list[Expected]:
    kind, scheme = kind_of(column), f"4:{row}"
    if column.endswith("bits"):
        return [bits(PASSAGES, kind, scheme)]
    if column.endswith("book"):
        return by_book(kind, scheme, scheme)
    return change(PASSAGES, kind, scheme, scheme)


PAGE.table(
    "logits | V1, bits | by book | KL | V2, bits | by book | KL",
    _won,
    columns=[f"{kind}, {what}" for kind in ("V1", "V2") for what in ("bits", "by book", "KL")],
)
_BEFORE = ("tensor", "head", "pair", "row", "tensor:shift", "row:shift")
PAGE.says(
    "gave {}, {}, {}, {}, {} and {} for V1 (without `map`) and {}, {}, {}, {}, {} and {} for V2",
    *(bits(PROSE, kind, f"4:{granularity}") for kind in ("diff-v1", "diff-v2") for granularity in _BEFORE),
)


def _won_per_head(kind: str) -> float:
    return bits(PASSAGES, kind, "4:head") - bits(PASSAGES, kind, "4:tensor")


PAGE.says("more than the Transformer, by {} bits (V1) and {} (V2)", _won_per_head("diff-v1"), _won_per_head("diff-v2"))
_PLAIN = ("4:tensor", "4:head", "4:pair", "4:row", "4:tensor:shift", "4:row:shift")
_LOST = {kind: [-bits(PASSAGES, kind, scheme) for scheme in _PLAIN] for kind in ("diff-v1", "diff-v2")}
PAGE.says(
    "V1 needs {} to {} bits more than the Transformer, V2 {} to {}",
    *(take(_LOST[kind]) for kind in ("diff-v1", "diff-v2") for take in (min, max)),
)

# Figure 8, retrieval


_ALIKE = "figure8-needle-alike"


def _retrieved(row: str, column: str) -> list[Expected]:
    model = f"needle-{kind_of(column)}"
    return [accuracy(_ALIKE if "alike" in scheme else "pocket-needle", model, scheme, 4) for scheme in row.split(" → ")]


PAGE.table("logits | Transformer | DIFF V1 | DIFF V2", _retrieved, row="4:head")


def _under_alike(row: str, column: str, folders: tuple[str, str] = ("pocket-needle", _ALIKE)) -> list[Expected]:
    """A row of retrieval under `alike`; the folders have the plain schemes and those with `alike`."""
    schemes, _, needles = row.rpartition(", ")
    plain, alike = schemes.split(" → ")
    if column.startswith("less"):
        of_kinds = [
            measured(folders[1], f"needle-{kind}", scheme, f"needle:{needles}:1")
            for kind, scheme in ((kind_of(column[-2:]), alike), ("transformer", plain))
        ]
        return list(points(paired_difference(*map(values_of, of_kinds))))
    cells = list(zip(folders, (plain, alike), strict=True))
    return [
        accuracy(folder, f"needle-{kind_of(column)}", scheme, int(needles))
        for folder, scheme in (cells[:1] if column == "Transformer" else cells)
    ]


_AGAIN = f"{_ALIKE}-seed-1"
for _section, _folders in (
    ("Rounding both maps alike", ("pocket-needle", _ALIKE)),
    ("Retrieval with a second training", (_AGAIN, _AGAIN)),
):
    PAGE.table(
        "logits | N | Transformer | V1 | less Transformer | V2 | less Transformer",
        partial(_under_alike, folders=_folders),
        section=_section,
        names=2,
        columns=["Transformer", "V1", "less Transformer, V1", "V2", "less Transformer, V2"],
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
LEADS = [_under_alike(row, f"less Transformer, {kind}") for row in CELLS for kind in ("V1", "V2")]
_WON = [lead[0] for lead in LEADS if lead[1] > 0]
PAGE.says("at 3 bits per tensor and per head, by {} to {} points", min(_WON), max(_WON))
PAGE.says("by {} to {} of 100 numbers, and V2 nowhere", min(_WON), max(_WON))


def _against(row: str, kind: str, number: int) -> tuple[float, float, float]:
    """Points that a kind is ahead of the Transformer in the second training, plain (0) or under `alike` (1)."""
    schemes, _, needles = row.rpartition(", ")
    scheme = schemes.split(" → ")[number]
    results = [measured(_AGAIN, f"needle-{each}", scheme, f"needle:{needles}:1") for each in (kind, "transformer")]
    return points(paired_difference(*map(values_of, results)))


def _gained(row: str, kind: str) -> float:
    plain, alike = _under_alike(row, kind, (_AGAIN, _AGAIN))
    return round(100 * (alike - plain))


AHEAD = {
    (kind, number): [row for row in CELLS if _against(row, kind, number)[1] > 0]
    for kind in ("diff-v1", "diff-v2")
    for number in (0, 1)
}
PAGE.means(
    "V1 wins eight and V2 five, and neither loses one. "
    "V1 does not owe that to `alike`: rounded plainly it wins the same eight",
    len(AHEAD["diff-v1", 1]) == 8
    and len(AHEAD["diff-v2", 1]) == 5
    and AHEAD["diff-v1", 0] == AHEAD["diff-v1", 1]
    and not any(_against(row, kind, 1)[2] < 0 for row in CELLS for kind in ("diff-v1", "diff-v2")),
)
PAGE.says(
    "it gives {} and {} points at 3 bits per tensor and takes {} and {} away at 3 bits per head",
    *(_gained(row, "V1") for row in CELLS[6:8]),
    *(-_gained(row, "V1") for row in CELLS[8:10]),
)
PAGE.says("To V2 it gives {} and {} at 3 bits per row", *(_gained(row, "V2") for row in CELLS[10:12]))
_OTHER = [_gained(CELLS[index], "V2") for index in (0, 1, 6, 7, 8, 9)]
PAGE.says("and {} to {} in the other cells of 3 bits or one scale per tensor", min(_OTHER), max(_OTHER))


def directions(kind: str, folders: tuple[str, str]) -> tuple[int, int, int]:
    """In how many cells `alike` retrieves more than plain rounding, fewer, and as many."""
    pairs = [_under_alike(row, kind, folders) for row in CELLS]
    gains = [alike - plain for plain, alike in pairs]
    return sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains), sum(gain == 0 for gain in gains)


FIRST, SECOND = ("pocket-needle", _ALIKE), (_AGAIN, _AGAIN)
PAGE.says(
    "In this training `alike` raises V1 in all {} cells and V2 in {}",
    directions("V1", FIRST)[0],
    directions("V2", FIRST)[0],
)
PAGE.means(
    "For V1 `alike` is above plain rounding in five of the 12 cells, below it in five, and equal in two",
    directions("V1", SECOND) == (5, 5, 2),
)

# What decides it


def ratios(result: dict[str, Any], keep: Callable[[str], bool]) -> list[float]:
    """Measured KL over the predicted."""
    return [mean_kl(result, scheme).mean / predicted(result, scheme) for scheme in result["kl"] if keep(scheme)]


def _wide(scheme: str) -> bool:
    return scheme.split(":", 1)[1] in ("tensor", "head", "pair")


_PROSE_RATIOS = [each for result in PROSE.values() for each in ratios(result, _wide)]
_PASSAGE_RATIOS = [each for result in PASSAGES.values() for each in ratios(result, _wide)]
_SMOL_RATIOS = ratios(SMOLLM2, lambda scheme: _wide(scheme) and scheme != "3:head")
PAGE.says(
    "is {} to {} for the three models ({} to {} at 4 bits on the 16 passages). For SmolLM2-135M, on two windows of 256 "
    "tokens (the first 3,000 characters), it is {} to {}, with one exception: {} at `3:head`",
    min(_PROSE_RATIOS),
    max(_PROSE_RATIOS),
    min(_PASSAGE_RATIOS),
    max(_PASSAGE_RATIOS),
    min(_SMOL_RATIOS),
    max(_SMOL_RATIOS),
    *ratios(SMOLLM2, lambda scheme: scheme == "3:head"),
)
_ROW = [each for kind in ("transformer", "diff-v2") for each in ratios(PROSE[kind], lambda s: s.endswith(":row"))]
_ROW += ratios(SMOLLM2, lambda s: s.endswith(":row"))
_ROW_V1 = ratios(PROSE["diff-v1"], lambda s: s.endswith(":row"))
PAGE.says("Per row it is {} to {}, for V1 {} to {}", min(_ROW), max(_ROW), min(_ROW_V1), max(_ROW_V1))
_SHIFT = [each for result in PROSE.values() for each in ratios(result, lambda s: s.endswith(":shift"))]
PAGE.says("it is about half ({} to {})", min(_SHIFT), max(_SHIFT))
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
    min(_TOP["diff-v1"].values()),
    max(_TOP["diff-v1"].values()),
    _TOP_ALIKE,
    min(_TOP["diff-v2"].values()),
    max(_TOP["diff-v2"].values()),
)
PAGE.says("({} times as much at 3 bits per head)", *ratios(SMOLLM2, lambda scheme: scheme == "3:head"))
PAGE.leaves("a factor of 1.4", "arithmetic: half a bit is the square root of 2")
PAGE.leaves("from 0.0001 to 0.5 nats", "a range in words")


def _split(trio: Trio, kind: str) -> dict[str, float]:
    size, cost = bits_of_parts(trio, kind, "4:tensor")
    return {
        "predicted": bits_predicted(trio, kind, "4:tensor"),
        "= range": size,
        "+ sensitivity": cost,
        "measured": bits(trio, kind, "4:tensor"),
    }


PAGE.table(
    " | predicted | = range | + sensitivity | measured",
    lambda row, column: [_split(PASSAGES, kind_of(row))[column]],
)
PAGE.says(
    "it is {} = {} − {} (measured {}) and {} = {} − {} ({})",
    *(
        value * (-1 if name == "+ sensitivity" else 1)
        for kind in ("diff-v1", "diff-v2")
        for name, value in _split(PROSE, kind).items()
    ),
)


def _range(row: str, column: str) -> list[Expected]:
    layer = PROSE[kind_of(column)]["layers"][int(row)]
    if "λ" not in column:
        return list(layer["largest"])
    lam = layer["lam"]
    return [lam["mean"], lam["min"], lam["max"]] if "range" in column else [lam["mean"]]


PAGE.table("layer | Transformer | V1 | V1's λ | V2 | V2's λ, mean [range]", _range)
_NOISE = {
    "the signal map": "first",
    "the noise map": "second",
    "both, the same noise": "both",
}


def _sensitivity(row: str, column: str) -> list[Expected]:
    layers = [layer["sensitivity"] for layer in PROSE[kind_of(column)]["layers"]]
    # A Transformer's only map takes all the noise there is.
    names = ["first"] if len(layers[0]) == 1 else [_NOISE[row]] if row in _NOISE else ["first", "second"]
    return [sum(layer[name] for layer in layers for name in names)]


PAGE.table("noise on | Transformer | V1 | V2", _sensitivity)
_SECOND = [layer["sensitivity"] for layer in PROSE["diff-v1"]["layers"]]
_LAMBDAS = [layer["lam"]["mean"] for n, layer in enumerate(PROSE["diff-v1"]["layers"]) if n != 1]
_SHARES = [100 * layer["second"] / layer["first"] for n, layer in enumerate(_SECOND) if n != 1]
PAGE.says(
    "In V1's second layer, where λ = {}, its noise costs as much as the signal map's ({} and {}); where λ is between "
    "{} and {}, only {} to {} %",
    PROSE["diff-v1"]["layers"][1]["lam"]["mean"],
    _SECOND[1]["second"],
    _SECOND[1]["first"],
    min(_LAMBDAS),
    max(_LAMBDAS),
    min(_SHARES),
    max(_SHARES),
)


def norm_errors(row: str, column: str) -> list[Expected]:
    layer = PROSE[kind_of(column)]["layers"][int(row)]
    if "terms" in column:
        return [layer["cancellation"]]
    return [100 * layer["errors"]["4:tensor"]["before_norm" if "before" in column else "after_norm"]]


PAGE.table(
    "layer | Transformer | V1, before | V1, after | V1, terms over difference | V2 | V2, terms over difference",
    norm_errors,
)


def _training(row: str, column: str) -> list[Expected]:
    trio = {"600": AT600, "1,200": AT1200, "1,800": PROSE}[row]
    kind, _, what = column.partition(": ")
    won = {"range": 0, "sensitivity": 1}
    kind = kind_of(kind)
    return [bits_of_parts(trio, kind, "4:tensor")[won[what]] if what in won else bits(trio, kind, "4:tensor")]


PAGE.table(
    "step | V1: range | sensitivity | measured | V2: range | sensitivity | measured",
    _training,
    columns=[f"{kind}: {what}" for kind in ("V1", "V2") for what in ("range", "sensitivity", "measured")],
)


def _growth(kind: str) -> float:
    return mean_kl(PROSE[kind], "4:tensor").mean / mean_kl(AT600[kind], "4:tensor").mean


PAGE.says(
    "at step 600, with a perplexity of {}, has {} of the KL at `4:tensor` that it has at its end, with {}",
    math.exp(mean_interval(AT600["transformer"]["nll"]).mean),
    1 / _growth("transformer"),
    math.exp(mean_interval(PROSE["transformer"]["nll"]).mean),
)
PAGE.says("and grows {} times in V2", _growth("diff-v2"))
PAGE.says("log2(318.0 / 38.8) = {} bits", math.log2(318.0 / 38.8))
PAGE.says("a step of 318.0 / 31 = {}, DIFF at 4 bits one of 38.8 / 7 = {}", 318.0 / 31, 38.8 / 7)
PAGE.says("leaves {} bits for sensitivity", math.log2((318.0 / 31) / (38.8 / 7)))

# Rounding both maps alike


def _alike(row: str, column: str) -> list[Expected]:
    schemes = [f"4:{scheme}" for scheme in row.split(" → ")]
    kind = kind_of(column)
    if column.endswith("against Transformer"):
        return [alike_bits(PASSAGES, kind, scheme) for scheme in schemes]
    if column.endswith("by book"):
        return by_book(kind, schemes[-1], schemes[0])
    if column.endswith("KL"):
        return change(PASSAGES, kind, schemes[-1], schemes[0])
    return [mean_kl(PASSAGES[kind], scheme).mean for scheme in schemes]


PAGE.table("logits | V1 | V2 | V1 against Transformer | V2 against Transformer | V2, by book | V2, KL", _alike)


def alike_bits(trio: Trio, kind: str, scheme: str) -> float:
    """Bits won over the Transformer, whose one map is rounded as ever."""
    plain = "4:tensor" if scheme == "4:map" else scheme.removesuffix(":alike")
    return advantage(mean_kl(trio[kind], scheme).mean, mean_kl(trio["transformer"], plain).mean)


def _gain(kind: str, scheme: str, less: str) -> float:
    return alike_bits(PASSAGES, kind, scheme) - alike_bits(PASSAGES, kind, less)


PAGE.says(
    "is half of what V1 gains ({} of {} bits)",
    _gain("diff-v1", "4:map", "4:tensor"),
    _gain("diff-v1", "4:tensor:alike", "4:tensor"),
)
PAGE.says(
    "what V2 gains ({} of {})", _gain("diff-v2", "4:map", "4:tensor"), _gain("diff-v2", "4:tensor:alike", "4:tensor")
)
_PAIRS = (("4:tensor:alike", "4:map"), ("4:head:alike", "4:head"), ("4:row:alike", "4:row"))
_GAINS = {kind: [_gain(kind, *pair) for pair in _PAIRS] for kind in ("diff-v1", "diff-v2")}
PAGE.says(
    "`alike` is worth {} to {} bits to V1 and {} to {} to V2",
    *(take(_GAINS[kind]) for kind in ("diff-v1", "diff-v2") for take in (min, max)),
)
_FAIR = ("4:head:alike", "4:row:alike")
PAGE.says(
    "it leads this Transformer by {} to {} bits ({} to {} with a second seed)",
    *(
        take(alike_bits(trio, "diff-v2", scheme) for scheme in _FAIR)
        for trio in (PASSAGES, PROSE1)
        for take in (min, max)
    ),
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


def _second_seed(row: str, column: str) -> list[Expected]:
    kind, _, seed = column.partition(": seed ")
    return [alike_bits(PROSE if seed == "0" else PROSE1, kind_of(kind), f"4:{row}")]


PAGE.table(
    "logits | V1: seed 0 | seed 1 | V2: seed 0 | seed 1",
    _second_seed,
    columns=[f"{kind}: seed {seed}" for kind in ("V1", "V2") for seed in "01"],
)
PAGE.says(
    "range and sensitivity as {} and {} (V1) and {} and {} (V2)",
    *bits_of_parts(PROSE1, "diff-v1", "4:tensor"),
    *bits_of_parts(PROSE1, "diff-v2", "4:tensor"),
)
_BETWEEN = [
    abs(alike_bits(PROSE, "diff-v2", scheme) - alike_bits(PROSE1, "diff-v2", scheme))
    for scheme in ("4:head", "4:row", "4:row:shift")
]
PAGE.says("V2 differs by {} to {} bits between them", min(_BETWEEN), max(_BETWEEN))
_SEED_1 = paired_difference(PROSE1["diff-v2"]["kl"]["3:tensor:alike"], PROSE1["transformer"]["kl"]["3:tensor"])
PAGE.says("within its interval (KL {} [{}, {}])", _SEED_1.mean, _SEED_1.low, _SEED_1.high)

# Heads and learning rate

_CONTROLS = {
    "Transformer": PROSE["transformer"],
    "Transformer with half the heads": raw("figure8-prose-kl-controls/prose-half-heads.json"),
    "DIFF V1": PROSE["diff-v1"],
    "DIFF V1 at twice the rate": raw("figure8-prose-kl-controls/prose-diff-v1-rate-4e-3.json"),
}


def ratio(name: str, other: str = "Transformer") -> list[Expected]:
    """Perplexity over another model's, with the interval of the paired difference of the windows' logarithms."""
    change = paired_difference(_CONTROLS[name]["nll"], _CONTROLS[other]["nll"])
    return [math.exp(each) for each in (change.mean, change.low, change.high)]


def _control(row: str, column: str) -> list[Expected]:
    result = _CONTROLS[row]
    if column == "perplexity":
        return [math.exp(mean_interval(result["nll"]).mean)]
    if column == "over the Transformer's":
        return ratio(row)
    trio = {"transformer": PROSE["transformer"], "control": result}
    if column in ("range", "sensitivity"):
        return [bits_of_parts(trio, "control", "4:tensor")[column == "sensitivity"]]
    return [bits(trio, "control", f"4:{column}")]


PAGE.table("seed 0 | perplexity | over the Transformer's", _control)
PAGE.table(
    "bits won | `tensor` | `head` | `row` | `row:shift` | range | sensitivity",
    _control,
    columns=["tensor", "head", "row", "row:shift", "range", "sensitivity"],
)
_HALF, _FAST = "Transformer with half the heads", "DIFF V1 at twice the rate"
_PLAIN_SCHEMES = ("tensor", "head", "row", "row:shift")


def _cost(name: str, scheme: str) -> list[Expected]:
    """The paired difference of KL from the Transformer's, whose one map is rounded as ever, with its interval."""
    result, plain = _CONTROLS[name]["kl"], _CONTROLS["Transformer"]["kl"]
    change = paired_difference(result[scheme], plain[scheme.removesuffix(":alike")])
    return [change.mean, change.low, change.high]


def _lost(name: str, other: str = "Transformer") -> list[float]:
    """Bits that a model needs more than another, by scheme."""
    trio = {"transformer": _CONTROLS[other], "control": _CONTROLS[name]}
    return [-bits(trio, "control", f"4:{scheme}") for scheme in _PLAIN_SCHEMES]


PAGE.says("cost it less (per tensor {} [{}, {}] nats)", *_cost(_HALF, "4:tensor"))
PAGE.means(
    "4 bits per tensor, head or row cost it less", all(_cost(_HALF, f"4:{s}")[2] < 0 for s in ("tensor", "head", "row"))
)
PAGE.says("V1's loss per tensor is larger, {} bits", _lost("DIFF V1", _HALF)[0])
PAGE.says(
    "Its perplexity is {} % lower and {} [{}, {}] of the Transformer's at the common rate",
    100 * (1 - ratio(_FAST, "DIFF V1")[0]),
    *ratio(_FAST),
)
PAGE.says(
    "In the four schemes above it loses {} to {} bits instead of {} to {}",
    min(_lost(_FAST)),
    max(_lost(_FAST)),
    min(_lost("DIFF V1")),
    max(_lost("DIFF V1")),
)


# Every scheme at both rates. Where V1's maps are rounded alike, the Transformer's only map is rounded plainly.
SCHEMES = list(_CONTROLS[_FAST]["kl"])
AT_BOTH_RATES = {
    scheme: tuple(
        advantage(
            mean_kl(_CONTROLS[name], scheme).mean, mean_kl(_CONTROLS["Transformer"], scheme.removesuffix(":alike")).mean
        )
        for name in ("DIFF V1", _FAST)
    )
    for scheme in SCHEMES
}
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
    *(take(100 * share for share in REMAINS.values() if share >= 0.5) for take in (min, max)),
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
    _control(_FAST, "sensitivity")[0] > 0 > _control(_FAST, "range")[0],
)
PAGE.says(
    "There KL is higher than the Transformer's by {} [{}, {}], {} [{}, {}], {} [{}, {}], {} [{}, {}] and {} [{}, {}] "
    "nats",
    *(each for scheme in _STAYS for each in _cost(_FAST, scheme)),
)
PAGE.says("by {} [{}, {}] nats per tensor and {} [{}, {}] per row", *_cost(_FAST, "4:tensor"), *_cost(_FAST, "4:row"))
PAGE.says(
    "{} [{}, {}] nats per tensor, {} [{}, {}] per head and {} [{}, {}] per row",
    *(each for scheme in ("tensor", "head", "row") for each in _cost(_FAST, f"4:{scheme}:alike")),
)
_V1_BEHIND = 100 * (perplexity("diff-v1", "16")["perplexity"] / perplexity("transformer", "16")["perplexity"] - 1)
PAGE.says("V1 is the weaker model, by {} % of perplexity", _V1_BEHIND)
_SHIFTED = [100 * (perplexity(k, "4:row:shift")["perplexity"] / perplexity(k, "16")["perplexity"] - 1) for k in KINDS]
PAGE.says("at 4 bits it costs each of the models {} % of perplexity or less", max(_SHIFTED))

# Not measured

PAGE.table("models | parameters | trained on | measured by", lambda *_: Unmeasured("sizes"))
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
