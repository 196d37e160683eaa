"""The figures of research/pages/rounding.md."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from diffquant.evals.stats import Difference, estimate, mean_interval
from diffquant.quantization.roundings.tuned.descent import _STEPS
from diffquant.text.corpus import load_text
from research.check.numbers import Expected, ends
from research.check.page import Page, Unmeasured, Values
from research.check.raw import raw
from research.studies.other_tools import SHOWN, table_cells
from research.studies.rounding_repeats import ELSEWHERE, RULES, spread, spread_cells
from research.studies.rounding_repeats import lead as repeated_lead
from research.studies.rounding_tables import (
    READERS,
    kl_less,
    lead,
    lead_cells,
    method_cells,
    option_cells,
    size_cells,
)

PAGE = Page("research/pages/rounding.md")
SMOLLM2 = raw("rounding/smollm2-135m-windows.json")
OLDER = raw("rounding/smollm2-135m.json")
_FILES = {"Transformer": "prose-transformer", "DIFF V1": "prose-diff-v1", "DIFF V2": "prose-diff-v2"}
TRAINED = {model: raw(f"rounding/unshipped-text/{file}.json") for model, file in _FILES.items()}
SHIPPED = {model: raw(f"rounding/{file}.json") for model, file in _FILES.items()}
LAYERS = raw("rounding/layers.json")["results"]
OURS = ("nearest", "mse", "gptq")


def _bits(row: dict[str, Any]) -> list[Expected]:
    held = row.get("held_bits", row.get("bits", 16))
    bits = row.get("bits", 16)
    return [bits] if held == bits else [bits, held]


def _cell(row: dict[str, Any], head: str) -> list[Expected]:
    if head == "bits":
        return _bits(row)
    if head == "HellaSwag":
        accuracy = estimate([float(digit) for digit in row["correct"]])
        return [100 * accuracy.mean, 100 * (accuracy.se or 0)]
    return [row["perplexity" if head == "perplexity" else "kl"]]


PAGE.table("method | bits | perplexity | KL, nats | HellaSwag", lambda row, head: _cell(OLDER["results"][row], head))


# Every model of the newest results.
NEWEST = {"SmolLM2": SMOLLM2} | SHIPPED


def _windows_cells(row: str, result: dict[str, Any]) -> list[Values]:
    return [_bits(result["results"][row]), *method_cells(result, row)]


for _section, _result in ({"SmolLM2-135M": SMOLLM2} | SHIPPED).items():
    PAGE.rows(
        "method | bits | CPU seconds | perplexity | KL, nats | elsewhere: perplexity | KL, nats",
        partial(_windows_cells, result=_result),
        section=_section,
    )
PAGE.rows(
    "method | bits | Transformer: KL, nats | elsewhere | DIFF V1: KL, nats | elsewhere | DIFF V2: KL, nats | elsewhere",
    lambda row: size_cells(list(SHIPPED.values()), row),
)

# Eight bits

EIGHT = {model: raw(f"rounding/8-bits/{file}.json")["results"] for model, file in _FILES.items()}


def _eight(row: str) -> list[Values]:
    rows = [results[row] for results in EIGHT.values()]
    return [
        sorted({each["bits"] for each in rows}),
        *([1e6 * scores["kl"]] for each in rows for scores in (each, each["elsewhere"])),
    ]


def _times(method: str, others: Sequence[str]) -> tuple[float, float]:
    """Least and largest KL of a method over that of others, over models."""
    ratios = [rows[method]["kl"] / rows[other]["kl"] for rows in EIGHT.values() for other in others]
    return ends(ratios)


_HQQ, _INT8 = "HQQ 8 bits, rows", "bitsandbytes int8, rows"
PAGE.rows(f"method | bits | {' | '.join(f'{model}: KL, µnats | elsewhere' for model in SHIPPED)}", _eight)
_UNROUNDED = [
    {name: row["kl"] for name, row in rows.items() if name != "16 bits" and "LLM" not in name}
    for rows in EIGHT.values()
]
PAGE.means(
    "all cost between one and two ten-thousandths of a nat on the prose",
    all(1e-4 < kl < 2e-4 for rows in _UNROUNDED for kl in rows.values()),
)
PAGE.means("costs least there", all(min(rows, key=lambda name: rows[name]) == _HQQ for rows in _UNROUNDED))
PAGE.says("and `mse` {} to {} times as much", *_times("mse 8:channel", [_HQQ]))
PAGE.says(
    "as LLM.int8 does, costs {} to {} times what its weights cost",
    *_times("bitsandbytes LLM.int8, inputs rounded too", [_INT8]),
)

_BY_FILE = {result["settings"]["model"]: result for result in NEWEST.values()}


def _lead_cells(row: str) -> list[str]:
    file, _, ours = row.split(", ")
    return lead_cells(_BY_FILE[file], ours)


PAGE.rows("model | bits | ours | best other | KL less, nats | elsewhere", _lead_cells, names=3)

# Five seeds

REPEATS = {file: raw(f"rounding/repeats/{file}.json") for file in _FILES.values()}
PAGE.rows(
    "model | tuned: KL, nats | spread | AutoRound: KL, nats | spread | AutoRound's above tuned's",
    lambda row: spread_cells(REPEATS[row.removesuffix(ELSEWHERE)], row.endswith(ELSEWHERE)),
)
_PLACES = [(result, elsewhere) for result in REPEATS.values() for elsewhere in (False, True)]
_SPREADS = [spread(result, rule, elsewhere) for result, elsewhere in _PLACES for rule in RULES]
REPEATED_LEADS = [repeated_lead(result, elsewhere) for result, elsewhere in _PLACES]


def _trained_cells(row: str) -> list[Values]:
    rows = [result["results"][row] for result in TRAINED.values()]
    return [_bits(rows[0]), *([each[score]] for each in rows for score in ("perplexity", "kl"))]


PAGE.rows(f"method | bits | {' | '.join(f'{model}: perplexity | KL, nats' for model in TRAINED)}", _trained_cells)
PAGE.table(
    "method | bits | the model's own | normal | Student's t, 5 | normal, large columns | normal, large rows",
    lambda row, head: [LAYERS[row]["bits"] if head == "bits" else LAYERS[row]["decibels"][head]],
)


def _kl(name: str, result: dict[str, Any]) -> float:
    return float(result["results"][name]["kl"])


def _tier(size: str) -> list[str]:
    """Names of a tier's methods among the older results, by the tier of ours."""
    tier = OLDER["results"][f"mse {size}"]["tier"]
    return [name for name, row in OLDER["results"].items() if row.get("tier") == tier]


