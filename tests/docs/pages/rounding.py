"""The figures of docs/rounding.md."""

from collections.abc import Callable
from typing import Any

from diffquant.evals.stats import estimate
from tests.docs.numbers import Disputed, Expected
from tests.docs.page import Page, Unmeasured
from tests.docs.raw import raw

PAGE = Page("docs/rounding.md")
SMOLLM2 = raw("rounding/smollm2-135m.json")
TRAINED = {
    "Transformer": raw("rounding/prose-transformer.json"),
    "DIFF V1": raw("rounding/prose-diff-v1.json"),
    "DIFF V2": raw("rounding/prose-diff-v2.json"),
}
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
    *_LEADS[:4],
    Disputed(_LEADS[4], "5.75002 is 5.8"),
    _LEADS[5],
)


def _fall(rounding: str, result: dict[str, Any], size: str = "4:g32") -> float:
    return 100 * (1 - _kl(f"{rounding} {size}", result) / _kl(f"nearest {size}", result))


_FALLS = [_fall("mse", result) for result in (SMOLLM2, *TRAINED.values())]
PAGE.says("It lowers the KL of `nearest` by {} to {} % with groups of 32", min(_FALLS), max(_FALLS))
PAGE.says(
    "its KL with groups of 32 falls by {} % from `nearest`, that of the Transformer and of DIFF V2 by {} %",
    _fall("gptq", TRAINED["DIFF V1"]),
    _fall("gptq", TRAINED["Transformer"]),
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
    Disputed(max(_SIX), "0.0025 is 0.002, or 0.0025"),
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
for text in ("{} characters of prose in windows of {}",):
    PAGE.says(text, SMOLLM2["settings"]["characters"], SMOLLM2["settings"]["window"])
PAGE.says("`gptq` reads {} tokens of its first", SMOLLM2["settings"]["tokens"])
PAGE.says(
    "{} characters of books held out of their training in windows of {}; `gptq` reads {} tokens of their other half",
    *(TRAINED["DIFF V1"]["settings"][name] for name in ("characters", "window", "tokens")),
)
PAGE.leaves("three matched models of 1.3 M parameters", "a count")
PAGE.leaves("1,024 tokens; `gptq` reads 4,096 others", "settings")
PAGE.leaves("(16,384 tokens by default)", "a default")
PAGE.leaves("normal with 1 % of the columns or rows ten times as large", "how weights were made")
PAGE.leaves("each 95 % interval", "a level")
PAGE.leaves("4,096 characters, 2,048 tokens read", "settings")
PAGE.leaves("At 4.12 bits nf4", "a tier's name")
PAGE.leaves("KL at 4.5 bits on the three", "a tier's name")
PAGE.leaves("On SmolLM2 at 4.5 bits nf4", "a tier's name")
PAGE.leaves("about what HQQ has with 4.5 bits", "a tier's name")
PAGE.table(" | scales | codes | needs", lambda *_: Unmeasured("formulas"))
