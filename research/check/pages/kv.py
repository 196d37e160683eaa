"""The figures of research/pages/kv.md."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from diffquant.evals.stats import Difference, mean_interval, paired_difference
from research.check.numbers import ends
from research.check.page import Page
from research.check.raw import interval, raw
from research.figure8.analysis import THREE
from research.figure8.plan import KINDS, results
from research.studies.kv import cost_cells, gain
from research.studies.kv_decoded import byte_cells
from research.studies.kv_results import TEXTS

PAGE = Page("research/pages/kv.md")
MODELS = {name: raw(f"kv/{name}.json") for name in ("prose-transformer", "prose-diff-v1", "prose-diff-v2")}


def _cells(row: str) -> list[str]:
    model, _, cache = row.partition(", ")
    return cost_cells(MODELS[model], cache)


PAGE.rows("model | keys, values | bytes per token | KL, nats | elsewhere: KL, nats", _cells, names=2)
PAGE.says(
    "{} characters in windows of {} tokens", *(MODELS["prose-diff-v1"]["settings"][x] for x in ("characters", "window"))
)


def less(bits: int, text: str) -> list[float]:
    """Percent of DIFF V1's KL that rotated values take off, by the scheme of its keys."""
    results = MODELS["prose-diff-v1"]["results"]
    pairs = [(f"{bits}:{keys}, {bits}:row:rotated", f"{bits}:{keys}, {bits}:row") for keys in ("row", "c32")]
    return [100 * (1 - results[ours][text]["kl"] / results[plain][text]["kl"]) for ours, plain in pairs]


_FOUR, _THREE = less(4, "prose"), less(3, "prose")
_THERE = less(4, "elsewhere") + less(3, "elsewhere")
PAGE.says(
    "takes {} to {} % of its KL off DIFF V1 at 4 bits and {} to {} % at 3 bits",
    *ends(_FOUR),
    *ends(_THREE),
)
PAGE.says("and {} to {} % elsewhere", *ends(_THERE))
_PLAIN = [
    change
    for model in ("prose-transformer", "prose-diff-v2")
    for bits in (4, 3)
    for keys in ("row", "c32")
    for text in TEXTS
    if (change := gain(MODELS[model]["results"], f"{bits}:{keys}, {bits}:row:rotated", text))
]
PAGE.means(
    "of their sixteen intervals one lies below zero, by less than 0.001 nats",
    len(_PLAIN) == 16
    and [change.mean > -0.001 for change in _PLAIN if change.high < 0] == [True]
    and not [change for change in _PLAIN if change.low > 0],
)
PAGE.means(
    "Rotated keys gain nothing on any of the three models",
    all(
        change is None or change.high >= 0
        for model in MODELS.values()
        for bits in (4, 3)
        for text in TEXTS
        for change in [gain(model["results"], f"{bits}:row:rotated, {bits}:row", text)]
    ),
)
PAGE.means(
    "one lies below zero, by less than 0.001 nats, and none above",
    sum(change.high < 0 for change in _PLAIN) == 1 and not any(change.low > 0 for change in _PLAIN),
)
PAGE.leaves("by less than 0.001 nats", "a bound that a claim beside it checks")
PAGE.means(
    "every interval of that lies above zero",
    all(
        change and change.low > 0
        for bits in (4, 3)
        for text in TEXTS
        if (change := gain(MODELS["prose-diff-v1"]["results"], f"{bits}:row:rotated, {bits}:row", text))
    ),
)
PAGE.means(
    "is the best of the seven caches for DIFF V1 on both texts, at 4 bits and at 3",
    all(
        min(rows, key=lambda name: rows[name][text]["kl"]) == f"{bits}:c32, {bits}:row:rotated"
        for bits in (4, 3)
        for text in TEXTS
        for rows in [{n: r for n, r in MODELS["prose-diff-v1"]["results"].items() if n.startswith(str(bits))}]
    ),
)
PAGE.leaves("The models have 1.25 M parameters", "a count")
PAGE.leaves("with its 95 % interval", "a level")
PAGE.leaves("one per channel over 32 tokens", "a scheme")

# The best 4-bit cache

DECODED = {name: raw(f"kv-decoded/{name}.json") for name in MODELS}
SMOLLM2 = raw("kv-decoded/smollm2-135m.json")
MIDDLE = raw("kv-decoded/smollm2-135m-1024.json")
LONG = raw("kv-decoded/smollm2-135m-4096.json")
C32 = "4:c32, 4:row:rotated"
BEST = f"{C32}, residual 64"
# Bytes of a token at 16 bits, in each of the models.
_FULL = 2560
_SMOLLM2_FULL = 30 * 3 * 2 * 64 * 2


