"""Figures of the page on number formats, operand by operand, and on low-bit logits of SmolLM2."""

from diffquant.measure.stats import Difference, mean_interval, paired_difference
from research.pages.raw import folder, measured, raw
from research.pages.render import ends, fixed, interval, signed, span, table
from research.studies.activations import PARTS, WIDTHS
from research.studies.figure8_model import advantage
from research.studies.formats import FULL_SUMS, MODELS, TARGETS, TEXTS, Measured, shown_bits
from research.studies.kv_results import kl_change

MEASURED = Measured(folder("formats"))
DIFF = ("DIFF V1", "DIFF V2")
SMOLLM2 = "SmolLM2-135M"
SHOWN = ("8:g32", "4:g32", "nvfp4")


def lost(model: str, target: str) -> tuple[float, float]:
    """Bits that a DIFF model needs more on a target: smallest and largest mean over rows and both texts."""
    return ends(MEASURED.lost(model, row, text).mean for row in MEASURED.rows(model, target) for text in TEXTS)


def verdicts_table() -> str:
    """Bits that a DIFF model needs more, by target, and in how many rows that is told on both texts."""
    rows = []
    for target in (*TARGETS, "like"):
        cells = []
        for model in DIFF:
            punished, forgiven, number = MEASURED.verdicts(model, target)
            low, high = lost(model, target)
            cells.append(f"{signed(low)} to {signed(high)}; {punished} more, {forgiven} fewer of {number}")
        rows.append([f"`{target}`", *cells])
    return table(["rounded", *(f"{model}, bits more than the Transformer" for model in DIFF)], rows)


def targets_of_most(model: str, which: int) -> set[str]:
    """Targets in most of whose rows a model needs more bits (0) or fewer (1)."""
    counts = {target: MEASURED.verdicts(model, target) for target in TARGETS}
    return {target for target, each in counts.items() if 2 * each[which] > each[2]}


V1_NEEDS_MORE = targets_of_most("DIFF V1", 0) == set(TARGETS)
V2_NEEDS_FEWER_FOR_VALUES = targets_of_most("DIFF V2", 1) == {"v", "pv"}
V2_NEEDS_MORE_FOR_LOGITS = targets_of_most("DIFF V2", 0) == {"logits", "p", "qk"}


def beside_integers(model: str, target: str, scheme: str = "nvfp4") -> Difference:
    """Bits that a 4-bit float loses to integers in groups of 32."""
    return MEASURED.bits((model, f"{target} {scheme}"), (model, f"{target} 4:g32"))


def floats_table() -> str:
    """What `nvfp4` loses to `4:g32`."""
    models = (*MODELS, SMOLLM2)
    rows = [[f"`{target}`", *(shown_bits(beside_integers(model, target)) for model in models)] for target in TARGETS]
    return table(["`nvfp4` against `4:g32`, bits lost", *models], rows)


SMOLLM2_PREFERS_NVFP4 = (
    all(beside_integers(SMOLLM2, target).high < 0 for target in TARGETS if target != "logits")
    and beside_integers(SMOLLM2, "logits").mean > 0
)
INTEGERS_SERVE_LOGITS = all(
    beside_integers(model, target).low > 0 for model in MODELS for target in ("logits", "qk", "k")
)
NVFP4_SERVES_SOFTMAX = all(beside_integers(model, "p").high < 0 for model in MODELS)


def full_sum(model: str, scheme: str, text: str = "books") -> Difference:
    """Bits that softmax weights lose by the sum of unrounded weights."""
    return MEASURED.bits((model, f"p {scheme}:fullsum"), (model, f"p {scheme}"), text)


def sums_table() -> str:
    """What the sum of unrounded weights loses."""
    rows = [[f"`{scheme}`", *(shown_bits(full_sum(model, scheme)) for model in MODELS)] for scheme in FULL_SUMS]
    return table(["sum of unrounded weights, bits lost", *MODELS], rows)


SUMS_GO_APART = all(
    all(full_sum("DIFF V1", scheme, text).low > 0 for scheme in FULL_SUMS)
    and all(
        (full_sum(model, scheme, text).mean > 0) == scheme.startswith("e4m3")
        for model in ("Transformer", "DIFF V2")
        for scheme in FULL_SUMS
    )
    for text in TEXTS
)


def full_sum_beside(model: str) -> tuple[float, float]:
    """Bits that the unrounded sum costs more than it costs the Transformer, with e4m3 and nvfp4, over both texts."""

    def losses(of: str, scheme: str, text: str) -> list[float]:
        pairs = zip(
            MEASURED.passages(of, f"p {scheme}", text), MEASURED.passages(of, f"p {scheme}:fullsum", text), strict=True
        )
        return [advantage(rounded, full) for rounded, full in pairs]

    return ends(
        mean_interval(
            [a - b for a, b in zip(losses(model, scheme, text), losses("Transformer", scheme, text), strict=True)]
        ).mean
        for scheme in ("e4m3:row", "nvfp4")
        for text in TEXTS
    )


def rows_table() -> str:
    """KL and bits lost of the formats with a scale for 32 neighbours or fewer."""
    names = [f"{target} {scheme}" for target in TARGETS for scheme in SHOWN]
    columns = (*MODELS, *(f"{model} loses, books" for model in DIFF))
    rows = [[f"`{name}`", *(MEASURED.cell(name, column) for column in columns)] for name in names]
    return table(["rounded", *(f"{model}, KL" for model in MODELS), *(f"{model} loses, bits" for model in DIFF)], rows)


