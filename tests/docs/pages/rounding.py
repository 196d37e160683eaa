"""The figures of docs/rounding.md."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diffquant.evals.stats import Difference, estimate
from studies.rounding_tables import READERS, kl_less, lead, lead_cells, method_cells, more_kl, option_cells
from tests.docs.numbers import Expected
from tests.docs.page import CellValues, Page, Unmeasured, Values
from tests.docs.raw import raw

PAGE = Page("docs/rounding.md")
SMOLLM2 = raw("rounding/smollm2-135m.json")
_FILES = {"Transformer": "prose-transformer", "DIFF V1": "prose-diff-v1", "DIFF V2": "prose-diff-v2"}
TRAINED = {model: raw(f"rounding/unshipped-text/{file}.json") for model, file in _FILES.items()}
SHIPPED = {model: raw(f"rounding/{file}.json") for model, file in _FILES.items()}
LAYERS = raw("rounding/layers.json")["results"]
TIERS = ("4.5 bits", "4.12 bits", "6.12 bits")
OURS = ("nearest", "mse", "gptq")


def _bits(row: dict[str, Any]) -> list[Expected]:
    held = row.get("held_bits", row.get("bits", 16))
    bits = row.get("bits", 16)
    return [bits] if held == bits else [bits, held]


def _cell(row: dict[str, Any], head: str) -> list[Expected]:
    if head.endswith("bits"):
        return _bits(row)
    if head == "HellaSwag":
        accuracy = estimate([float(digit) for digit in row["correct"]])
        return [100 * accuracy.mean, 100 * (accuracy.se or 0)]
    return [row["perplexity" if head.endswith("perplexity") else "kl"]]


PAGE.table("method | bits | perplexity | KL, nats | HellaSwag", lambda row, head: _cell(SMOLLM2["results"][row], head))


def _shipped_cell(model: str) -> CellValues:
    result = SHIPPED[model]

    def cell(row: str, column: str) -> Values:
        if column == "bits":
            return _bits(result["results"][row])
        return dict(zip(_SCORES, method_cells(result, row), strict=True))[column]

    return cell


_SCORES = ("perplexity", "KL", "elsewhere: perplexity", "elsewhere: KL")
for _model in SHIPPED:
    PAGE.table(
        "method | bits | perplexity | KL, nats | elsewhere: perplexity | KL, nats",
        _shipped_cell(_model),
        section=_model,
        columns=["bits", *_SCORES],
    )


_BY_FILE = {result["settings"]["model"]: result for result in SHIPPED.values()}


def _lead_cell(row: str, column: str) -> str:
    file, _, ours = row.split(", ")
    return dict(zip(("best other", "prose", "elsewhere"), lead_cells(_BY_FILE[file], ours), strict=True))[column]


PAGE.table(
    "model | bits | ours | best other | KL less, nats | elsewhere",
    _lead_cell,
    names=3,
    columns=["best other", "prose", "elsewhere"],
)

_HEADS = ["Transformer: perplexity", "KL, nats", "DIFF V1: perplexity", "KL, nats", "DIFF V2: perplexity", "KL, nats"]


def _trained_cell(row: str, column: str) -> list[Expected]:
    model = "Transformer" if column == "bits" else column.partition(":")[0]
    return _cell(TRAINED[model]["results"][row], column)


PAGE.table(
    f"method | bits | {' | '.join(_HEADS)}",
    _trained_cell,
    columns=["bits", *(f"{model}: {what}" for model in TRAINED for what in ("perplexity", "KL"))],
)
PAGE.table(
    "method | bits | the model's own | normal | Student's t, 5 | normal, large columns | normal, large rows",
    lambda row, head: [LAYERS[row]["bits"] if head == "bits" else LAYERS[row]["decibels"][head]],
)


def _kl(name: str, result: dict[str, Any] = SMOLLM2) -> float:
    return float(result["results"][name]["kl"])


PAGE.says(
    "On SmolLM2 at 4.5 bits it is {} nats, against {} of the next best (HQQ) and {} of nf4",
    _kl("gptq 4:g32"),
    _kl("HQQ 4 bits, groups of 64"),
    _kl("bitsandbytes nf4, blocks of 64"),
)
PAGE.says("at 4.12 bits {} against {} of nf4", _kl("gptq 4:g128"), _kl("bitsandbytes nf4, double quantization"))
PAGE.says("at 6.12 bits {} against {} of torchao's int6", _kl("gptq 6:g128"), _kl("torchao int6, groups of 192"))


def _tier(size: str) -> list[str]:
    """Names of a tier's methods, by the tier of ours."""
    tier = SMOLLM2["results"][f"mse {size}"]["tier"]
    return [name for name, row in SMOLLM2["results"].items() if row.get("tier") == tier]