def _decoded_cells(row: str, smollm2: Mapping[str, Any]) -> list[str]:
    model, _, cache = row.partition(", ")
    return byte_cells(DECODED.get(model, smollm2)["results"], cache)


for _section, _smollm2 in {
    "The best 4-bit cache": SMOLLM2,
    "SmolLM2-135M": SMOLLM2,
    "In a context of 1,024 tokens": MIDDLE,
    "In a context of 4,096 tokens": LONG,
}.items():
    PAGE.rows(
        "model | keys, values | bytes per token | in 4,096 tokens | KL, 0.001 nats | elsewhere",
        partial(_decoded_cells, smollm2=_smollm2),
        section=_section,
        names=2,
    )


def _times(ours: str, others: str) -> dict[str, float]:
    """KL of one cache over that of another on the prose, by model."""
    results_by_model = {model: one["results"] for model, one in DECODED.items()}
    return {model: rows[ours]["prose"]["kl"] / rows[others]["prose"]["kl"] for model, rows in results_by_model.items()}


def _percent_off(ours: str, others: str) -> tuple[float, float]:
    return ends(100 * (1 - times) for times in _times(ours, others).values())


def _long_bytes(model: str, cache: str) -> float:
    size: float = DECODED[model]["results"][cache]["bytes_long"]
    return size


def _best(rows: Mapping[str, Any], text: str, full: int) -> str:
    """The cache of the lowest KL of those that take at most three tenths of what 16 bits take."""
    small = [name for name, row in rows.items() if row["bytes_long"] <= 0.3 * full]
    return min(small, key=lambda name: float(rows[name][text]["kl"]))


def _is_best(text: str) -> bool:
    return all(_best(one["results"], text, _FULL) == BEST for one in DECODED.values())


BEST_IN_WINDOWS = all(_is_best(text) and _best(SMOLLM2["results"], text, _SMOLLM2_FULL) == BEST for text in TEXTS)
PAGE.means("it has the lowest KL for each of the three models trained here", _is_best("prose"))
PAGE.means("Elsewhere that is so, too", _is_best("elsewhere"))
PAGE.says(
    "In 4,096 tokens it takes {} bytes per token (DIFF V1: {})",
    *(_long_bytes(model, BEST) for model in ("prose-diff-v2", "prose-diff-v1")),
)
PAGE.leaves("where 16 bits take 2,560", "arithmetic")
PAGE.says(
    "in the windows that KL was measured in it takes {} (DIFF V1: {})",
    *(DECODED[model]["results"][BEST]["bytes"] for model in ("prose-diff-v2", "prose-diff-v1")),
)
_KEPT = [
    {_long_bytes(model, f"{C32}, residual {kept}") - _long_bytes(model, C32) for model in MODELS} for kept in (32, 64)
]
PAGE.says(
    "tokens at 16 bits takes {} to {} % off the KL of `4:c32, 4:row:rotated` on the prose, for {} or {} bytes per "
    "token in 4,096; keeping 64 takes {} to {} % off, for {}",
    *_percent_off(f"{C32}, residual 32", C32),
    *ends(_KEPT[0]),
    *_percent_off(BEST, C32),
    max(_KEPT[1]),
)
PAGE.says(
    "their KL is {} to {} times that of 4 bits with the newest 32 apart",
    *ends(_times("6:c32, 6:row:rotated", f"{C32}, residual 32").values()),
)
PAGE.says("have {} to {} % less KL than keys with a scale per token", *_percent_off("4:c32, 4:row", "4:row, 4:row"))
_ALL_ROUNDED = [
    100 * (1 - one["results"]["4:c32, 4:row"]["prose"]["kl"] / one["results"]["4:row, 4:row"]["prose"]["kl"])
    for one in MODELS.values()
]
PAGE.says("where all tokens are rounded, in the table above, it is {} to {} %", *ends(_ALL_ROUNDED))
_ROWS = _times("3:row, 4:row", "4:row, 3:row")
PAGE.says(
    "(3 bits on the keys have {} and {} times the KL of 3 bits on the values), and DIFF V1 the wider values ({} times)",
    *(_ROWS[model] for model in ("prose-transformer", "prose-diff-v2", "prose-diff-v1")),
)
PAGE.says(
    "({} to {} times), and 8-bit keys beside 4-bit values have {} to {} times the KL of the reverse",
    *ends(_times("3:c32, 4:row:rotated", "4:c32, 3:row:rotated").values()),
    *ends(_times("8:c32, 4:row:rotated", "4:c32, 8:row:rotated").values()),
)
PAGE.means(
    "whose newest block is not rounded, all three want the wider values",
    max(_times("3:c32, 4:row:rotated", "4:c32, 3:row:rotated").values()) < 1,
)
_TURNED = _times(C32, "4:c32, 4:row")
PAGE.says(
    "have {} % less KL in DIFF V1 and change it by at most {} % in the others",
    100 * (1 - _TURNED["prose-diff-v1"]),
    max(100 * abs(_TURNED[model] - 1) for model in ("prose-transformer", "prose-diff-v2")),
)
PAGE.says(
    "KL becomes {} to {} times as large, and a fifth bit in all layers makes it {} to {} times as large again",
    *ends(_times(f"{C32}, ends 16", C32).values()),
    *ends(_times("5:c32, 5:row:rotated", f"{C32}, ends 16").values()),
)