def _leads(size: str) -> list[float]:
    """Decibels that `gptq` is ahead of all others of its size, by kind of weights."""
    of_rivals = [LAYERS[name]["decibels"] for name in _tier(size) if name != f"gptq {size}"]
    kinds = LAYERS[f"gptq {size}"]["decibels"]
    return [kinds[kind] - max(rival[kind] for rival in of_rivals) for kind in kinds]


_LEADS = [end for size in ("4:g32", "4:g128", "6:g128") for end in ends(_leads(size))]
PAGE.says(
    "is {} to {} dB ahead of all others at 4.5 bits, {} to {} at 4.12 and {} to {} at 6.12",
    *_LEADS,
)
PAGE.means("has the highest signal-to-noise ratio on all five kinds of weights", min(_LEADS) > 0)


# The newest results: by model, methods and text.

TEXTS = ("prose", "elsewhere")


def _scores(model: str, name: str, text: str) -> dict[str, Any]:
    row = NEWEST[model]["results"][name]
    return row if text == "prose" else row["elsewhere"]


def _percent_less(model: str, ours: str, rival: str, text: str = "prose") -> float:
    """Percent of KL that one method has less than another."""
    return 100 * (1 - _scores(model, ours, text)["kl"] / _scores(model, rival, text)["kl"])


def _difference(model: str, ours: str, rival: str) -> dict[str, Difference]:
    """A method's KL less another's, on both texts."""
    return dict(zip(TEXTS, kl_less(NEWEST[model], ours, rival), strict=True))


def _is_below_zero(difference: Difference) -> bool:
    return difference.high < 0


def _range_below(rivals: Mapping[str, str], ours: str = "gptq 4:g32") -> list[float]:
    """Least and most percent of KL that ours has less than each model's rival on the prose, and elsewhere."""
    less = ([_percent_less(model, ours, rival, text) for model, rival in rivals.items()] for text in TEXTS)
    return [end for each in less for end in ends(each)]


def _is_below_all(rivals: Mapping[str, str], ours: str = "gptq 4:g32") -> bool:
    return all(
        _is_below_zero(each) for model, rival in rivals.items() for each in _difference(model, ours, rival).values()
    )


def _lowest(names: Sequence[str]) -> dict[str, str]:
    """Which of some methods has the lowest KL on each model."""
    return {model: min(names, key=lambda name: _kl(name, result)) for model, result in SHIPPED.items()}


def _blind(result: dict[str, Any], tier: str = "4.5 bits") -> list[str]:
    """Methods of a tier that read no text."""
    rows = result["results"]
    return [name for name in rows if rows[name].get("tier") == tier and not name.startswith(READERS)]


PAGE.says(
    "It lowers the KL of `nearest` by {} to {} % with groups of 32",
    *ends(_percent_less(model, "mse 4:g32", "nearest 4:g32") for model in NEWEST),
)
PAGE.says(
    "its KL at 4.5 bits falls by {} % from `nearest`, the Transformer's by {} % and DIFF V2's by {} %",
    *(_percent_less(model, "gptq 4:g32", "nearest 4:g32") for model in ("DIFF V1", "Transformer", "DIFF V2")),
)

_TUNER = "AutoRound 4 bits, groups of 32"
_SIZES = ("4:g32", "4:g128", "6:g128", "3:g32")
# AutoRound at our sizes.
TUNERS = {"4:g32": _TUNER, "4:g128": "AutoRound 4 bits, groups of 128", "3:g32": "AutoRound 3 bits, groups of 32"}


