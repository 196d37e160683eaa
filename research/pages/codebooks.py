"""Figures of llama.cpp's formats of 16 uneven levels under our roundings, beside llama.cpp's own quantizer."""

from diffquant.measure.stats import Difference
from research.pages.raw import folder, raw
from research.pages.render import table
from research.pages.weights import FILES
from research.studies.rounding_tables import kl_less

RESULTS = {
    model: raw(f"codebooks/{file}.json")
    for model, file in FILES.items()
    if any(folder("codebooks").glob(f"{file}.json*"))
}
IQ4_XS, IQ4_NL = (f"llama.cpp {name}, imatrix" for name in ("IQ4_XS", "IQ4_NL"))

SHOWN = [
    *("mse iq4_xs, imatrix", "gptq iq4_xs", "tuned iq4_xs", IQ4_XS),
    *("tuned iq4_nl", IQ4_NL, "tuned 4:g32"),
]


def kl(model: str, method: str) -> float:
    """Mean KL in nats on text elsewhere."""
    return float(RESULTS[model]["results"][method]["elsewhere"]["kl"])


def bits(method: str) -> list[float]:
    """Stored bits per weight, by model."""
    return [each["results"][method]["bits"] for each in RESULTS.values() if method in each["results"]]


def differences(ours: str, other: str) -> list[Difference]:
    """KL of one method minus another's on both texts of every model that both were measured on."""
    found = [
        difference
        for each in RESULTS.values()
        if {ours, other} <= each["results"].keys()
        for difference in kl_less(each, ours, other)
    ]
    return [difference for difference in found if difference is not None]


def less(ours: str, other: str) -> list[float]:
    """Shares of KL that one method has less than another on text elsewhere, by model."""
    both = [model for model, each in RESULTS.items() if {ours, other} <= each["results"].keys()]
    return [1 - kl(model, ours) / kl(model, other) for model in both]


def of(model: str, ours: str, other: str) -> Difference:
    """KL of one method minus another's on text elsewhere.

    Raises:
        LookupError: one of them kept no windows.
    """
    found = kl_less(RESULTS[model], ours, other)[1]
    if found is None:
        raise LookupError(f"{ours} or {other} kept no windows")
    return found


def leads(ours: str, other: str) -> bool:
    """Whether one method has less KL than another on all models and texts, and no interval contains zero."""
    return all(each.high < 0 for each in differences(ours, other))


def levels_table(methods: list[str]) -> str:
    """KL of methods on text elsewhere, by model."""
    rows = [
        [model, *(f"{kl(model, name):.4f}" if name in each["results"] else "–" for name in methods)]
        for model, each in RESULTS.items()
    ]
    return table(["KL, nats", *(name.replace(", imatrix", "") for name in methods)], rows)