# SmolLM2


def _smollm2_times(ours: str, others: str) -> float:
    """KL of one cache over that of another on the prose, on SmolLM2."""
    rows = SMOLLM2["results"]
    return float(rows[ours]["prose"]["kl"] / rows[others]["prose"]["kl"])


PAGE.says(
    "windows of {} tokens: {} of them as a prompt and {} one by one, {} characters of either text, {} windows each",
    SMOLLM2["settings"]["window"],
    SMOLLM2["settings"]["window"] - SMOLLM2["settings"]["scored"],
    SMOLLM2["settings"]["scored"],
    SMOLLM2["settings"]["characters"],
    *{len(SMOLLM2["results"][BEST][text]["kl_by_window"]) for text in TEXTS},
)
PAGE.says("16 bits take {} bytes per token", _SMOLLM2_FULL)
PAGE.means(
    "it has the lowest KL here, too, on both texts",
    all(_best(SMOLLM2["results"], text, _SMOLLM2_FULL) == BEST for text in TEXTS),
)
PAGE.says(
    "4-bit keys beside 8-bit values have {} times the KL of 8-bit keys beside 4-bit values; with the models trained "
    "here it is {} to {} times",
    _smollm2_times("4:row, 8:row", "8:row, 4:row"),
    *ends(_times("4:row, 8:row", "8:row, 4:row").values()),
)
PAGE.says(
    "A scale per channel takes {} % off the KL of `4:row, 4:row`",
    100 * (1 - _smollm2_times("4:c32, 4:row", "4:row, 4:row")),
)
PAGE.says(
    "take {} % off that of `4:row, 4:row:rotated`",
    100 * (1 - _smollm2_times("4:row:rotated, 4:row:rotated", "4:row, 4:row:rotated")),
)
PAGE.means("Keys per channel have less KL still", _smollm2_times(C32, "4:row:rotated, 4:row:rotated") < 1)
PAGE.says(
    "32 tokens are fewer of {}, and take {} % off",
    SMOLLM2["settings"]["window"],
    100 * (1 - _smollm2_times(f"{C32}, residual 32", C32)),
)
PAGE.says(
    "A fifth bit throughout, for {} bytes, takes {} % off",
    SMOLLM2["results"]["5:c32, 5:row:rotated"]["bytes_long"],
    100 * (1 - _smollm2_times("5:c32, 5:row:rotated", C32)),
)

# Longer contexts

_MIDDLE_SETTINGS = MIDDLE["settings"]
PAGE.says(
    "Windows of {} tokens, of which {} are a prompt and {} are read one by one: {} of the prose and {} elsewhere, "
    "in {} characters",
    _MIDDLE_SETTINGS["window"],
    _MIDDLE_SETTINGS["window"] - _MIDDLE_SETTINGS["scored"],
    _MIDDLE_SETTINGS["scored"],
    *(len(MIDDLE["results"][BEST][text]["kl_by_window"]) for text in TEXTS),
    _MIDDLE_SETTINGS["characters"],
)


_LONG_SETTINGS = LONG["settings"]
PAGE.says(
    "in windows of {} tokens: {} of them as a prompt and {} one by one, {} characters of either text, {} windows of "
    "the prose and {} elsewhere",
    _LONG_SETTINGS["window"],
    _LONG_SETTINGS["window"] - _LONG_SETTINGS["scored"],
    _LONG_SETTINGS["scored"],
    _LONG_SETTINGS["characters"],
    *(len(LONG["results"][BEST][text]["kl_by_window"]) for text in TEXTS),
)
# Caches of at most three tenths of 16 bits that keep 64 tokens at 16 bits, as the preset does.
_ALTERNATIVES = ("4:c32, 4:row, residual 64", "4:c64, 4:row, residual 64", "4:row, 4:row, residual 64")


