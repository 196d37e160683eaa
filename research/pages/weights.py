"""Figures of the page on rounding weights: methods at equal bits, searched widths, and rotations."""

import math
import re
from collections.abc import Sequence
from typing import Any

from diffquant.measure.stats import Difference, mean_interval
from research.pages.raw import raw
from research.pages.render import interval, table
from research.studies.rotated import NARROW, ROTATED, change, compared, name_of
from research.studies.rounding_repeats import RULES, lead, spread
from research.studies.rounding_tables import READERS, kl_less

FILES = {
    "SmolLM2-135M": "smollm2-135m-windows",
    "Transformer": "prose-transformer",
    "DIFF V1": "prose-diff-v1",
    "DIFF V2": "prose-diff-v2",
}
RESULTS = {model: raw(f"rounding/{file}.json") for model, file in FILES.items()}
TRAINED = tuple(FILES)[1:]
TEXTS = ("prose", "elsewhere")
# Tiers of bits, by the sizes of ours.
SIZES = {"4:g32": "4.5 bits", "4:g128": "4.125 bits", "6:g128": "6.125 bits", "3:g32": "3.5 bits"}
AUTOROUND = {
    "4:g32": "AutoRound 4 bits, groups of 32",
    "4:g128": "AutoRound 4 bits, groups of 128",
    "3:g32": "AutoRound 3 bits, groups of 32",
}
OURS = ("nearest", "mse", "gptq", "tuned")


def row(model: str, method: str) -> dict[str, Any]:
    """Everything measured of a method on a model."""
    found: dict[str, Any] = RESULTS[model]["results"][method]
    return found


def kl(model: str, method: str, text: str = "elsewhere") -> float:
    """Mean KL in nats."""
    scores = row(model, method)
    return float(scores["kl"] if text == "prose" else scores["elsewhere"]["kl"])


def less(model: str, ours: str, other: str, text: str = "elsewhere") -> float:
    """Share of KL that one method has less than another."""
    return 1 - kl(model, ours, text) / kl(model, other, text)


def difference(model: str, ours: str, other: str, text: str = "elsewhere") -> Difference:
    """KL of one method minus another's over the same windows."""
    found = kl_less(RESULTS[model], ours, other)[TEXTS.index(text)]
    if found is None:
        raise LookupError(f"{ours} or {other} kept no windows")
    return found


def methods(size: str) -> list[str]:
    """Names of a tier's methods that were measured on all models; options of ours are left out."""
    names = [name for name, each in RESULTS["SmolLM2-135M"]["results"].items() if each.get("tier") == SIZES[size]]
    return [name for name in names if all(name in each["results"] for each in RESULTS.values())]


def is_blind(method: str) -> bool:
    """Whether a method reads no text."""
    return not method.startswith(READERS)


def best(model: str, size: str, blind: bool = False, text: str = "prose") -> str:
    """The other library's method of a tier with the lowest KL."""
    others = [name for name in methods(size) if not name.startswith(OURS) and (not blind or is_blind(name))]
    return min(others, key=lambda name: kl(model, name, text))


# Tables


def _kl_cell(model: str, method: str) -> str:
    scores = row(model, method)["elsewhere"]
    mean = mean_interval(scores["kl_by_window"], scores["tokens_by_window"])
    return f"{mean.mean:.4f} ± {mean.high - mean.mean:.4f}"


# Left out of tables: another setting of the same tool has the lower KL in every row.
_WORSE_SETTINGS = {", minmax": ", mse", "bitsandbytes fp4": "bitsandbytes nf4"}
OTHER_SETTING_WINS = all(
    kl(model, name.replace(worse, better)) < kl(model, name)
    for worse, better in _WORSE_SETTINGS.items()
    for size in SIZES
    for name in methods(size)
    if worse in name
    for model in FILES
)