# Inputs of linear layers

_INPUTS = {name: raw(f"activations/{file}.json") for name, file in MODELS.items()}
_OF_ATTENTION = ("q", "k", "v")


def inputs_kl(model: str, row: str) -> Difference:
    """KL of rounded inputs beyond that of the weights, in thousandths of a nat."""
    rows = _INPUTS[model]["results"]
    change = kl_change(rows[row], rows["weights"])
    return Difference(*(1000 * each for each in (change.mean, change.low, change.high)))


def inputs_table() -> str:
    """KL by whose inputs are rounded."""
    rows = [
        [part, *(interval(inputs_kl(model, f"{bits} {part}")) for bits in WIDTHS for model in MODELS)] for part in PARTS
    ]
    return table(["inputs of", *(f"{bits} bits, {model}" for bits in WIDTHS for model in MODELS)], rows)


_SMOOTHED = {name: raw(f"smoothed/{file}.json")["results"] for name, file in MODELS.items()}
_SMOLLM2 = {
    "source": raw("smoothed/source/smollm2-135m.gguf.json")["results"],
    "smoothed": raw("smoothed/smollm2-135m.json")["results"],
}


def smoothing_change(model: str) -> Difference:
    """Return the change of KL under 8-bit weights and activations by smoothed inputs, in thousandths of a nat."""
    change = kl_change(_SMOOTHED[model]["8 all"], _INPUTS[model]["results"]["8 all"])
    return Difference(*(1000 * each for each in (change.mean, change.low, change.high)))


def smollm2_kl(which: str) -> float:
    """Return SmolLM2's KL under 8-bit weights and activations in thousandths of a nat."""
    return 1000 * float(_SMOLLM2[which]["8 all"]["kl"])


SMOOTHING_HELPS_SMOLLM2 = kl_change(_SMOLLM2["smoothed"]["8 all"], _SMOLLM2["source"]["8 all"]).high < 0
SMOOTHING_LEAVES_SMALL_MODELS = all(abs(smoothing_change(model).mean) < 0.05 for model in MODELS)
DOWN_COSTS_MOST = all(
    inputs_kl(model, f"{bits} down").low > inputs_kl(model, f"{bits} {part}").high
    for model in MODELS
    for bits in WIDTHS
    for part in PARTS
    if part not in ("all", "down")
)
V_COSTS_MOST_OF_ATTENTION = all(
    max(_OF_ATTENTION, key=lambda part: inputs_kl(model, f"4 {part}").mean) == "v" for model in MODELS
)
V1_LOSES_MORE_BY_V_AND_O = all(
    inputs_kl("DIFF V1", f"4 {part}").low > inputs_kl("Transformer", f"4 {part}").high for part in ("v", "o")
)


# Logits of SmolLM2

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SCHEMES = ("tensor", "row", "tensor:shift", "row:shift")


def logits_kl(scheme: str) -> float:
    """KL of SmolLM2 with low-bit logits, in nats."""
    return float(measured("smollm2-logits-kl", _GGUF, scheme).details["kl"])


def logits_table() -> str:
    """KL by bits and granularity."""
    rows = [[f"`{each}`", *(f"{logits_kl(f'{bits}:{each}'):.2g}" for bits in (8, 6, 4, 3))] for each in SCHEMES]
    return table(["logits of SmolLM2, KL", *(f"{bits} bits" for bits in (8, 6, 4, 3))], rows)


SHIFT_SAVES_TWO_BITS = logits_kl("4:tensor:shift") < logits_kl("6:tensor")


def accuracy_change(
    scheme: str, folder_name: str = "smollm2-logits-500", model: str = _GGUF, base: str = _GGUF
) -> Difference:
    """Change of HellaSwag's normalized accuracy from 16 bits, paired by item, in points."""
    ours, full = measured(folder_name, model, scheme).values, measured(folder_name, base, "16").values
    if ours is None or full is None:
        raise LookupError("a cell keeps no values of its items")
    change = paired_difference(ours, full)
    return Difference(100 * change.mean, 100 * change.low, 100 * change.high)


def accuracy_table() -> str:
    """HellaSwag with low-bit logits."""
    rows = [
        [f"`{each}`", *(interval(accuracy_change(f"{bits}:{each}"), 1, True) for bits in (8, 6, 4, 3))]
        for each in ("tensor", "row")
    ]
    return table(["change of accuracy, points", *(f"{bits} bits" for bits in (8, 6, 4, 3))], rows)


def _is_told(mean: Difference) -> bool:
    return mean.high < 0 or mean.low > 0


ONLY_3_TENSOR_IS_TOLD = [
    f"{bits}:{each}"
    for each in ("tensor", "row")
    for bits in (8, 6, 4, 3)
    if _is_told(accuracy_change(f"{bits}:{each}"))
] == ["3:tensor"]
ITEMS = measured("smollm2-logits-500", _GGUF, "16").n


def spread_of(model: str, target: str) -> str:
    """Bits that a model needs more, as text."""
    low, high = lost(model, target)
    return span((low, high)) if low > 0 else f"{fixed(low)} to {fixed(high)}"