def _beside_the_best(other: str, text: str, measured: Mapping[str, Any] = LONG) -> Difference:
    """KL of the preset less another cache's over the same windows."""
    return paired_difference(*(measured["results"][name][text]["kl_by_window"] for name in (BEST, other)))


def _long_times(other: str, text: str) -> float:
    """KL of another cache over the preset's."""
    kl, of_preset = (LONG["results"][name][text]["kl"] for name in (other, BEST))
    return float(kl / of_preset)


_MIDDLE = {(other, text): _beside_the_best(other, text, MIDDLE) for other in (*_ALTERNATIVES, C32) for text in TEXTS}
BEST_OF_MIDDLE = all(each.mean < 0 for each in _MIDDLE.values()) and all(
    MIDDLE["results"][other]["bytes_long"] <= 0.3 * _SMOLLM2_FULL for other in (*_ALTERNATIVES, C32, BEST)
)
PAGE.means(
    "The preset has the lowest KL of these caches of at most three tenths of 16 bits, on both texts", BEST_OF_MIDDLE
)
PAGE.means(
    "Two others that keep 64 tokens and have a scale per channel of the keys cannot be told from it: no interval of a "
    "paired difference misses\nzero",
    all(_MIDDLE[other, text].high > 0 for other in _ALTERNATIVES[:2] for text in TEXTS),
)
PAGE.says(
    "With a scale per token for keys KL is {} and {} times as large, and without the newest 64 tokens {} and {} times",
    *(
        MIDDLE["results"][other][text]["kl"] / MIDDLE["results"][BEST][text]["kl"]
        for other in (_ALTERNATIVES[2], C32)
        for text in TEXTS
    ),
)
PAGE.means(
    "these four intervals miss zero",
    all(_MIDDLE[other, text].high < 0 for other in (_ALTERNATIVES[2], C32) for text in TEXTS),
)
LONG_LEVEL = all(
    each.low < 0 < each.high for other in _ALTERNATIVES for text in TEXTS for each in [_beside_the_best(other, text)]
)
PAGE.means(
    "Nothing here tells the preset from others that keep 64 tokens.** No interval of a paired difference between it "
    "and one of these three misses zero",
    LONG_LEVEL,
)
_WITHOUT_NEWEST, _AT_THE_ENDS = C32, f"{C32}, residual 32, ends 16"
_NEWEST = {text: _beside_the_best(_WITHOUT_NEWEST, text) for text in TEXTS}
PAGE.says(
    "Without them the prose has {} thousandths of a nat more [{}, {}], {} times the preset's KL",
    *(-1000 * value for value in (_NEWEST["prose"].mean, _NEWEST["prose"].high, _NEWEST["prose"].low)),
    _long_times(_WITHOUT_NEWEST, "prose"),
)
PAGE.says("Elsewhere it is {} times, and the interval contains zero", _long_times(_WITHOUT_NEWEST, "elsewhere"))
PAGE.means(
    "help on one of two texts",
    _NEWEST["prose"].high < 0 and _NEWEST["elsewhere"].low < 0 < _NEWEST["elsewhere"].high,
)
PAGE.says(
    "With them and 32 tokens the KL is {} and {} times the preset's",
    *(_long_times(_AT_THE_ENDS, text) for text in TEXTS),
)
_ENDS = [_beside_the_best(_AT_THE_ENDS, text) for text in TEXTS]
PAGE.means(
    "The ends at 16 bits show no gain.** They take more than three tenths of 16 bits",
    LONG["results"][_AT_THE_ENDS]["bytes_long"] > 0.3 * _SMOLLM2_FULL and all(each.mean < 0 for each in _ENDS),
)
PAGE.means("both intervals contain zero", all(each.low < 0 < each.high for each in _ENDS))
PAGE.says(
    "It has {} thousandths of a nat less than the same without rotation on the prose and {} more elsewhere",
    -1000 * _beside_the_best(_ALTERNATIVES[0], "prose").mean,
    1000 * _beside_the_best(_ALTERNATIVES[0], "elsewhere").mean,
)
PAGE.says(
    "has {} and {} thousandths where it has {} and {} in windows of 512",
    *(1000 * rows["results"][BEST][text]["kl"] for rows in (LONG, SMOLLM2) for text in TEXTS),
)
PAGE.says(
    "`4:row, 4:row, residual 64` has {} and {} times its KL",
    *(_long_times(_ALTERNATIVES[2], text) for text in TEXTS),
)
PAGE.says(
    "Keeping 64 tokens takes {} and {} % off SmolLM2's KL in windows of 512, and {} and {} % in windows of 4,096",
    *(
        100 * (1 - rows["results"][BEST][text]["kl"] / rows["results"][C32][text]["kl"])
        for rows in (SMOLLM2, LONG)
        for text in TEXTS
    ),
)
PAGE.leaves("by this model alone, in seven windows", "the windows above")
PAGE.leaves("a cache of 4,096 tokens", "a length")
PAGE.leaves("three tenths of 16 bits in 4,096 tokens", "a bound")
PAGE.leaves("KL is in thousandths of a nat, with its 95 % interval", "a level")
PAGE.leaves("at 47.8 where 16 bits have 13.5, and of Qwen3-8B at 7.38 against 7.23", "of the issue that it links to")

