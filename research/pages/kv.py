"""Figures of the page on KV caches: as generation reads them, in longer contexts, and rotated."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from diffquant.measure.stats import Difference, mean_interval, paired_difference
from research.figure8.comparisons import THREE
from research.figure8.plan import KINDS, results
from research.pages import raw
from research.pages.render import fixed, interval, table
from research.studies.kv import gain
from research.studies.kv_decoded import kl_interval

FILES = {"Transformer": "prose-transformer", "DIFF V1": "prose-diff-v1", "DIFF V2": "prose-diff-v2"}
TEXTS = ("prose", "elsewhere")
TRAINED = {model: raw.raw(f"kv-decoded/{file}.json") for model, file in FILES.items()}
SMOLLM2 = raw.raw("kv-decoded/smollm2-135m.json")
CONTEXTS = {
    tokens: raw.raw(f"kv-decoded/smollm2-135m{end}.json")
    for tokens, end in ((512, ""), (1024, "-1024"), (4096, "-4096"))
}
ALL = TRAINED | {"SmolLM2": SMOLLM2}
# Bytes of a token at 16 bits: 5 layers of the small models, and 30 of SmolLM2.
FULL = dict.fromkeys(TRAINED, 2560) | {"SmolLM2": 30 * 2 * 3 * 64 * 2}
C32 = "4:c32, 4:row:rotated"
BEST = f"{C32}, residual 64"
UNROTATED, OF_TOKENS = "4:c32, 4:row, residual 64", "4:row, 4:row, residual 64"
OPTIONS = {
    "8:row, 8:row": "`--kv 8`",
    BEST: "`--preset kv-4bit-best`",
    "4:row, 4:row": "`--kv 4`",
    C32: "`--k 4:c32 --v 4:row:rotated`",
    "3:c32, 3:row:rotated": "`--k 3:c32 --v 3:row:rotated`",
}


def rows(model: str) -> Mapping[str, Any]:
    """Caches of a model by name."""
    found: Mapping[str, Any] = ALL[model]["results"]
    return found


def share(model: str, name: str) -> float:
    """Bytes of a token in a cache of 4,096 tokens, of what 16 bits take."""
    return float(rows(model)[name]["bytes_long"]) / FULL[model]


def thousandths(found: Mapping[str, Any], name: str, text: str = "prose") -> Difference:
    """KL of a cache in thousandths of a nat."""
    mean = kl_interval(found[name], text)
    return Difference(1000 * mean.mean, 1000 * mean.low, 1000 * mean.high)


def _mixes_three_bits(name: str) -> bool:
    """Whether either keys or values alone have 3 bits, which the table leaves out."""
    return sum(each.startswith("3:") for each in name.split(", ")) == 1


def caches_table(chosen: Mapping[str, str] | None = None) -> str:
    """Caches by size: share of 16 bits, and KL of four models on the prose."""
    by_size = sorted(rows("SmolLM2"), key=lambda name: rows("SmolLM2")[name]["bytes_long"])
    names = chosen or dict.fromkeys(name for name in by_size if not _mixes_three_bits(name))
    made = [
        [
            f"`{name}`" if chosen is None else str(chosen[name]),
            f"{100 * share('SmolLM2', name):.1f}",
            *(interval(thousandths(rows(model), name)) for model in ALL),
        ]
        for name in names
    ]
    heads = ["keys, values" if chosen is None else "options", "% of 16 bits"]
    return table([*heads, *(f"{model}, KL" for model in ALL)], made)


def best_of(model: str, text: str) -> str:
    """The cache of the lowest KL among those of at most three tenths of 16 bits."""
    small = [name for name in rows(model) if share(model, name) <= 0.3]
    return min(small, key=lambda name: float(rows(model)[name][text]["kl"]))


BEST_OF_ALL = all(best_of(model, text) == BEST for model in ALL for text in TEXTS)


def ratio(model: str, ours: str, other: str, text: str = "prose") -> float:
    """KL of one cache over that of another."""
    return float(rows(model)[ours][text]["kl"]) / float(rows(model)[other][text]["kl"])


def ratios(ours: str, other: str, models: tuple[str, ...] = tuple(FILES)) -> list[float]:
    """The same by model."""
    return [ratio(model, ours, other) for model in models]


def off(ours: str, other: str, models: tuple[str, ...] = tuple(FILES)) -> list[float]:
    """Shares of KL that one cache takes off another's, by model."""
    return [1 - each for each in ratios(ours, other, models)]


THREE_BITS_LOSE = all(ratio(model, "3:c32, 3:row:rotated", C32) > 3 for model in ALL)

# Larger models, by the rule of research/figure8/protocol.md

_THERE = results(raw.ROOT / raw.TRAININGS)
_LARGER = {
    name: [_THERE[f"e3-{kind}-seed-{seed}"]["caches"] for seed in THREE]
    for name, kind in zip(FILES, KINDS, strict=True)
}


def larger(model: str, name: str, text: str = "prose") -> Difference:
    """KL over the trainings of a kind of 5.3 M parameters, in thousandths of a nat."""
    return mean_interval([1000 * each["rows"][name][text]["kl"] for each in _LARGER[model]])


def _larger_share(model: str, name: str) -> float:
    first = _LARGER[model][0]
    return float(first["rows"][name]["bytes_long"] / first["bytes_long_at_16_bits"])