def _lead(name: str, rivals: list[str], take: Callable[[list[float]], float]) -> float:
    kinds = LAYERS[name]["decibels"]
    return take([kinds[kind] - max(LAYERS[rival]["decibels"][kind] for rival in rivals) for kind in kinds])


_LEADS = [
    take_lead
    for size in ("4:g32", "4:g128", "6:g128")
    for take_lead in (
        _lead(f"gptq {size}", [n for n in _tier(size) if n != f"gptq {size}"], min),
        _lead(f"gptq {size}", [n for n in _tier(size) if n != f"gptq {size}"], max),
    )
]
PAGE.says(
    "it is {} to {} dB ahead of all others at 4.5 bits, {} to {} at 4.12 and {} to {} at 6.12",
    *_LEADS,
)


def _fall(rounding: str, result: dict[str, Any], size: str = "4:g32") -> float:
    return 100 * (1 - _kl(f"{rounding} {size}", result) / _kl(f"nearest {size}", result))


_FALLS = [_fall("mse", result) for result in (SMOLLM2, *TRAINED.values())]
PAGE.says("It lowers the KL of `nearest` by {} to {} % with groups of 32", min(_FALLS), max(_FALLS))
PAGE.says(
    "its KL at 4.5 bits falls by {} % from `nearest`, the Transformer's by {} % and DIFF V2's by {} %",
    *(_fall("gptq", SHIPPED[model]) for model in ("DIFF V1", "Transformer", "DIFF V2")),
)


def _elsewhere(result: dict[str, Any]) -> dict[str, Any]:
    """A result with what was scored on the other text in place of the prose."""
    rows = {name: row | row["elsewhere"] for name, row in result["results"].items()}
    return result | {"results": rows}


def _below_the_best(ours: str, result: dict[str, Any], best: str) -> float:
    return 100 * (1 - _kl(ours, result) / _kl(best, result))


def _is_below_zero(difference: Difference | None) -> bool:
    return difference is not None and difference.high < 0


def _range_below(rivals: Mapping[str, str], ours: str = "gptq 4:g32") -> list[float]:
    """Least and most percent of KL that ours has less than each model's rival on the prose, and elsewhere."""
    here = [_below_the_best(ours, SHIPPED[model], rival) for model, rival in rivals.items()]
    there = [_below_the_best(ours, _elsewhere(SHIPPED[model]), rival) for model, rival in rivals.items()]
    return [min(here), max(here), min(there), max(there)]


def _lowest(names: Sequence[str]) -> dict[str, str]:
    """Which of some methods has the lowest KL on each model."""
    return {model: min(names, key=lambda name: _kl(name, result)) for model, result in SHIPPED.items()}


def _is_below_all(rivals: Mapping[str, str]) -> bool:
    return all(_is_below_zero(each) for model, rival in rivals.items() for each in _less(model, rival))


def _less(model: str, rival: str) -> tuple[Difference | None, Difference | None]:
    return kl_less(SHIPPED[model], "gptq 4:g32", rival)


def _blind(result: dict[str, Any]) -> list[str]:
    """Methods of 4.5 bits that read no text."""
    rows = result["results"]
    return [name for name in rows if rows[name].get("tier") == "4.5 bits" and not name.startswith(READERS)]