# The preset in larger models, by the rule of research/figure8/protocol.md

THERE = results()
_TRIO = {f"prose-{kind}": [THERE[f"e3-{kind}-seed-{seed}"]["caches"] for seed in THREE] for kind in KINDS}


def _larger(model: str, cache: str, text: str) -> Difference:
    """KL over the trainings of a kind, in thousandths of a nat."""
    return mean_interval([1000 * each["rows"][cache][text]["kl"] for each in _TRIO[model]])


def _share(model: str, cache: str) -> float:
    first = _TRIO[model][0]
    return float(first["rows"][cache]["bytes_long"] / first["bytes_long_at_16_bits"])


def _of_larger(row: str, column: str) -> list[float]:
    model, _, cache = row.partition(", ")
    if column.startswith("%"):
        return [100 * _share(model, cache)]
    return list(interval(_larger(model, cache, "elsewhere" if column == "elsewhere" else "prose")))


PAGE.table(
    "5.3 million parameters | keys, values | % of 16 bits in 4,096 tokens | KL, 0.001 nats | elsewhere",
    _of_larger,
    names=2,
)


def _lowest(model: str, text: str) -> str:
    """The cache of lowest mean KL among those of at most three tenths of 16 bits."""
    small = [cache for cache in _TRIO[model][0]["rows"] if _share(model, cache) <= 0.3]
    return min(small, key=lambda cache: _larger(model, cache, text).mean)


_HOLDS = {text: {model.removeprefix("prose-") for model in _TRIO if _lowest(model, text) == BEST} for text in TEXTS}
PAGE.means(
    "**By that rule, which compares means, the preset holds for all three kinds.**", _HOLDS["prose"] == set(KINDS)
)


def _paired(model: str) -> Difference:
    """KL on the prose that the preset's alternative without rotation has more, paired by training, in 0.001 nats."""
    return mean_interval(
        [
            1000 * (training["rows"][_ALTERNATIVES[0]]["prose"]["kl"] - training["rows"][BEST]["prose"]["kl"])
            for training in _TRIO[model]
        ]
    )


PAGE.says(
    "the same cache without rotation has {} [{}, {}] more on the prose in DIFF V1", *interval(_paired("prose-diff-v1"))
)
PAGE.means(
    "in the other two kinds the\ninterval of the difference holds zero",
    all(_paired(f"prose-{kind}").low < 0 < _paired(f"prose-{kind}").high for kind in ("transformer", "diff-v2")),
)
PAGE.means(
    "Elsewhere it has the lowest mean of both DIFF kinds, too; in the Transformer the same without rotation has it",
    _HOLDS["elsewhere"] == {*KINDS} - {"transformer"} and _lowest("prose-transformer", "elsewhere") == _ALTERNATIVES[0],
)


def _over_preset(model: str, cache: str) -> float:
    """Mean KL of a cache on the prose over the preset's."""
    return _larger(model, cache, "prose").mean / _larger(model, BEST, "prose").mean


PAGE.says(
    "DIFF V1 has {} times\nthe preset's KL without rotated values, the Transformer {} and DIFF V2 {} times",
    *(_over_preset(f"prose-{kind}", _ALTERNATIVES[0]) for kind in ("diff-v1", "transformer", "diff-v2")),
)
PAGE.says("at 16 bits KL is {} to {} times as large", *ends(_over_preset(model, C32) for model in _TRIO))
