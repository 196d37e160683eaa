"""Figures measured on an H100, of the page on speed, and what was compiled for cards without one."""

from collections import Counter
from statistics import median
from typing import Any

from research.pages.raw import raw
from research.pages.render import fixed, table

_H100 = raw("h100/ratios.json")
_GROUPS = {group["group"]: group for group in _H100["groups"]}
_LONG, _OF_V2, _ROUNDED = "prefill V1, 16384 tokens", "prefill V2", "simulated logits"
_DECODE, _PAGES = "decode V1, context 16K, batch 8, float16, CUDA graphs", "decode V1 from pages"
_LINEAR = "linear 3072 -> 8192"
_FUSED, _TWO, _CACHE = "DIFF, fused", "FlashDiffAttn_1, SDPA cuDNN", "DIFF, fused, 16-bit cache"
H100 = {
    "fused fp16 prefill of V1, 16K": (_LONG, _FUSED, _TWO, "two cuDNN calls"),
    "the same, d = 64, 8K": ("prefill V1, d 64", _FUSED, _TWO, "two cuDNN calls"),
    "fused prefill of V2, 8K": (_OF_V2, _FUSED, "FlashDiffAttn_1", "`flashdiff1`, one SDPA call"),
    "simulated logits 8:row, 8K": (_ROUNDED, "DIFF, simulated logits 8:row", _FUSED, "fused fp16"),
    "decoding from a 4-bit cache, 8 × 16K": (_DECODE, "DIFF, fused, 4-bit cache", _CACHE, "16-bit cache"),
    "the same": (_DECODE, "DIFF, fused, 4-bit cache", "Transformer, SDPA flash", "the Transformer, FlashAttention-2"),
    "decoding from 16-bit pages, 8 × 16K": (_PAGES, "16-bit pages", _CACHE, "16-bit cache"),
    "4-bit linear layer, 1 token": (
        f"{_LINEAR}, 1 token, float16, CUDA graphs",
        "packed, 4 bits",
        "dense",
        "dense fp16",
    ),
    "4-bit linear layer, 16 tokens": (f"{_LINEAR}, 16 tokens", "packed, 4 bits", "dense", "dense fp16"),
    "4-bit linear layer, 64 tokens": (f"{_LINEAR}, 64 tokens", "packed, 4 bits", "dense", "dense fp16"),
}


def group(begins: str) -> dict[str, Any]:
    """The group with that name, or the first whose name begins so."""
    return _GROUPS.get(begins) or next(entry for name, entry in _GROUPS.items() if name.startswith(begins))


def milliseconds(of_group: str, path: str) -> float:
    """Median over the runs of a path's medians."""
    return median(cell["median"] for cells in group(of_group)["runs"] for cell in cells if cell["path"] == path)


def times_as_fast(row: str) -> float:
    """How many times as fast a row's path is as what it is compared with."""
    of_group, path, other, _ = H100[row]
    return milliseconds(of_group, other) / milliseconds(of_group, path)


def h100_table() -> str:
    """Ratios on the card."""
    return table(["path", "against", "times as fast"], [[row, H100[row][3], fixed(times_as_fast(row))] for row in H100])


V2_PREFILL_IS_SLOWER = times_as_fast("fused prefill of V2, 8K") < 1
FEW_TOKENS_ONLY = times_as_fast("4-bit linear layer, 1 token") > 1 > times_as_fast("4-bit linear layer, 16 tokens")


def peak_bytes(of_group: str, path: str) -> float:
    """Peak memory of a path."""
    return float(next(cell["peak_bytes"] for cell in group(of_group)["runs"][0] if cell["path"] == path))


def rounding_error(path: str) -> float:
    """Error of 8-bit attention on random tensors."""
    runs = next(entry["runs"] for entry in _H100["groups"] if entry["group"].endswith(": 8 bits"))
    return float(next(cell["error"] for run in runs for cell in run if cell["path"] == path and "error" in cell))


_TESTED = [entry["tests"] for entry in raw("h100/tests.json")["runs"]]
_LAST = {test: outcome for tests in _TESTED for test, (outcome, *_) in tests.items()}
OUTCOMES = Counter(_LAST.values())
OLDER_ONLY = len(_TESTED[0].keys() - _TESTED[1].keys())
CALLS = raw("compiled-kernels.json")["compiled"]
ON_PTX = [len(run["tests"]) for run in raw("ptx-runs.json")["runs"].values()]
MEMORY_OF_4_BITS = milliseconds("attention state", "16-bit state") / milliseconds("attention state", "4-bit state")