def _tuner_less(ours: str, model: str, size: str, text: str = "prose") -> float:
    """Percent of KL that one of ours has less than AutoRound."""
    return _percent_less(model, f"{ours} {size}", TUNERS[size], text)


def _against_tuner(ours: str, models: Iterable[str] = SHIPPED) -> dict[tuple[str, str, str], Difference]:
    """KL of one of ours less AutoRound's, by model, size and text."""
    return {
        (model, size, text): difference
        for model in models
        for size, tuner in TUNERS.items()
        for text, difference in _difference(model, f"{ours} {size}", tuner).items()
    }


PAGE.says(
    "less by {} to {} % of AutoRound's KL at 4.5 bits, {} to {} % at 4.12 and {} to {} % at 3.5",
    *(end for size in TUNERS for end in ends(_tuner_less("tuned", model, size) for model in SHIPPED)),
)
AGAINST_TUNER = _against_tuner("tuned")
PAGE.says(
    "Of the {} intervals of these differences (three models, three sizes, two texts) {} lie below zero and one above",
    len(AGAINST_TUNER),
    sum(map(_is_below_zero, AGAINST_TUNER.values())),
)
PAGE.means(
    "on the Transformer at 3.5 bits AutoRound's is lower elsewhere",
    [place for place, each in AGAINST_TUNER.items() if each.low > 0] == [("Transformer", "3:g32", "elsewhere")],
)

# Chance in rounding: AutoRound measured again, with another order of the same sums.

RERUNS = [
    math.log(now["kl"] / before["kl"])
    for file, former in raw("rounding/earlier-processors.json").items()
    for name, row in former["results"].items()
    if name.startswith("AutoRound")
    for now_row in [raw(f"rounding/{file}.json")["results"][name]]
    for now, before in ((now_row, row), (now_row["elsewhere"], row["elsewhere"]))
]
RERUN = math.sqrt(sum(change**2 for change in RERUNS) / len(RERUNS))
# Shares of AutoRound's KL that another run of it does not explain.
CHANCE = 1.96 * RERUN

PAGE.says("A seed moves KL by {} to {} %", *ends(_SPREADS))
PAGE.means("less than another processor did ([below](#what-it-does-not-show))", max(_SPREADS) < 100 * RERUN)
PAGE.says("AutoRound's KL is above `tuned`'s by {} to {} %", *ends(each.mean for each in REPEATED_LEADS))
PAGE.means(
    "on the Transformer too, and no interval holds zero: at this size the lead is no chance of the rounding",
    all(each.low > 0 for each in REPEATED_LEADS),
)

# KL of `tuned` over AutoRound's, less one.
SHARES = {place: -_tuner_less("tuned", *place) / 100 for place in AGAINST_TUNER}
_BY_CHANCE = {model: sum(abs(SHARES[place]) < CHANCE for place in SHARES if place[0] == model) for model in SHIPPED}
_ON_V1 = [-100 * share for (model, *_), share in SHARES.items() if model == "DIFF V1"]
PAGE.says(
    "AutoRound's own KL changed by {} % (root mean square of the {} reruns [below](#what-it-does-not-show)), so a "
    "difference under {} % may be chance; at 4.5 bits [five seeds](#five-seeds) say more. Of the {} differences {} are "
    "smaller than that",
    100 * RERUN,
    len(RERUNS),
    100 * CHANCE,
    len(SHARES),
    sum(_BY_CHANCE.values()),
)
PAGE.means(
    "five of six on the Transformer, three of six on DIFF V2, none on DIFF V1",
    _BY_CHANCE == {"Transformer": 5, "DIFF V1": 0, "DIFF V2": 3},
)
PAGE.says("none on DIFF V1, where `tuned` has {} to {} % less", *ends(_ON_V1))
# The prose is scored from the ninth of sixteen passages on: four whole ones, in turn.
_PASSAGE = len(load_text()) / 16


def by_passage(model: str, size: str) -> Difference:
    """KL of `tuned` less AutoRound's on the prose, with a passage as one observation."""
    rows = SHIPPED[model]["results"]
    ours, theirs = rows[f"tuned {size}"], rows[TUNERS[size]]
    less: dict[int, list[tuple[float, int]]] = {}
    for window, tokens in enumerate(ours["tokens_by_window"]):
        middle = (window + 0.5) / len(ours["tokens_by_window"]) * SHIPPED[model]["settings"]["characters"]
        change = ours["kl_by_window"][window] - theirs["kl_by_window"][window]
        less.setdefault(min(3, int(middle / _PASSAGE)), []).append((change, tokens))
    weights = [sum(tokens for _, tokens in windows) for windows in less.values()]
    means = [
        sum(change * tokens for change, tokens in windows) / weight
        for windows, weight in zip(less.values(), weights, strict=True)
    ]
    return mean_interval(means, weights)


