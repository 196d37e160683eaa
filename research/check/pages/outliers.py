"""The figures of research/pages/outliers.md."""

import math
import re
from typing import Any

from diffquant.calib.analysis.outlier_outputs import outlier_table
from diffquant.calib.analysis.outlier_result import read_outliers
from diffquant.calib.calibration.fit import Fit, fit_table
from diffquant.evals.stats import mean_interval, paired_difference
from diffquant.sweep.table import text_table
from research.check.numbers import Expected
from research.check.page import RESULTS, Page, Unmeasured
from research.check.pages import kv
from research.check.raw import measured, raw, sweep

PAGE = Page("research/pages/outliers.md")
OUTLIERS = read_outliers(RESULTS / "smollm2-outliers/outliers.json")
KV = "smollm2-kv-scales"
STATIC, CLIPPED = "smollm2-static-logits", "smollm2-static-logits/mse-4bit"
MODEL = "smollm2-135m-diff-v2"


def fits(file: str) -> list[Fit]:
    content = raw(file)
    return [Fit(**each) for each in (content["fits"] if isinstance(content, dict) else content)]


PAGE.shows("diffquant outliers", lambda: outlier_table(OUTLIERS).splitlines())
PAGE.shows(
    "diffquant calibrate smollm2-135m-diff-v2 -o scales.safetensors",
    lambda: [
        *fit_table(fits(f"{KV}/calibrate-absmax.json"), 8).splitlines(),
        "at 8 bits, on the text held out",
        "wrote scales.safetensors",
    ],
)
PAGE.shows("diffquant export", list)
PAGE.shows("python -c", list)
PAGE.shows("diffquant calibrate smollm2-135m-diff-v2 -o absmax.safetensors", list)
PAGE.shows("diffquant sweep", lambda: text_table(sweep(STATIC)).splitlines())

_SMOL = OUTLIERS.models[0]
_HIDDEN, _LOGITS = (_SMOL.overall[kind] for kind in ("hidden", "logits"))
PAGE.says(
    "one layer, 11, writes hidden states of {} that stay in the residual stream to layer 27, {} times the median",
    _HIDDEN.top[1],
    _HIDDEN.top[1] / _HIDDEN.median,
)
PAGE.says("their largest, {} in layer 18, is {} times the median", _LOGITS.top[1], _LOGITS.top[1] / _LOGITS.median)
PAGE.leaves("an error of at most 0.4 %", "the histogram's bins: 2^(1/128) - 1 over two")

# Static scales of the cache

_RUNS = {
    "8 bits, the export's own run, absmax": "export-builtin.txt",
    "8 bits, `calibrate --observer absmax`": "export-absmax.txt",
    "8 bits, `calibrate --observer mse`": "export-mse.txt",
    "4 bits, the export's own run, absmax": "export-builtin-4bit.txt",
    "4 bits, `calibrate --observer mse --bits 4`": "export-mse-4bit.txt",
}


def _line(file: str, start: str) -> str:
    return next(line for line in (RESULTS / KV / file).read_text().splitlines() if line.startswith(start))


def _number(file: str, start: str, pattern: str) -> float:
    found = re.search(pattern, _line(file, start))
    if found is None:
        raise LookupError(f"{file} has no {pattern} in its line {start}")
    return float(found.group(1))


def _static(row: str, column: str) -> list[Expected] | Unmeasured:
    if column == "found on":
        return Unmeasured("tokens asked for")
    file = {key.replace("`", ""): value for key, value in _RUNS.items()}[row]
    if column == "perplexity":
        return [_number(file, "perplexity", r"perplexity ([\d.]+),")]
    if column == "same token":
        return [_number(file, "prefill", r"same token ([\d.]+)%")]
    start = "prefill" if "prefill" in column else "padded batch"
    return [_number(file, start, r"error (\S+)")]


