"""The figures of docs/outliers.md."""

import re

from diffquant.calib.analysis.outlier_outputs import outlier_table
from diffquant.calib.calibration.fit import Fit, fit_table
from diffquant.sweep.table import text_table
from studies.results import read_outliers
from tests.docs.numbers import Expected
from tests.docs.page import RESULTS, Page, Unmeasured
from tests.docs.raw import measured, raw, sweep

PAGE = Page("docs/outliers.md")
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
    "`verify` improves by {} % with calibrated absmax scales",
    100
    * (
        1
        - _number("export-absmax.txt", "prefill", r"error (\S+)")
        / _number("export-builtin.txt", "prefill", r"error (\S+)")
    ),
)
PAGE.says(
    "at 4 bits it is {} in prefill and {} in the padded batch",
    _number("export-builtin-4bit.txt", "prefill", r"error (\S+)"),
    _number("export-builtin-4bit.txt", "padded batch", r"error (\S+)"),
)


def _sqnr(file: str, target: str) -> float:
    values = [fit.sqnr for fit in fits(f"{KV}/{file}") if fit.target == target]
    return sum(values) / len(values)


PAGE.says(
    "of K is {} dB with absmax and {} dB with `mse`, of V {} and {} dB",
    *(_sqnr(f"calibrate-{observer}.json", target) for target in "kv" for observer in ("absmax", "mse")),
)
_FULL = raw(f"{KV}/16-bits.json")["perplexity"]["perplexity"]
_ABSMAX4, _MSE4 = (
    _number(f"export-{name}-4bit.txt", "perplexity", r"perplexity ([\d.]+),") for name in ("builtin", "mse")
)
PAGE.says("clipping wins back {} of the {} points", _ABSMAX4 - _MSE4, _ABSMAX4 - _FULL)

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
PAGE.says("A scale a row has {} to {} times less KL than either", _OVER_ROW[0], _OVER_ROW[-1])
_CLIPPED = measured(CLIPPED, MODEL, "4:static").details
_LEFT_OUT = [fit.clipped for fit in fits(f"{CLIPPED}/calibrate-mse-4bit.json")]
PAGE.says("leave out {} % of logits", 100 * sum(_LEFT_OUT) / len(_LEFT_OUT))
PAGE.says(
    "bring KL from {} to {} nats and perplexity from {} to {}: better than dynamic scales a head ({} and {})",
    _kl("4:static"),
    _CLIPPED["kl"],
    measured(STATIC, MODEL, "4:static").details["perplexity"],
    _CLIPPED["perplexity"],
    _kl("4:head"),
    measured(STATIC, MODEL, "4:head").details["perplexity"],
)
PAGE.leaves("perplexity over 16,384 characters", "a setting")