PAGE.means(
    "With a passage as one observation, four on the prose, the intervals on DIFF V1 lie below zero at all three sizes, "
    "on DIFF V2 at 4.5 bits, and on the Transformer at none",
    [place for model in SHIPPED for size in TUNERS if by_passage(*(place := (model, size))).high < 0]
    == [*(("DIFF V1", size) for size in TUNERS), ("DIFF V2", "4:g32")],
)
PAGE.means(
    "it is clearly ahead on DIFF V1, mostly on DIFF V2, and on the Transformer for certain at 4.5 bits alone",
    all(SHARES[place] < -CHANCE for place in SHARES if place[0] == "DIFF V1")
    and all(SHARES[place] < 0 for place in SHARES if place[0] == "DIFF V2")
    and all(each.low > 0 for each in REPEATED_LEADS)
    and not any(
        all(SHARES[place] < -CHANCE for place in SHARES if place[:2] == ("Transformer", size))
        for size in ("4:g128", "3:g32")
    ),
)
PAGE.means(
    "`tuned` has less KL than all others but AutoRound on the three models trained here, on both texts at every size "
    "up to 6 bits",
    all(
        _scores(model, name, text)["kl"] > _scores(model, f"tuned {size}", text)["kl"]
        for model, result in SHIPPED.items()
        for text in TEXTS
        for size in _SIZES
        for name, row in result["results"].items()
        if row.get("tier") == result["results"][f"tuned {size}"]["tier"]
        if name not in (f"tuned {size}", TUNERS.get(size))
    ),
)
_MORE_BITS = [
    100 * (result["results"][tuner]["bits"] / result["results"][f"tuned {size}"]["bits"] - 1)
    for size, tuner in TUNERS.items()
    for result in SHIPPED.values()
]
PAGE.says("AutoRound has {} to {} % more bits", *ends(_MORE_BITS))
_TIMED = [
    [result["results"][names[size]]["cpu_seconds"] for size in TUNERS for result in SHIPPED.values()]
    for names in (TUNERS, *({size: f"{ours} {size}" for size in TUNERS} for ours in ("tuned", "gptq")))
]
PAGE.says(
    "and took {} to {} seconds of CPU time a model, `tuned` {} to {} and `gptq` {} to {}",
    *(end for seconds in _TIMED for end in ends(seconds)),
)
PAGE.means(
    "were measured on one core each of an AMD EPYC with AVX-512",
    {row["device"] for result in NEWEST.values() for row in result["results"].values() if "device" in row}
    == {"AMD EPYC"},
)
_BY_Q4_K, _BY_MIX = (dict.fromkeys(SHIPPED, name) for name in ("llama.cpp Q4_K, imatrix", "llama.cpp Q4_K_M, imatrix"))
_BY_GPTQ = _lowest([f"llm-compressor GPTQ, 4 bits, groups of 32, {observer}" for observer in ("minmax", "mse")])
_BY_BLIND = {model: min(_blind(result), key=lambda name: _kl(name, result)) for model, result in SHIPPED.items()}
PAGE.says(
    "It has {} to {} % more KL than AutoRound at 4.5 bits on the prose, {} to {} % at 4.12 and {} to {} % at 3.5",
    *(end for size in TUNERS for end in ends(-_tuner_less("gptq", model, size) for model in SHIPPED)),
)
PAGE.means(
    "at 4.5 and 4.12 bits on DIFF V1 the two are level elsewhere",
    {place for place, each in _against_tuner("gptq").items() if each.low <= 0 <= each.high}
    == {("DIFF V1", "4:g32", "elsewhere"), ("DIFF V1", "4:g128", "elsewhere")},
)
PAGE.says("It has {} to {} % less KL than llama.cpp's Q4_K", *_range_below(_BY_Q4_K)[:2])
PAGE.says(
    "and {} to {} % less than Q4_K_M, which has {} to {} bits",
    *_range_below(_BY_MIX)[:2],
    *ends(result["results"][_BY_MIX[model]]["bits"] for model, result in SHIPPED.items()),
)
PAGE.says("it has {} to {} % less than llm-compressor's GPTQ", *_range_below(_BY_GPTQ)[:2])
AGAINST_BLIND = _range_below(_BY_BLIND)
PAGE.says("it is {} to {} % on the prose and {} to {} % on HellaSwag's contexts", *AGAINST_BLIND)
PAGE.means(
    "No interval of these differences contains zero, on either text",
    all(map(_is_below_all, (_BY_Q4_K, _BY_MIX, _BY_GPTQ, _BY_BLIND))),
)
PAGE.says("{} steps of Adam", _STEPS)
PAGE.leaves("200 steps of eight windows, signed gradients", "AutoRound's own settings")
PAGE.leaves("At 4.5 bits both were run with five seeds", "a size")
PAGE.leaves("at 4.5 bits there are [five seeds]", "a size")
PAGE.leaves("chosen among seven pairs of values", "trials that were not kept")
PAGE.leaves("Q5_0 of 5.5 bits for Q4_K", "what llama.cpp's format takes")
PAGE.leaves("this project's environment has 2.13.0", "a version")


