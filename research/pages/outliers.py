"""Figures of the page on outliers of SmolLM2 and on static scales."""

import math
from typing import Any

from diffquant.measure.stats import Difference, mean_interval, paired_difference
from research.pages.raw import measured, raw
from research.pages.render import fixed, interval, table

SMOLLM2 = raw("smollm2-outliers/outliers.json")["models"][0]
HIDDEN, LOGITS = SMOLLM2["overall"]["hidden"], SMOLLM2["overall"]["logits"]


def magnitudes_table() -> str:
    """Largest magnitudes and medians."""
    rows = [
        [
            name,
            *(fixed(each["top"][rank], 1) for rank in ("1", "10", "100")),
            fixed(each["median"]),
            fixed(_over_median(each), 0),
        ]
        for name, each in (("attention logits", LOGITS), ("hidden states", HIDDEN))
    ]
    return table(["SmolLM2-135M", "largest", "10th", "100th", "median", "largest over median"], rows)


def _over_median(each: dict[str, Any]) -> float:
    return float(each["top"]["1"] / each["median"])


def layer_of(kind: str) -> int:
    """Layer of the largest magnitude."""
    tops = [each[kind]["top"]["1"] for each in SMOLLM2["layers"]]
    return tops.index(max(tops))


HIDDEN_IS_MORE_EXTREME = _over_median(HIDDEN) > 100 * _over_median(LOGITS)

# Static scales of the cache, held out

HELD_OUT = raw("smollm2-kv-scales/held-out.json")
USUAL = "6 windows, one a passage"
CALIBRATIONS = list(HELD_OUT["calibrations"])


def cache_row(bits: int, observer: str = "", found_on: str = "") -> dict[str, Any]:
    """The row of one configuration; without an observer, that of a scale per token and head."""
    key = {"bits": bits, "observer": observer, "calibrated_on": found_on}
    return next(row for row in HELD_OUT["rows"] if key.items() <= row.items())


def kl(bits: int, observer: str = "", found_on: str = "") -> Difference:
    """KL over eight passages, in nats."""
    return mean_interval(cache_row(bits, observer, found_on)["kl"])


def perplexity(row: dict[str, Any]) -> float:
    """Perplexity over the same passages."""
    return math.exp(mean_interval(row["nll"]).mean)


def clipped(bits: int, found_on: str) -> Difference:
    """KL of `mse` minus that of `absmax`, found on the same tokens."""
    return paired_difference(*(cache_row(bits, observer, found_on)["kl"] for observer in ("mse", "absmax")))


def clipping_off() -> list[float]:
    """Shares of KL that clipping takes off at 4 bits, by what the scales are found on."""
    return [1 - kl(4, "mse", found_on).mean / kl(4, "absmax", found_on).mean for found_on in CALIBRATIONS]


CLIPPING_HELPS = all(clipped(4, found_on).high < 0 for found_on in CALIBRATIONS)
CLIPPING_AT_8_IS_NOTHING = clipped(8, USUAL).low < 0 < clipped(8, USUAL).high
CLIPPED_BEATS_DYNAMIC = paired_difference(cache_row(4, "mse", USUAL)["kl"], cache_row(4)["kl"]).high < 0
UNCLIPPED_LOSES_TO_DYNAMIC = paired_difference(cache_row(4, "absmax", USUAL)["kl"], cache_row(4)["kl"]).low > 0


def cache_table() -> str:
    """Static and dynamic scales of the cache."""
    rows = []
    for bits, found_on in ((8, USUAL), *((4, each) for each in CALIBRATIONS)):
        tokens = len(HELD_OUT["calibrations"][found_on]) * HELD_OUT["window"]
        cells = [interval(kl(bits, observer, found_on), 4 if bits == 8 else 2) for observer in ("absmax", "mse")]
        change = interval(clipped(bits, found_on), 5 if bits == 8 else 2, True)
        rows.append([f"{bits} bits", f"{found_on}, {tokens:,} tokens", *cells, change])
    return table(["cache", "scales found on", "`absmax`: KL, nats", "`mse`: KL, nats", "`mse` minus `absmax`"], rows)


# Static scales of logits

_V2 = "smollm2-135m-diff-v2"


def logits_kl(scheme: str, name: str = "smollm2-static-logits") -> float:
    """KL of SmolLM2's DIFF V2 with low-bit logits, in nats."""
    return float(measured(name, _V2, scheme).details["kl"])


CLIPPED_LOGITS = logits_kl("4:static", "smollm2-static-logits/mse-4bit")


def logits_table() -> str:
    """Static, dynamic per head and per row."""
    rows = [
        [f"{bits} bits", *(f"{logits_kl(f'{bits}:{each}'):.2g}" for each in ("static", "head", "row"))]
        for bits in (8, 6, 4)
    ]
    return table(["logits, KL in nats", "static, `absmax`", "dynamic per head", "dynamic per row"], rows)


def static_costs() -> list[float]:
    """Shares of KL that static ranges cost more than dynamic ones per head."""
    return [logits_kl(f"{bits}:static") / logits_kl(f"{bits}:head") - 1 for bits in (8, 6, 4)]


def _clipped_shares(name: str) -> list[float]:
    content = raw(f"smollm2-static-logits/{name}.json")
    fits = content["fits"] if isinstance(content, dict) else content
    return [each["clipped"] for each in fits]


LEAST_CLIPPED = 1e6 * max(_clipped_shares("calibrate-absmax"))
_OF_MSE = _clipped_shares("mse-4bit/calibrate-mse-4bit")
MOST_CLIPPED = sum(_OF_MSE) / len(_OF_MSE)
CLIPPED_LOGITS_WIN = logits_kl("4:head") > CLIPPED_LOGITS