def methods_table() -> str:
    """Methods at 4.5 bits, each tool by its best setting, and KL in nats of four models on text elsewhere."""
    rows = [
        [
            re.sub(r",? \d bits|, imatrix", "", name),
            f"{row('SmolLM2-135M', name)['bits']:.3f}".rstrip("0").rstrip("."),
            f"{row('SmolLM2-135M', name)['cpu_seconds']:,.0f}",
            *(_kl_cell(model, name) for model in FILES),
        ]
        for name in methods("4:g32")
        if not any(setting in name for setting in _WORSE_SETTINGS)
    ]
    return table(["method", "bits", "CPU seconds", *(f"{model}, KL" for model in FILES)], rows)


# Comparisons with AutoRound: `tuned` on the models trained here.
AGAINST = {
    (model, size, text): difference(model, f"tuned {size}", other, text)
    for model in TRAINED
    for size, other in AUTOROUND.items()
    for text in TEXTS
}
BELOW = sum(each.high < 0 for each in AGAINST.values())
ABOVE = [place for place, each in AGAINST.items() if each.low > 0]
ONE_ABOVE = ABOVE == [("Transformer", "3:g32", "elsewhere")]
BEATS_ALL_OTHERS = all(
    kl(model, name, text) > kl(model, f"tuned {size}", text)
    for model in TRAINED
    for text in TEXTS
    for size in SIZES
    for name in methods(size)
    if name not in (f"tuned {size}", AUTOROUND.get(size))
)

LEADS_ON_V1 = BEATS_ALL_OTHERS and all(
    kl("DIFF V1", f"tuned {size}", text) < kl("DIFF V1", other, text)
    for size, other in AUTOROUND.items()
    for text in TEXTS
)


def tuned_less(size: str, text: str = "elsewhere", models: Sequence[str] = TRAINED) -> list[float]:
    """Shares of AutoRound's KL that `tuned` has less, by model."""
    return [less(model, f"tuned {size}", AUTOROUND[size], text) for model in models]


def blind_less(size: str = "4:g32", text: str = "elsewhere") -> list[float]:
    """Shares of KL that `gptq` has less than the best of others that reads no text, on the models trained here."""
    return [less(model, f"gptq {size}", best(model, size, True), text) for model in TRAINED]


BLIND_IS_TOLD = all(
    difference(model, "gptq 4:g32", best(model, "4:g32", True), text).high < 0 for model in TRAINED for text in TEXTS
)
# Where `mse` has the lowest KL on the prose of what reads no text.
MSE_LEADS = {
    (model, size)
    for model in FILES
    for size in SIZES
    if kl(model, f"mse {size}", "prose") < kl(model, best(model, size, True), "prose")
}
MSE_LEADS_WHERE = {*((model, "4:g32") for model in TRAINED), *((model, "3:g32") for model in FILES)} == MSE_LEADS


# Chance: AutoRound's reruns on another processor, and five seeds

RERUNS = [
    math.log(now["kl"] / before["kl"])
    for file, former in raw("rounding/earlier-processors.json").items()
    for name, old in former["results"].items()
    if name.startswith("AutoRound")
    for new in [raw(f"rounding/{file}.json")["results"][name]]
    for now, before in ((new, old), (new["elsewhere"], old["elsewhere"]))
]
RERUN = math.sqrt(sum(change**2 for change in RERUNS) / len(RERUNS))
REPEATS = {file: raw(f"rounding/repeats/{file}.json") for file in list(FILES.values())[1:]}
_PLACES = [(result, elsewhere) for result in REPEATS.values() for elsewhere in (False, True)]
SPREADS = [spread(result, rule, elsewhere) for result, elsewhere in _PLACES for rule in RULES]
REPEATED_LEADS = [lead(result, elsewhere) for result, elsewhere in _PLACES]
SEEDS_LEAVE_THE_LEAD = len(REPEATED_LEADS) == 6 and all(each.low > 0 for each in REPEATED_LEADS)
AHEAD_ON_V1 = all(
    less_of > 1.96 * RERUN for size in AUTOROUND for text in TEXTS for less_of in tuned_less(size, text, ["DIFF V1"])
)


