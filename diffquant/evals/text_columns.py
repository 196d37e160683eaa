"""Columns of perplexity and of KL from 16 bits. No torch here."""

from diffquant.evals.columns import FAILED, MISSING, Column, Columns, Compared, Metric, kl_text
from diffquant.evals.stats import Difference, mean_interval
from diffquant.support.plain_data import JsonObject

_NUMBERS = ("perplexity", "bits_per_byte", "kl", "kl_low", "kl_high")


def _numbers(compared: Compared) -> JsonObject:
    details = compared.result.details if compared.result else {}
    bounds = {}
    # Results of earlier versions have no windows, and a single window has no interval.
    if len(details.get("kl_by_window", [])) > 1:
        kl = mean_interval(details["kl_by_window"], details["tokens_by_window"])
        bounds = {"kl_low": kl.low, "kl_high": kl.high}
    return {name: (details | bounds).get(name) for name in _NUMBERS}


def _kl(compared: Compared) -> Difference | None:
    """KL with its interval over windows; None for 16 bits."""
    numbers = _numbers(compared)
    kl = numbers["kl"]
    if kl is None:
        return None
    return Difference(kl, *(kl if numbers[end] is None else numbers[end] for end in ("kl_low", "kl_high")))


def _perplexity_text(compared: Compared) -> str:
    return FAILED if compared.result is None else f"{_numbers(compared)['perplexity']:.4g}"


_NOTE = (
    "KL is the mean of KL(16 bits || quantized) over next-token distributions, in nats; plots have its 95 % "
    "interval over windows of the text."
)

# Perplexity of a text.
TEXTS = Columns(
    table=(
        Column("ppl", _perplexity_text),
        Column("KL", lambda compared: f"{kl.mean:.2g}" if (kl := _kl(compared)) else MISSING),
    ),
    changes=(Metric("KL from 16 bits, nats", _kl, lambda change: f"KL {kl_text(change)}", is_log=True),),
    score=None,
    record=_numbers,
    notes=lambda _: [_NOTE],
    by_item=False,
    has_own_names=False,
)