_PLAIN = "gptq 4:g32, unrounded inputs"
_SLOWER = [
    result["results"]["gptq 4:g32"]["cpu_seconds"] / result["results"][_PLAIN]["cpu_seconds"]
    for result in SHIPPED.values()
]
_BY_PLAIN = dict.fromkeys(SHIPPED, _PLAIN)
PAGE.says("lowers `gptq`'s KL by {} to {} % on the prose and {} to {} % elsewhere", *_range_below(_BY_PLAIN))
PAGE.says("It takes {} to {} times the CPU time", *ends(_SLOWER))
PAGE.means(
    "no interval of the difference contains zero. It takes",
    _is_below_all(_BY_PLAIN),
)


def _more(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[float]:
    """Least and most percent of KL that the first of each two rows has more, on the prose and elsewhere."""
    here = [100 * (row["kl"] / other["kl"] - 1) for row, other in pairs]
    there = [100 * (row["elsewhere"]["kl"] / other["elsewhere"]["kl"] - 1) for row, other in pairs]
    return [*ends(here), *ends(there)]


_HALF = {model: raw(f"rounding/half-text/{file}.json") for model, file in _FILES.items()}
_GPTQ_BY_HALF, _TUNED_BY_HALF = (
    _more([(_HALF[model]["results"][rule], SHIPPED[model]["results"][rule]) for model in SHIPPED])
    for rule in ("gptq 4:g32", "tuned 4:g32")
)


def _more_by_half(model: str, rule: str, than: str) -> tuple[Difference | None, Difference | None]:
    """The KL of a rule over half the text minus that of another over all of it, on the prose and elsewhere."""
    both = {"half": _HALF[model]["results"][rule], "full": SHIPPED[model]["results"][than]}
    return kl_less({"results": both}, "half", "full")


PAGE.says(
    "Over {} tokens instead of {}, `gptq` has {} to {} % more KL on the prose at 4.5 bits and `tuned` {} to {} %; "
    "elsewhere it is {} to {} % and {} to {} %",
    _HALF["DIFF V1"]["settings"]["tokens"],
    SHIPPED["DIFF V1"]["settings"]["tokens"],
    *_GPTQ_BY_HALF[:2],
    *_TUNED_BY_HALF[:2],
    *_GPTQ_BY_HALF[2:],
    *_TUNED_BY_HALF[2:],
)
PAGE.means(
    "and no interval of these differences contains zero (`research/results/rounding/half-text/`)",
    all(
        each is not None and each.low > 0
        for model in SHIPPED
        for rule in ("gptq 4:g32", "tuned 4:g32")
        for each in _more_by_half(model, rule, rule)
    ),
)
_HALF_OF_TUNED = {model: _more_by_half(model, "tuned 4:g32", "gptq 4:g32")[0] for model in SHIPPED}
PAGE.means(
    "level with `gptq` over all of it on the prose on the two DIFF models and behind it on the Transformer",
    [model for model, each in _HALF_OF_TUNED.items() if each and each.low > 0] == ["Transformer"]
    and not any(map(_is_below_zero, _HALF_OF_TUNED.values())),
)


def _more_under(option: str) -> dict[str, dict[str, Difference]]:
    """KL that an option of `gptq` adds, by model and text."""
    return {model: _difference(model, f"gptq 4:g32, {option}", "gptq 4:g32") for model in SHIPPED}


_BY_OWN = {
    option: [-_percent_less(model, f"gptq 4:g32, {option}", "gptq 4:g32") for model in SHIPPED]
    for option in ("target layer", "order of activation")
}
PAGE.says(
    "it has {} to {} % more on the prose, about as much as on the 16-bit model's inputs",
    *ends(_BY_OWN["target layer"]),
)
PAGE.means(
    "None of `gptq`'s options helps",
    not any(_is_below_zero(each) for o in _BY_OWN for texts in _more_under(o).values() for each in texts.values()),
)
PAGE.says(
    "`order: activation` has {} to {} % more",
    *ends(_BY_OWN["order of activation"]),
)
PAGE.means(
    "on DIFF V1 both intervals of that contain zero, on the others none does",
    all(
        (each.low > 0) == (model != "DIFF V1") and each.high > 0
        for model, texts in _more_under("order of activation").items()
        for each in texts.values()
    ),
)


def _option_cells(row: str) -> list[str]:
    model, _, name = row.partition(", ")
    return option_cells(_BY_FILE[model], name)


PAGE.rows("model | gptq | bits | KL, nats | more than by itself | elsewhere: KL, nats | more", _option_cells, names=2)
PAGE.means(
    "On the inputs of the 16-bit model `gptq` would be behind Q4_K_M on the Transformer and DIFF V2",
    [model for model, result in SHIPPED.items() if _kl(_PLAIN, result) > _kl(_BY_MIX[model], result)]
    == ["Transformer", "DIFF V2"],
)
PAGE.means(
    "`mse` has less KL than the best of them on both texts, and no interval of the difference contains zero",
    all(_is_below_zero(each) for result in SHIPPED.values() for each in lead(result, "mse 4:g32")[1:]),
)


# Where `mse` has less KL than every method of another library that reads no text.
_MSE_LEADS = {
    (model, size)
    for model, result in NEWEST.items()
    for size in _SIZES
    if _kl(f"mse {size}", result)
    < min(
        _kl(name, result)
        for name in _blind(result, result["results"][f"mse {size}"]["tier"])
        if not name.startswith(OURS)
    )
}
PAGE.says("in {} of the {} combinations of a model and a size", len(_MSE_LEADS), len(NEWEST) * len(_SIZES))
PAGE.means(
    "at 4.5 bits on the three models trained here, and at 3.5 bits on all four",
    {*((model, "4:g32") for model in SHIPPED), *((model, "3:g32") for model in NEWEST)} == _MSE_LEADS,
)
PAGE.means(
    "`mse` has less KL than the best of them on both texts, and no interval of the difference contains zero",
    all(_is_below_zero(each) for model, size in _MSE_LEADS for each in lead(NEWEST[model], f"mse {size}")[1:]),
)


PAGE.means(
    "In these tables it has the lowest KL of every size, of all four models",
    all(
        _kl(f"gptq {size}", result) == min(_kl(name, result) for name in _tier(size))
        for result in (OLDER, *TRAINED.values())
        for size in _SIZES[:3]
    ),
)


_SMOLLM2_HQQ = "HQQ 4 bits, groups of 64"
PAGE.says(
    "On the prose `tuned` has {} % less KL than AutoRound at 4.5 bits, {} % less at 4.12 and {} % less at 3.5, and "
    "elsewhere {}, {} and {} % less",
    *(_tuner_less("tuned", "SmolLM2", size, text) for text in TEXTS for size in TUNERS),
)


_SMOLLM2_TUNED, _SMOLLM2_GPTQ = (
    {(size, text): each for (_, size, text), each in _against_tuner(ours, ["SmolLM2"]).items()}
    for ours in ("tuned", "gptq")
)
PAGE.means(
    "elsewhere at 4.12 and 3.5 bits the two are level, and none of the other intervals contains zero",
    {at for at, each in _SMOLLM2_TUNED.items() if each.high >= 0} == {("4:g128", "elsewhere"), ("3:g32", "elsewhere")}
    and not any(each.low > 0 for each in _SMOLLM2_TUNED.values()),
)
PAGE.means(
    "`gptq` is level with AutoRound at 4.5 bits on both texts and behind it at the other two sizes",
    {at for at, each in _SMOLLM2_GPTQ.items() if each.low <= 0 <= each.high} == {("4:g32", text) for text in TEXTS}
    and not any(map(_is_below_zero, _SMOLLM2_GPTQ.values())),
)
PAGE.says(
    "AutoRound has {} and {} % less KL than `gptq` on the prose, and {} and {} % less elsewhere",
    *(_percent_less("SmolLM2", TUNERS[size], f"gptq {size}", text) for text in TEXTS for size in ("4:g128", "3:g32")),
)
PAGE.says(
    "`gptq` has {} % less KL than HQQ on the prose and {} % less elsewhere",
    *(_percent_less("SmolLM2", "gptq 4:g32", _SMOLLM2_HQQ, text) for text in TEXTS),
)
PAGE.means(
    "llama.cpp's IQ4_NL and IQ4_XS, to which it tells only mean squares, are ahead of `gptq` there",
    all(
        _is_below_zero(_difference("SmolLM2", f"llama.cpp {kind}, imatrix", f"gptq {size}")["elsewhere"])
        for kind, size in (("IQ4_NL", "4:g32"), ("IQ4_XS", "4:g128"))
    ),
)
PAGE.means(
    "and IQ4_XS of `tuned`",
    _is_below_zero(_difference("SmolLM2", "llama.cpp IQ4_XS, imatrix", "tuned 4:g128")["elsewhere"]),
)
PAGE.says(
    "With {} tokens `gptq` took {} seconds of CPU time, `tuned` {} and AutoRound {}",
    SMOLLM2["settings"]["tokens"],
    *(SMOLLM2["results"][name]["cpu_seconds"] for name in ("gptq 4:g32", "tuned 4:g32", _TUNER)),
)


def _changes(older: Mapping[str, Any], models: Sequence[str], method: str) -> list[float]:
    """Least and most percent by which the KL of methods has changed since older rows, on the prose and elsewhere."""
    return _more(
        [
            (_BY_NAME[model]["results"][name], old)
            for model in models
            for name, old in older[model]["results"].items()
            if name.startswith(method)
        ]
    )


_BY_NAME = {"smollm2-135m-windows": SMOLLM2} | {_FILES[model]: result for model, result in SHIPPED.items()}
_BEFORE, _MORE_STEPS = raw("rounding/earlier-processors.json"), raw("rounding/tuned-200-steps.json")
_AGAIN = _changes(_BEFORE, list(_BEFORE), "AutoRound")
PAGE.says(
    "in these {} rows its KL changed by −{} to {} % on the prose and −{} to {} % elsewhere",
    sum(name.startswith("AutoRound") for each in _BEFORE.values() for name in each["results"]),
    -_AGAIN[0],
    _AGAIN[1],
    -_AGAIN[2],
    _AGAIN[3],
)
_GPTQ_AGAIN = _changes(_BEFORE, [*_FILES.values()], "gptq")
PAGE.says(
    "changed by −{} to {} % and −{} to {} % on the models trained here, but on SmolLM2",
    -_GPTQ_AGAIN[0],
    _GPTQ_AGAIN[1],
    -_GPTQ_AGAIN[2],
    _GPTQ_AGAIN[3],
)
PAGE.says(
    "on SmolLM2 at 4.12 bits its KL was {} % lower on the prose",
    100 * (1 - _kl("gptq 4:g128", _BEFORE["smollm2-135m-windows"]) / _kl("gptq 4:g128", SMOLLM2)),
)
_FEWER = _changes(_MORE_STEPS, [*_FILES.values()], "tuned")
PAGE.says(
    "KL changed by −{} to {} % on the prose and −{} to {} % elsewhere on the models trained here",
    -_FEWER[0],
    _FEWER[1],
    -_FEWER[2],
    _FEWER[3],
)
_FEWER_ON_SMOLLM2 = _changes(_MORE_STEPS, ["smollm2-135m-windows"], "tuned")
PAGE.says(
    "On SmolLM2 it became {} to {} % higher on the prose and {} to {} % lower elsewhere",
    *_FEWER_ON_SMOLLM2[:2],
    -_FEWER_ON_SMOLLM2[3],
    -_FEWER_ON_SMOLLM2[2],
)
PAGE.leaves("`tuned` took 200 steps of 512 tokens when it was first measured. It now takes 150 of 256", "settings")
_RISE = SHIPPED["DIFF V1"]["results"]
PAGE.says(
    "`nearest` has {} on DIFF V1 where 16 bits have {}, with {} nats",
    _RISE["nearest 4:g32"]["elsewhere"]["perplexity"],
    _RISE["16 bits"]["elsewhere"]["perplexity"],
    _RISE["nearest 4:g32"]["elsewhere"]["kl"],
)
_SIX = {
    model: [_kl(name, result) for name, row in result["results"].items() if row.get("tier") == "6.125 bits"]
    for model, result in NEWEST.items()
}
PAGE.says(
    "Six bits cost the models trained here {} to {} nats on the prose, and SmolLM2 {} to {}",
    min(min(_SIX[model]) for model in SHIPPED),
    max(max(_SIX[model]) for model in SHIPPED),
    *ends(_SIX["SmolLM2"]),
)
PAGE.says(
    "nf4 at 4.5 bits has {} on DIFF V2 where `gptq` has {}, with {} against {} nats",
    TRAINED["DIFF V2"]["results"]["bitsandbytes nf4, blocks of 64"]["perplexity"],
    TRAINED["DIFF V2"]["results"]["gptq 4:g32"]["perplexity"],
    _kl("bitsandbytes nf4, blocks of 64", TRAINED["DIFF V2"]),
    _kl("gptq 4:g32", TRAINED["DIFF V2"]),
)
PAGE.says("from {} % contains", 100 * OLDER["results"]["16 bits"]["acc_norm"])
_RANDOM = [kind for kind in LAYERS["mse 4:g32"]["decibels"] if kind != "the model's own"]
_PEERS = [name for name in _tier("4:g32") if not name.startswith(OURS)]
_AHEAD = [
    LAYERS["mse 4:g32"]["decibels"][kind] - max(LAYERS[peer]["decibels"][kind] for peer in _PEERS) for kind in _RANDOM
]
PAGE.says("by {} dB (heavy tails, large rows: HQQ is as good) to {} dB", *ends(_AHEAD))
_BEHIND = [
    LAYERS["bitsandbytes nf4, double quantization"]["decibels"][kind] - LAYERS["mse 4:g128"]["decibels"][kind]
    for kind in LAYERS["mse 4:g128"]["decibels"]
]
PAGE.says("by up to {} dB where columns are large", max(_BEHIND))
PAGE.says(
    "its bits differ from the table's by at most {}",
    max(
        abs(row["bits"] - TRAINED["Transformer"]["results"][name]["bits"])
        for name, row in TRAINED["DIFF V2"]["results"].items()
        if "bits" in row
    ),
)
PAGE.says(
    "{} characters of either text in windows of {}; of the prose",
    SMOLLM2["settings"]["characters"],
    SMOLLM2["settings"]["window"],
)
PAGE.says("What reads a text reads {} tokens, a passage of Dracula", SMOLLM2["settings"]["tokens"])
PAGE.says(
    "{} characters of either text in windows of {} are scored",
    *(SHIPPED["DIFF V1"]["settings"][name] for name in ("characters", "window")),
)
PAGE.says("`gptq` reads {} tokens, a passage of each", SHIPPED["DIFF V1"]["settings"]["tokens"])
PAGE.says("{} characters, the last 92,000", TRAINED["DIFF V1"]["settings"]["characters"])
PAGE.says("the first {} tokens of Dracula", TRAINED["DIFF V1"]["settings"]["tokens"])
PAGE.leaves("the last 92,000 of the whole My Ántonia and the first 39,000 of", "lengths of a text")
PAGE.leaves("all but the last 844 are from one passage", "a length of a text")
PAGE.leaves("about 16,000 characters", "a length of a text")
PAGE.leaves("three matched models of 1.25 M parameters", "a count")
PAGE.leaves("**Intervals** are 95 %", "a level")
PAGE.leaves("At 4.12 bits groups are", "a tier's name")
PAGE.leaves("1,024 tokens; `gptq` reads 4,096 others", "settings")
PAGE.leaves("(16,384 tokens by default)", "a default")
PAGE.leaves("in windows of 256 tokens by default", "a default")
PAGE.leaves("normal with 1 % of the columns or rows ten times as large", "how weights were made")
PAGE.leaves("each 95 % interval", "a level")
PAGE.leaves("on the Transformer at 3.5 bits AutoRound's is lower", "a tier's name")
PAGE.leaves("on DIFF V2 at 4.5 bits, and on the Transformer at none", "a tier's name")
PAGE.leaves("for certain at 4.5 bits alone", "a tier's name")
PAGE.leaves("at 4.5 and 4.12 bits on DIFF V1 the two", "tiers' names")
PAGE.leaves("elsewhere at 4.12 and 3.5 bits the two are level", "tiers' names")
PAGE.leaves("is level with AutoRound at 4.5 bits on both texts", "a tier's name")
PAGE.leaves("At 4.5 bits `gptq` has", "a tier's name")
PAGE.leaves("4,096 characters, 2,048 tokens read", "settings")
PAGE.leaves("At 4.12 bits nf4", "a tier's name")
PAGE.leaves("and at 3.5 bits on all four", "a tier's name")
PAGE.leaves("At 4.5 bits it is first", "a tier's name")
PAGE.leaves("on DIFF V2 at 3.5 bits on both texts", "a tier's name")
PAGE.leaves("a model and a size: at 4.5 bits", "a tier's name")
PAGE.leaves("On SmolLM2 at 4.5 bits nf4", "a tier's name")
PAGE.table(" | scales | codes | needs", Unmeasured("formulas"))

# What other tools do with DIFF models

OTHERS = raw("other-tools.json")
_ROWS = {(row["tool"], row["model"]): row for row in OTHERS["rows"]}
_QUANTIZERS = {tool for tool, _ in _ROWS if "Cache" not in tool and "onnx" not in tool}
PAGE.rows(f"tool | {' | '.join(SHOWN)}", lambda row: table_cells(OTHERS["rows"], row))


def _reached(tool: str, model: str) -> str | None:
    reached: str | None = _ROWS[tool, model]["reached"]
    return reached


PAGE.means(
    "Every quantizer that takes a Llama takes a DiffLlama",
    all(_reached(tool, "Llama") == _reached(tool, "DiffLlama") for tool in _QUANTIZERS),
)
PAGE.means(
    "All linear layers but the head were quantized",
    all(
        set(row.get("linears_reopened", row.get("linears"))) == {14}
        for (tool, model), row in _ROWS.items()
        if model == "DiffLlama" and tool in _QUANTIZERS and row["reached"]
    ),
)
PAGE.means(
    "keeps keys and values of a DiffLlama at 4 bits, by either backend",
    {_reached(tool, "DiffLlama") for tool, _ in _ROWS if "Cache" in tool} == {"quantized"},
)
PAGE.means("writes the logits of a DiffLlama to ONNX", _reached("torch.onnx.export", "DiffLlama") == "written")
PAGE.means(
    "unilm's V1 and V2 are refused by all",
    {row["reached"] for (_, model), row in _ROWS.items() if "as unilm has it" in model} == {None},
)
PAGE.means(
    "Without `trust_remote_code` all refuse them",
    {row["reached"] for (_, model), row in _ROWS.items() if "not trusted" in model} == {None},
)
PAGE.leaves("at 4 bits, by either backend", "a width that was chosen")
PAGE.leaves("and the KL in nats from the same model in float32", "a dtype")
PAGE.leaves("stock transformers 5.24 does not open", "a version")
PAGE.leaves("AutoRound reads 128 windows of 2,048 tokens", "its default")
PAGE.leaves("guides read 512 of them", "what its guides do")
PAGE.means(
    "every quantizer that takes a Llama takes them",
    all(
        _reached(tool, "Llama") == _reached(tool, model)
        for tool in _QUANTIZERS
        for model in ("V1 in our folder", "V2 in our folder")
    ),
)
PAGE.leaves("which diffquant keeps at 16 bits", "its rule for tensors")
