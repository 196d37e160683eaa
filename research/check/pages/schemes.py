"""The figures of docs/schemes.md: which rounding and which cache, and what they cost."""

from research.check.numbers import Expected
from research.check.page import Page, Unmeasured
from research.check.pages.kv import BEST, DECODED, SMOLLM2
from research.check.raw import raw

PAGE = Page("docs/schemes.md", is_guide=True)
PAGE.table("you want | options | what you get", lambda *_: Unmeasured("options, and what they mean"))
PAGE.leaves("is 4.5 stored bits", "arithmetic: a scale of 16 bits for 32 codes of 4")

_ROUNDED = raw("rounding/smollm2-135m-windows.json")
_CACHES = {
    "--kv 8": "8:row, 8:row",
    "--preset kv-4bit-best": BEST,
    "--k 4:c32 --v 4:row:rotated": "4:c32, 4:row:rotated",
    "--k 3:c32 --v 3:row:rotated": "3:c32, 3:row:rotated",
    "--kv 4": "4:row, 4:row",
}
_MODELS = {
    "SmolLM2-135M": SMOLLM2,
    "small DIFF V1": DECODED["prose-diff-v1"],
    "small DIFF V2": DECODED["prose-diff-v2"],
    "small Transformer": DECODED["prose-transformer"],
}
# Bytes of a token at 16 bits: 30 layers, K and V of 3 heads of 64.
_FULL = 30 * 2 * 3 * 64 * 2


def _rounded(row: str, column: str) -> list[Expected]:
    _, scheme, *rounding = row.split()
    result = _ROUNDED["results"][f"{rounding[-1] if rounding else 'nearest'} {scheme}"]
    return [
        {
            "stored bits": result["bits"],
            "KL, nats": result["kl"],
            "on another text": result["elsewhere"]["kl"],
            "seconds": result["cpu_seconds"],
        }[column]
    ]


def _cached(row: str, column: str) -> list[Expected]:
    name = _CACHES[row]
    if column == "of 16 bits":
        return [100 * SMOLLM2["results"][name]["bytes_long"] / _FULL]
    return [1000 * _MODELS[column]["results"][name]["prose"]["kl"]]


PAGE.table("options | stored bits | KL, nats | on another text | seconds", _rounded)
PAGE.says("`gptq` and `tuned` read {} tokens", _ROUNDED["settings"]["tokens"])
PAGE.table(f"options | of 16 bits | {' | '.join(_MODELS)}", _cached)
PAGE.says("in windows of {} tokens for SmolLM2-135M", SMOLLM2["settings"]["window"])
PAGE.says("of {} for the small English models", DECODED["prose-diff-v1"]["settings"]["window"])
for _text in ("cache of 4,096\ntokens", "In contexts of 4,096 tokens"):
    PAGE.leaves(_text, "a length")