PAGE.table("cache | scales | found on | `verify`, prefill | padded batch | same token | perplexity", _static, names=2)
PAGE.says("{} with a 16-bit cache", raw(f"{KV}/16-bits.json")["perplexity"]["perplexity"])
PAGE.says(
    "at 4 bits it is {} in prefill and {} in the padded batch",
    _number("export-builtin-4bit.txt", "prefill", r"error (\S+)"),
    _number("export-builtin-4bit.txt", "padded batch", r"error (\S+)"),
)
_FULL = raw(f"{KV}/16-bits.json")["perplexity"]["perplexity"]
_ABSMAX4, _MSE4 = (
    _number(f"export-{name}-4bit.txt", "perplexity", r"perplexity ([\d.]+),") for name in ("builtin", "mse")
)
POINTS_BEFORE = _ABSMAX4 - _MSE4
PAGE.says(
    "clipping wins back {} of the {} points that a 4-bit cache costs. But `calibrate` had seen the first 3,072 of the "
    "{} tokens that were scored",
    POINTS_BEFORE,
    _ABSMAX4 - _FULL,
    raw(f"{KV}/16-bits.json")["perplexity"]["tokens"],
)
PAGE.leaves("the first 3,072 of the", "what `--tokens 6144` observes, a half of it")

# The same held out

HELD_OUT = raw(f"{KV}/held-out.json")
USUAL = "6 windows, one a passage"


def _cache(bits: int, observer: str = "", found_on: str = "") -> dict[str, Any]:
    """The row of one configuration of the cache; without an observer, that of a scale a token and head."""
    key = {"bits": bits, "observer": observer, "calibrated_on": found_on}
    return next(row for row in HELD_OUT["rows"] if key.items() <= row.items())


def _perplexity(row: dict[str, Any]) -> float:
    return math.exp(mean_interval(row["nll"]).mean)


def _less(row: dict[str, Any], other: dict[str, Any]) -> list[Expected]:
    change = paired_difference(row["kl"], other["kl"])
    return [change.mean, change.low, change.high]


def _off(bits: int, found_on: str) -> float:
    """The change of KL by clipping, on the same tokens, in percent."""
    clipped, whole = (mean_interval(_cache(bits, name, found_on)["kl"]).mean for name in ("mse", "absmax"))
    return 100 * (clipped / whole - 1)


def _held_out(row: str, column: str) -> list[Expected]:
    width, scales, found_on = row.split(", ", 2)
    bits, observer = int(width[0]), ""
    if scales == "static":
        observer, found_on = found_on.split(", ", 1)
    if column == "tokens":
        return [len(HELD_OUT["calibrations"][found_on]) * HELD_OUT["window"]]
    cell = _cache(bits, observer, found_on.removeprefix("-"))
    if column == "perplexity":
        return [_perplexity(cell)]
    if column == "KL, nats":
        kl = mean_interval(cell["kl"])
        return [kl.mean, kl.low, kl.high]
    # A share of a difference that cannot be told is left out.
    share = [_off(bits, found_on)] if bits == 4 else []
    return [*_less(cell, _cache(bits, "absmax", found_on)), *share]


PAGE.table("cache | scales | found on | tokens | KL, nats | `mse` less `absmax` | perplexity", _held_out, names=3)
_16_BITS = _perplexity(HELD_OUT["16 bits"])
PAGE.says("whose perplexity here is {};", _16_BITS)
OFF = sorted(-_off(4, found_on) for found_on in HELD_OUT["calibrations"])
PAGE.says("clipping takes {} to {} % off the KL of the cache", OFF[0], OFF[-1])
_CLIPPED4, _WHOLE4, _OWN4 = _cache(4, "mse", USUAL), _cache(4, "absmax", USUAL), _cache(4)
PAGE.says(
    "wins back {} of the {} points of perplexity that the cache costs",
    _perplexity(_WHOLE4) - _perplexity(_CLIPPED4),
    _perplexity(_WHOLE4) - _16_BITS,
)
PAGE.says("one scale per token and head ({} [{}, {}]), unclipped ones more", *_less(_CLIPPED4, _OWN4))
PAGE.means("unclipped ones more", paired_difference(_WHOLE4["kl"], _OWN4["kl"]).low > 0)
_FEWER, _SEEN, _OTHER_TEXT, _MORE = (
    "2 of the 6",
    "6 of the 8 that are scored",
    "6 windows of one passage",
    "24 windows of these passages",
)