_TUNER = "AutoRound 4 bits, groups of 32"
_BY_TUNER, _BY_Q4_K, _BY_MIX = (
    dict.fromkeys(SHIPPED, name) for name in (_TUNER, "llama.cpp Q4_K, imatrix", "llama.cpp Q4_K_M, imatrix")
)
_BY_GPTQ = _lowest([f"llm-compressor GPTQ, 4 bits, groups of 32, {observer}" for observer in ("minmax", "mse")])
_BY_BLIND = {model: min(_blind(result), key=lambda name: _kl(name, result)) for model, result in SHIPPED.items()}
_MORE = [100 * (_kl("gptq 4:g32", result) / _kl(_TUNER, result) - 1) for result in SHIPPED.values()]
PAGE.says("on the prose `gptq` has {} to {} % more KL", min(_MORE), max(_MORE))
PAGE.means(
    "On the Transformer and DIFF V2 no interval of the difference contains zero, on either text; on DIFF V1 both do",
    all(
        each is not None and (each.low > 0) == (model != "DIFF V1") and each.high > 0
        for model in SHIPPED
        for each in _less(model, _TUNER)
    ),
)
_TUNED_ROWS = [result["results"][_TUNER] for result in SHIPPED.values()]
_MORE_BITS = [
    100 * (row["bits"] / result["results"]["gptq 4:g32"]["bits"] - 1)
    for row, result in zip(_TUNED_ROWS, SHIPPED.values(), strict=True)
]
PAGE.says(
    "Of AutoRound's bits {} to {} % are more than those of `gptq`, and it took {} to {} seconds of CPU time",
    min(_MORE_BITS),
    max(_MORE_BITS),
    min(row["cpu_seconds"] for row in _TUNED_ROWS),
    max(row["cpu_seconds"] for row in _TUNED_ROWS),
)
PAGE.says("`gptq` has {} to {} % less KL than llama.cpp's Q4_K", *_range_below(_BY_Q4_K)[:2])
PAGE.says(
    "and {} to {} % less than Q4_K_M, which has {} to {} bits",
    *_range_below(_BY_MIX)[:2],
    *(take(result["results"][_BY_MIX[model]]["bits"] for model, result in SHIPPED.items()) for take in (min, max)),
)
PAGE.says("it has {} to {} % less than llm-compressor's GPTQ", *_range_below(_BY_GPTQ)[:2])
PAGE.says("it is {} to {} % on the prose and {} to {} % on HellaSwag's contexts", *_range_below(_BY_BLIND))
PAGE.means(
    "No interval of these differences contains zero, on either text",
    all(map(_is_below_all, (_BY_Q4_K, _BY_MIX, _BY_GPTQ, _BY_BLIND))),
)
PAGE.leaves("Q5_0 of 5.5 bits for Q4_K", "what llama.cpp's format takes")
PAGE.leaves("this project's environment has 2.13.0", "a version")


_PLAIN = "gptq 4:g32, unrounded inputs"
_LESS = [_below_the_best("gptq 4:g32", result, _PLAIN) for result in SHIPPED.values()]
_LESS_THERE = [_below_the_best("gptq 4:g32", _elsewhere(result), _PLAIN) for result in SHIPPED.values()]
_SLOWER = [
    result["results"]["gptq 4:g32"]["seconds"] / result["results"][_PLAIN]["seconds"] for result in SHIPPED.values()
]
PAGE.says("That is {} to {} % less KL on the prose than on the inputs of", min(_LESS), max(_LESS))
PAGE.says("and {} to {} % less elsewhere", min(_LESS_THERE), max(_LESS_THERE))
PAGE.says("Rounding took {} to {} times as long", min(_SLOWER), max(_SLOWER))
PAGE.means(
    "no interval of the difference contains zero. Rounding",
    all(each and each.low > 0 for result in SHIPPED.values() for each in more_kl(result, _PLAIN)),
)


def _option_cell(row: str, column: str) -> str:
    model, _, name = row.partition(", ")
    return dict(zip(_OPTION_COLUMNS, option_cells(_BY_FILE[model], name), strict=True))[column]


_OPTION_COLUMNS = ["bits", "KL", "more", "elsewhere: KL", "elsewhere: more"]
PAGE.table(
    "model | gptq | bits | KL, nats | more than by itself | elsewhere: KL, nats | more",
    _option_cell,
    names=2,
    columns=_OPTION_COLUMNS,
)
PAGE.means(
    "it would be behind Q4_K_M on the Transformer and DIFF V2",
    [model for model, result in SHIPPED.items() if _kl(_PLAIN, result) > _kl(_BY_MIX[model], result)]
    == ["Transformer", "DIFF V2"],
)
PAGE.means(
    "`mse` has less KL than the best of them on both texts, and no interval of the difference contains zero",
    all(_is_below_zero(each) for result in SHIPPED.values() for each in lead(result, "mse 4:g32")[1:]),
)


def _is_first(ours: str, result: dict[str, Any]) -> bool:
    """Whether one of ours has the lowest KL of its tier; `mse` is compared with what reads no text."""
    return _kl(ours, result) < _kl(lead(result, ours)[0], result)