def larger_table() -> str:
    """Six caches of models of 5.3 M parameters."""
    made = [
        [
            f"`{name}`",
            f"{100 * _larger_share('Transformer', name):.1f}",
            *(interval(larger(model, name)) for model in FILES),
        ]
        for name in _LARGER["Transformer"][0]["rows"]
    ]
    return table(["keys, values", "% of 16 bits", *(f"{model}, KL" for model in FILES)], made)


def _lowest(model: str, text: str) -> str:
    small = [name for name in _LARGER[model][0]["rows"] if _larger_share(model, name) <= 0.3]
    return min(small, key=lambda name: larger(model, name, text).mean)


LARGER_HOLDS = all(_lowest(model, "prose") == BEST for model in FILES)


@cache
def unrotated_more(model: str) -> Difference:
    """KL that the preset without rotation has more, paired by training, in thousandths of a nat."""
    return mean_interval(
        [1000 * (each["rows"][UNROTATED]["prose"]["kl"] - each["rows"][BEST]["prose"]["kl"]) for each in _LARGER[model]]
    )


ONLY_V1_IS_TOLD = [model for model in FILES if unrotated_more(model).low > 0] == ["DIFF V1"]

# Longer contexts of SmolLM2


def contexts_table() -> str:
    """Caches in contexts of 1,024 and 4,096 tokens."""
    names = CONTEXTS[4096]["results"]
    made = [
        [
            f"`{name}`",
            f"{100 * names[name]['bytes_long'] / FULL['SmolLM2']:.1f}",
            *(
                interval(thousandths(CONTEXTS[tokens]["results"], name, text))
                for tokens in (1024, 4096)
                for text in TEXTS
            ),
        ]
        for name in sorted(names, key=lambda name: names[name]["bytes_long"])
    ]
    heads = [f"{tokens:,}{', elsewhere' if text == 'elsewhere' else ''}" for tokens in (1024, 4096) for text in TEXTS]
    return table(["keys, values", "% of 16 bits", *heads], made)


def beside(other: str, tokens: int, text: str) -> Difference:
    """KL of the preset minus another cache's over the same windows of SmolLM2."""
    found = CONTEXTS[tokens]["results"]
    return paired_difference(*(found[name][text]["kl_by_window"] for name in (BEST, other)))


_SAME_TOKENS = (UNROTATED, "4:c64, 4:row, residual 64")
BEST_AT_1024 = all(beside(other, 1024, text).mean < 0 for other in (*_SAME_TOKENS, OF_TOKENS, C32) for text in TEXTS)
LEVEL_AT_1024 = all(beside(other, 1024, text).high > 0 for other in _SAME_TOKENS for text in TEXTS)
KEYS_ARE_TOLD_AT_1024 = all(beside(other, 1024, text).high < 0 for other in (OF_TOKENS, C32) for text in TEXTS)
LEVEL_AT_4096 = all(
    each.low < 0 < each.high
    for other in (*_SAME_TOKENS, OF_TOKENS)
    for text in TEXTS
    for each in [beside(other, 4096, text)]
)


def windows(tokens: int) -> list[int]:
    """Windows of either text."""
    return [len(CONTEXTS[tokens]["results"][BEST][text]["kl_by_window"]) for text in TEXTS]


# Rotated keys and values

_ROTATED = {model: raw.raw(f"kv/{file}.json")["results"] for model, file in FILES.items()}
_FORMS = [f"{bits}:{keys}, {bits}:row" for bits in (4, 3) for keys in ("row", "c32")]


def rotated_table() -> str:
    """KL without rotation, and its change by rotated values and by rotated keys, where all tokens are rounded."""
    made = []
    for form in _FORMS:
        keys, values = form.split(", ")
        cells = [
            f"{fixed(1000 * found[form]['prose']['kl'], 1)}, {_change(found, f'{keys}, {values}:rotated')}"
            for found in _ROTATED.values()
        ]
        made.append([f"`{form}`", *cells])
    return table(["keys, values", *(f"{model}: KL, change by rotated values" for model in FILES)], made)


def _change(found: Mapping[str, Any], name: str, text: str = "prose") -> str:
    change = gain(found, name, text)
    if change is None:
        raise LookupError(f"{name} has no rotation")
    return interval(Difference(1000 * change.mean, 1000 * change.low, 1000 * change.high), 1, True)


def rotated_off() -> list[float]:
    """Shares of DIFF V1's KL that rotated values take off, over widths, keys and texts."""
    found = _ROTATED["DIFF V1"]
    return [1 - found[f"{form}:rotated"][text]["kl"] / found[form][text]["kl"] for form in _FORMS for text in TEXTS]


_OTHERS_CHANGES = [
    change
    for model in ("Transformer", "DIFF V2")
    for form in _FORMS
    for text in TEXTS
    if (change := gain(_ROTATED[model], f"{form}:rotated", text))
]
OTHERS_GAIN_NOTHING = sum(each.high < 0 for each in _OTHERS_CHANGES) <= 1 and not any(
    each.low > 0 for each in _OTHERS_CHANGES
)
ROTATED_KEYS_GAIN_NOTHING = all(
    change.high >= 0
    for found in _ROTATED.values()
    for bits in (4, 3)
    for text in TEXTS
    if (change := gain(found, f"{bits}:row:rotated, {bits}:row", text))
)