# Eight bits

EIGHT = {model: raw(f"rounding/8-bits/{FILES[model]}.json")["results"] for model in TRAINED}


# Searched widths

SEARCHES = {model: raw(f"search-prose/{FILES[model]}.json")["results"] for model in TRAINED}
_SEARCHED, _UNIFORM = "searched", "uniform"


def searched_less(text: str) -> list[float]:
    """Shares of KL that searched widths have less than equal stored bits everywhere, by model and bits."""
    return [
        1 - each[_SEARCHED][text]["kl"] / each[_UNIFORM][text]["kl"]
        for found in SEARCHES.values()
        for each in found.values()
    ]


SEARCH_IS_TOLD = all(
    mean_interval(
        [
            a - b
            for a, b in zip(each[_SEARCHED][text]["kl_by_window"], each[_UNIFORM][text]["kl_by_window"], strict=True)
        ],
        each[_SEARCHED][text]["tokens_by_window"],
    ).high
    < 0
    for found in SEARCHES.values()
    for each in found.values()
    for text in TEXTS
)

# Rotated weights

ROTATIONS = {model: raw(f"rotated/{file.removesuffix('-windows')}.json") for model, file in FILES.items()}
_ROTATION_CHANGES = {
    (model, scheme, rule): change(result, scheme, rule, "elsewhere")
    for model, result in ROTATIONS.items()
    for scheme, rule in compared(result)
}
_RAISED = {place for place, each in _ROTATION_CHANGES.items() if each.low > 0}
_LOWERED = {place for place, each in _ROTATION_CHANGES.items() if each.high < 0}
ROTATION_RAISES_V1, ROTATION_RAISES_V2_BY_MSE = (
    all(place in _RAISED for place in _ROTATION_CHANGES if (place[0], place[2]) in pairs)
    for pairs in ({("DIFF V1", "mse"), ("DIFF V1", "gptq")}, {("DIFF V2", "mse")})
)
ROTATION_LEAVES_REST = not any(
    place in _RAISED | _LOWERED
    for place in _ROTATION_CHANGES
    if place[0] == "Transformer" or (place[0], place[2]) == ("DIFF V2", "gptq")
)
ROTATION_LOWERS_ROWS = {("SmolLM2-135M", "4:row", "mse"), ("SmolLM2-135M", "3:row", "mse")} == _LOWERED
ROTATION_RAISES_GROUPS = ("SmolLM2-135M", "4:g32", "mse") in _RAISED


def rotated_kl(which: str) -> float:
    """Largest KL on either text of weights that were rotated and not quantized."""
    results = [result["results"][name_of(which, "16", "nearest")] for result in ROTATIONS.values()]
    return max(abs(each[text]["kl"]) for each in results for text in TEXTS)


EXACT, NARROWED = rotated_kl(ROTATED), rotated_kl(NARROW)


def rotations_table() -> str:
    """Change of the KL of each scheme and rule by rotated weights, on text elsewhere."""
    schemes = dict.fromkeys(each for result in ROTATIONS.values() for each in compared(result))
    rows = [
        [f"`{scheme}` by `{rule}`", *(_rotation_cell(model, scheme, rule) for model in ROTATIONS)]
        for scheme, rule in schemes
    ]
    return table(["change of KL, nats", *ROTATIONS], rows)


def _rotation_cell(model: str, scheme: str, rule: str) -> str:
    if (model, scheme, rule) not in _ROTATION_CHANGES:
        return "–"
    return interval(_ROTATION_CHANGES[model, scheme, rule], 4, True)


# README's picture

SECONDS = [row("SmolLM2-135M", f"{rule} 4:g32")["cpu_seconds"] for rule in ("mse", "gptq", "tuned")]
AUTOROUND_SECONDS = row("SmolLM2-135M", "AutoRound 4 bits, groups of 32")["cpu_seconds"]
READ = RESULTS["SmolLM2-135M"]["settings"]["tokens"]