FIRST = [
    {rule: _is_first(f"{rule} {size}", result) for rule in ("mse", "gptq")}
    for result in (SMOLLM2, *TRAINED.values())
    for size in ("4:g32", "4:g128", "6:g128")
]
PAGE.means("`gptq` has the lowest KL of every tier on all four models", all(first["gptq"] for first in FIRST))
PAGE.says("in {} of the {} combinations of a model and a size", sum(first["mse"] for first in FIRST), len(FIRST))
_RISE = SHIPPED["DIFF V1"]["results"]
PAGE.says(
    "`nearest` has {} on DIFF V1 where 16 bits have {}, with {} nats",
    _RISE["nearest 4:g32"]["elsewhere"]["perplexity"],
    _RISE["16 bits"]["elsewhere"]["perplexity"],
    _RISE["nearest 4:g32"]["elsewhere"]["kl"],
)
_SIX = [
    _kl(name, result)
    for result in TRAINED.values()
    for name, row in result["results"].items()
    if name[0] != "1" and row["tier"] == SMOLLM2["results"]["mse 6:g128"]["tier"]
]
PAGE.says(
    "Six bits cost the models trained here {} to {} nats, and SmolLM2 {} to {}",
    min(_SIX),
    max(_SIX),
    min(_kl(n) for n in _tier("6:g128")),
    max(_kl(n) for n in _tier("6:g128")),
)
PAGE.says(
    "nf4 at 4.5 bits has {} on DIFF V2 where `gptq` has {}, with {} against {} nats",
    TRAINED["DIFF V2"]["results"]["bitsandbytes nf4, blocks of 64"]["perplexity"],
    TRAINED["DIFF V2"]["results"]["gptq 4:g32"]["perplexity"],
    _kl("bitsandbytes nf4, blocks of 64", TRAINED["DIFF V2"]),
    _kl("gptq 4:g32", TRAINED["DIFF V2"]),
)
PAGE.says("from {} % contains", 100 * SMOLLM2["results"]["16 bits"]["acc_norm"])
_RANDOM = [kind for kind in LAYERS["mse 4:g32"]["decibels"] if kind != "the model's own"]
_PEERS = [name for name in _tier("4:g32") if not name.startswith(OURS)]
_AHEAD = [
    LAYERS["mse 4:g32"]["decibels"][kind] - max(LAYERS[peer]["decibels"][kind] for peer in _PEERS) for kind in _RANDOM
]
PAGE.says("by {} dB (heavy tails, large rows: HQQ is as good) to {} dB", min(_AHEAD), max(_AHEAD))
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
PAGE.says("{} characters in windows of {}, all but", SMOLLM2["settings"]["characters"], SMOLLM2["settings"]["window"])
PAGE.says("`gptq` reads {} tokens, a passage of Dracula", SMOLLM2["settings"]["tokens"])
PAGE.says(
    "{} characters of either text in windows of {} are scored",
    *(SHIPPED["DIFF V1"]["settings"][name] for name in ("characters", "window")),
)
PAGE.says("`gptq` reads {} tokens, a passage of each", SHIPPED["DIFF V1"]["settings"]["tokens"])
PAGE.says("{} characters, the last 92,000", TRAINED["DIFF V1"]["settings"]["characters"])
PAGE.says("the first {} tokens of Dracula", TRAINED["DIFF V1"]["settings"]["tokens"])
PAGE.leaves("the last 92,000 of the whole My Ántonia and the first 39,000 of", "lengths of a text")
PAGE.leaves("the last 844 from one passage", "a length of a text")
PAGE.leaves("about 16,000 characters", "a length of a text")
PAGE.leaves("three matched models of 1.25 M parameters", "a count")
PAGE.leaves("**Intervals** are 95 %", "a level")
PAGE.leaves("At 4.12 bits groups are", "a tier's name")
PAGE.leaves("1,024 tokens; `gptq` reads 4,096 others", "settings")
PAGE.leaves("(16,384 tokens by default)", "a default")
PAGE.leaves("normal with 1 % of the columns or rows ten times as large", "how weights were made")
PAGE.leaves("each 95 % interval", "a level")
PAGE.leaves("4,096 characters, 2,048 tokens read", "settings")
PAGE.leaves("At 4.12 bits nf4", "a tier's name")
PAGE.leaves("At 4.5 bits AutoRound and `gptq` are", "a tier's name")
PAGE.leaves("a model and a size: at 4.5 bits", "a tier's name")
PAGE.leaves("On SmolLM2 at 4.5 bits nf4", "a tier's name")
PAGE.leaves("about what HQQ has with 4.5 bits", "a tier's name")
PAGE.table(" | scales | codes | needs", lambda *_: Unmeasured("formulas"))