def _is_told(observer: str, found_on: str) -> bool:
    """Whether where the ranges are found makes a difference whose interval excludes 0."""
    change = paired_difference(_cache(4, observer, found_on)["kl"], _cache(4, observer, USUAL)["kl"])
    return change.low > 0 or change.high < 0


PAGE.says(
    "Fewer tokens help `absmax` ({} instead of {}: {} [{}, {}])",
    *(len(HELD_OUT["calibrations"][name]) * HELD_OUT["window"] for name in (_FEWER, USUAL)),
    *_less(_cache(4, "absmax", _FEWER), _WHOLE4),
)
PAGE.says("so does calibrating on what is scored ({} [{}, {}])", *_less(_cache(4, "absmax", _SEEN), _WHOLE4))
PAGE.means(
    "the text makes no measurable difference", not any(_is_told(name, _OTHER_TEXT) for name in ("absmax", "mse"))
)
PAGE.means("neither changes `mse` measurably", not any(_is_told("mse", name) for name in (_FEWER, _SEEN)))
_AT_8 = paired_difference(_cache(8, "mse", USUAL)["kl"], _cache(8, "absmax", USUAL)["kl"])
_PRESET = kv.SMOLLM2["results"][kv.BEST]["prose"]["kl"]
PAGE.says("stay at 16 bits, has a KL of {} nats, in windows of {} tokens", _PRESET, kv.SMOLLM2["settings"]["window"])
PAGE.means(
    "4 bits with such scales are a poor choice for this model",
    all(mean_interval(row["kl"]).mean > 10 * _PRESET for row in HELD_OUT["rows"] if row["bits"] == 4),
)
PAGE.means("At 8 bits clipping changes nothing", _AT_8.low < 0 < _AT_8.high)
PAGE.leaves("intervals are 95 %, Student's over the eight passages", "a level")

# Static scales of logits


def _kl(scheme: str) -> float:
    return float(measured(STATIC, MODEL, scheme).details["kl"])


_OVER_HEAD = [100 * (_kl(f"{bits}:static") / _kl(f"{bits}:head") - 1) for bits in (8, 6, 4)]
PAGE.says("found on {} tokens of one half of the text, costs {} to {} % more KL", 2048, *sorted(_OVER_HEAD)[::2])
PAGE.says(
    "at most {} of a million logits of any layer lie beyond their range",
    1e6 * max(fit.clipped for fit in fits(f"{STATIC}/calibrate-absmax.json")),
)
_OVER_ROW = sorted(_kl(f"{bits}:{other}") / _kl(f"{bits}:row") for bits in (8, 6, 4) for other in ("static", "head"))
PAGE.says("One scale per row has {} to {} times less KL than either", _OVER_ROW[0], _OVER_ROW[-1])
_CLIPPED = measured(CLIPPED, MODEL, "4:static").details
_LEFT_OUT = [fit.clipped for fit in fits(f"{CLIPPED}/calibrate-mse-4bit.json")]
PAGE.says("leave out {} % of logits", 100 * sum(_LEFT_OUT) / len(_LEFT_OUT))
PAGE.says(
    "bring KL from {} to {} nats and perplexity from {} to {}. That is better than one dynamic scale per head "
    "({} and {})",
    _kl("4:static"),
    _CLIPPED["kl"],
    measured(STATIC, MODEL, "4:static").details["perplexity"],
    _CLIPPED["perplexity"],
    _kl("4:head"),
    measured(STATIC, MODEL, "4:head").details["perplexity"],
)
PAGE.leaves("perplexity over 16,384 characters", "a setting")
