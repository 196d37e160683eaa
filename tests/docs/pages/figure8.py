"""The figures of docs/figure8.md."""

import math
from collections.abc import Callable
from typing import Any

from diffquant.evals.stats import estimate, paired_difference
from studies.figure8 import advantage, mean_kl, parts, predicted
from tests.docs.numbers import Expected
from tests.docs.page import Page, Unmeasured
from tests.docs.pages.pocket import accuracy
from tests.docs.raw import measured, points, raw, values_of

PAGE = Page("docs/figure8.md")
KINDS = ("transformer", "diff-v1", "diff-v2")
PROSE, PROSE1, NEEDLE, AT600, AT1200 = (
    {kind: raw(f"{place}{kind}{end}.json") for kind in KINDS}
    for place, end in (
        ("figure8-prose-kl/prose-", ""),
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


def change(trio: Trio, kind: str, scheme: str) -> list[Expected]:
    """The paired difference of KL from the Transformer's, with its interval."""
    paired = paired_difference(trio[kind]["kl"][scheme], trio["transformer"]["kl"][scheme])
    return [paired.mean, paired.low, paired.high]


# Table 5

_OUTLIERS = {
    model["name"]: model["overall"]
    for file in ("figure8-outliers", "smollm2-outliers")
    for model in raw(f"{file}/outliers.json")["models"]
}
_RANKS = {"top 1": "1", "top 10": "10"}


def _outliers(row: str, column: str) -> list[Expected] | Unmeasured:
    if row.startswith("the paper"):
        return Unmeasured("the paper's Table 5")
    kind, _, rank = column.partition(", ")
    name = "SmolLM2-135M-Instruct.Q4_1.gguf" if row == "SmolLM2-135M" else row
    magnitudes = _OUTLIERS[name][kind]
    return [magnitudes["median"] if rank == "median" else magnitudes["top"][_RANKS[rank]]]


PAGE.table(
    " | logits, top 1 | top 10 | median | hidden, top 1 | top 10 | median",
    _outliers,
    columns=[f"{kind}, {rank}" for kind in ("logits", "hidden") for rank in ("top 1", "top 10", "median")],
)


def _hidden(kind: str) -> float:
    return float(_OUTLIERS[f"prose-{kind}"]["hidden"]["top"]["1"])


PAGE.says(
    "V1's largest is {} and V2's {} of the Transformer's",
    _hidden("diff-v1") / _hidden("transformer"),
    _hidden("diff-v2") / _hidden("transformer"),
)
PAGE.says("(the paper: {})", 1688.2 / 3608.6)
PAGE.says("in the noise map of a layer with λ = {};", PROSE["diff-v1"]["layers"][1]["lam"]["mean"])
PAGE.says("a hundred times as large, reach {}.", _OUTLIERS["SmolLM2-135M-Instruct.Q4_1.gguf"]["logits"]["top"]["1"])

# Figure 8, perplexity and KL


def _perplexity(kind: str, scheme: str, target: str = "logits") -> dict[str, float]:
    folder = "figure8-prose" if target == "logits" else "figure8-prose-stored"
    return measured(folder, f"prose-{kind}", scheme, target=target).details


def _rise_and_kl(row: str, column: str) -> list[Expected]:
    kind = kind_of(column)
    rounded, full = _perplexity(kind, row), _perplexity(kind, "16")
    return [100 * (rounded["perplexity"] / full["perplexity"] - 1), rounded["kl"]]


PAGE.table("logits | Transformer | DIFF V1 | DIFF V2", _rise_and_kl, row="6:tensor")
PAGE.says("is {} (Transformer), {} (V1) and {} (V2): V1", *(_perplexity(kind, "16")["perplexity"] for kind in KINDS))
PAGE.table(
    "logits | V1, bits | V1, KL | V2, bits | V2, KL",
    lambda row, column: (
        [bits(PROSE, kind_of(column), f"4:{row}")]
        if column.endswith("bits")
        else change(PROSE, kind_of(column), f"4:{row}")
    ),
)


def _won_per_head(kind: str) -> float:
    return bits(PROSE, kind, "4:head") - bits(PROSE, kind, "4:tensor")


PAGE.says("more than the Transformer, by {} bits (V1) and {} (V2)", _won_per_head("diff-v1"), _won_per_head("diff-v2"))
_PLAIN = ("4:tensor", "4:head", "4:pair", "4:row", "4:tensor:shift", "4:row:shift")
_LOST = {
    kind: [-bits(trio, kind, scheme) for trio in (PROSE, PROSE1) for scheme in _PLAIN if scheme in trio[kind]["kl"]]
    for kind in ("diff-v1", "diff-v2")
}
PAGE.says(
    "V1 needs {} to {} bits more than the Transformer for the same KL from its own 16-bit logits, V2 {} to {}",
    *(take(_LOST[kind]) for kind in ("diff-v1", "diff-v2") for take in (min, max)),
)

# Figure 8, retrieval


def _retrieved(row: str, column: str) -> list[Expected]:
    model = f"needle-{kind_of(column)}"
    return [
        accuracy("figure8-needle-alike" if "alike" in scheme else "pocket-needle", model, scheme, 4)
        for scheme in row.split(" → ")
    ]


PAGE.table("logits | Transformer | DIFF V1 | DIFF V2", _retrieved, row="4:head")
PAGE.table(
    "logits | Transformer | V1 | V2",
    lambda row, column: _retrieved(row, column)[: 1 if column == "Transformer" else 2],
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
PAGE.says(
    "at 3 bits a head, V1 retrieves {} of 100 numbers where the Transformer retrieves {}",
    100 * accuracy("figure8-needle-alike", "needle-diff-v1", "3:head:alike", 4),
    100 * accuracy("pocket-needle", "needle-transformer", "3:head", 4),
)


def _lead(granularity: str) -> tuple[float, float, float]:
    """Points that V1 under alike retrieves more than the Transformer at 3 bits, N = 4."""
    of_kinds = [
        measured("figure8-needle-alike", f"needle-{kind}", scheme, "needle:4:1")
        for kind, scheme in (("diff-v1", f"3:{granularity}:alike"), ("transformer", f"3:{granularity}"))
    ]
    return points(paired_difference(*map(values_of, of_kinds)))


PAGE.says("by {} points a head [{}, {}] and {} a tensor [{}, {}]", *_lead("head"), *_lead("tensor"))
PAGE.says("per row is no better ({} points [{}, {}])", *_lead("row"))

# What decides it


def ratios(result: dict[str, Any], keep: Callable[[str], bool]) -> list[float]:
    """Measured KL over the predicted."""
    return [mean_kl(result, scheme).mean / predicted(result, scheme) for scheme in result["kl"] if keep(scheme)]


def _wide(scheme: str) -> bool:
    return scheme.split(":", 1)[1] in ("tensor", "head", "pair")


_PROSE_RATIOS = [each for result in PROSE.values() for each in ratios(result, _wide)]
_SMOL_RATIOS = ratios(SMOLLM2, lambda scheme: _wide(scheme) and scheme != "3:head")
PAGE.says(
    "measured KL is {} to {} of the prediction in all three models, and for SmolLM2-135M {} to {} but for `3:head` "
    "({})",
    min(_PROSE_RATIOS),
    max(_PROSE_RATIOS),
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
_CERTAIN = {kind: estimate(result["nll"]).mean for kind, result in NEEDLE.items()}
PAGE.says("({} nats in the Transformer, {} in V2)", _CERTAIN["transformer"], _CERTAIN["diff-v2"])
_MISSES = [
    max(ratio, 1 / ratio)
    for result in NEEDLE.values()
    for ratio in ratios(result, lambda s: s.startswith(("8:", "6:")))
]
PAGE.means("tenfold at 6 and 8 bits", 8 < max(_MISSES) < 12, f"up to {max(_MISSES):.0f}-fold")
PAGE.means(
    "(0.00013 nats in the Transformer, 0.0044 in V2)",
    _CERTAIN["diff-v1"] < 0.01,
    f"V1 is left out, with {_CERTAIN['diff-v1']:.3f} nats",
)
PAGE.leaves("a factor of 1.4", "arithmetic: half a bit is the square root of 2")
PAGE.leaves("from 0.0001 to 0.5 nats", "a range in words")

PAGE.table(
    " | predicted | = range | + sensitivity | measured",
    lambda row, column: [
        {
            "predicted": bits_predicted(PROSE, kind_of(row), "4:tensor"),
            "= range": bits_of_parts(PROSE, kind_of(row), "4:tensor")[0],
            "+ sensitivity": bits_of_parts(PROSE, kind_of(row), "4:tensor")[1],
            "measured": bits(PROSE, kind_of(row), "4:tensor"),
        }[column]
    ],
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
    "in V1's second layer, λ = {}, its noise costs as much as the signal map's ({} and {}), with λ between {} and {} "
    "only {} to {} %",
    PROSE["diff-v1"]["layers"][1]["lam"]["mean"],
    _SECOND[1]["second"],
    _SECOND[1]["first"],
    min(_LAMBDAS),
    max(_LAMBDAS),
    min(_SHARES),
    max(_SHARES),
)


def _norm(row: str, column: str) -> list[Expected]:
    layer = PROSE[kind_of(column)]["layers"][int(row)]
    if "terms" in column:
        return [layer["cancellation"]]
    return [100 * layer["errors"]["4:tensor"]["before_norm" if "before" in column else "after_norm"]]


PAGE.table(
    "layer | Transformer | V1, before | V1, after | V1, terms over difference | V2 | V2, terms over difference", _norm
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


PAGE.says("and grows {} times in V2", _growth("diff-v2"))
PAGE.says("log2(318.0 / 38.8) = {} bits", math.log2(318.0 / 38.8))
PAGE.says("a step of 318.0 / 31 = {}, DIFF at 4 bits one of 38.8 / 7 = {}", 318.0 / 31, 38.8 / 7)
PAGE.says("leaves {} bits for sensitivity", math.log2((318.0 / 31) / (38.8 / 7)))

# Rounding both maps alike


def _alike(row: str, column: str) -> list[Expected]:
    plain, alike = (f"4:{scheme}" for scheme in row.split(" → "))
    kind = kind_of(column)
    if "against" not in column:
        return [mean_kl(PROSE[kind], scheme).mean for scheme in (plain, alike)]
    transformer = PROSE["transformer"]["kl"][plain]
    of_bits: list[Expected] = [
        advantage(mean_kl(PROSE[kind], scheme).mean, estimate(transformer).mean) for scheme in (plain, alike)
    ]
    if kind == "diff-v1":
        return of_bits
    paired = paired_difference(PROSE[kind]["kl"][alike], transformer)
    return [*of_bits, paired.mean, paired.low, paired.high]


PAGE.table("logits | V1 | V2 | V1 against Transformer | V2 against Transformer", _alike)


def _bits_alike(trio: Trio, kind: str, scheme: str) -> float:
    """Bits won over the Transformer, whose one map is rounded as ever."""
    plain = scheme.removesuffix(":alike")
    return advantage(mean_kl(trio[kind], scheme).mean, mean_kl(trio["transformer"], plain).mean)


def _gain(kind: str, scheme: str) -> float:
    return _bits_alike(PROSE, kind, f"{scheme}:alike") - bits(PROSE, kind, scheme)


_GAINS = {
    kind: [_gain(kind, f"{width}:{g}") for width in (8, 6, 4, 3) for g in ("tensor", "head", "row")]
    for kind in ("diff-v1", "diff-v2")
}
PAGE.says("gains {} to {} bits of KL", min(_GAINS["diff-v2"]), max(_GAINS["diff-v2"]))
PAGE.says("V1 gains {} to {} and does not", min(_GAINS["diff-v1"]), max(_GAINS["diff-v1"]))

# Cache and weights


def _stored(row: str, column: str) -> list[Expected]:
    target, _, width = row.partition(", ")
    scheme = f"{width[0]}:row"
    return [_perplexity(kind_of(column), scheme, target.lower())["kl"]]


PAGE.table(" | Transformer | DIFF V1 | DIFF V2", _stored)
_CACHE = {kind: _perplexity(kind, "4:row", "kv")["kl"] for kind in KINDS}
PAGE.says("(its KL is {} times theirs)", _CACHE["diff-v1"] / _CACHE["transformer"])
PAGE.says(
    "with a cache of 3 it is {}, {} and {}",
    *(accuracy("pocket-needle-weights-kv", f"needle-{kind}", "3:row", 4, "kv") for kind in KINDS),
)
PAGE.says(
    "N = 4, keeps at least {} with weights of 3 bits and with a cache of 4",
    min(
        accuracy("pocket-needle-weights-kv", f"needle-{kind}", scheme, 4, target)
        for kind in KINDS
        for scheme, target in (("3:row", "weights"), ("4:row", "kv"))
    ),
)

# The second seed


def _second_seed(row: str, column: str) -> list[Expected]:
    kind, _, seed = column.partition(": seed ")
    return [_bits_alike(PROSE if seed == "0" else PROSE1, kind_of(kind), f"4:{row}")]


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
_SHIFTED = [100 * (_perplexity(k, "4:row:shift")["perplexity"] / _perplexity(k, "16")["perplexity"] - 1) for k in KINDS]
PAGE.says("at 4 bits it costs each of the models {} % of perplexity or less", max(_SHIFTED))

# Not measured

PAGE.table("models | parameters | trained on | measured by", lambda *_: Unmeasured("sizes"))
PAGE.leaves("about 25 points of HellaSwag (Figure 8)", "the paper's")
PAGE.leaves("is 318.0 in the Transformer and 38.8 in DIFF, the largest hidden state 3608.6 and 1688.2", "the paper's")
PAGE.leaves("In Table 5 it is smaller by 8.2", "the paper's")
PAGE.leaves("on 32,768 characters", "a setting")
PAGE.leaves("Rise of perplexity, and KL in nats, 32,768 characters", "a setting")
PAGE.leaves("intervals are 95 %, over 21 windows of 256 tokens (16,384 characters)", "settings")
PAGE.leaves("one standard error is at most 5 points", "binomial")
PAGE.leaves("normal noise of σ = 0.1", "a setting")
PAGE.leaves("(1,800 steps in all)", "a setting")
PAGE.leaves("until step 1,200", "a setting")
PAGE.leaves("log2(318.0 / 38.8)", "the paper's")
PAGE.leaves("318.0 / 31", "the paper's")
PAGE.leaves("38.8 / 7", "the paper's")
