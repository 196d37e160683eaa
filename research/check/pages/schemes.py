"""The figures of docs/schemes.md and docs/kv-cache.md: which bits and which cache, and what they cost."""

from itertools import pairwise

from research.check.numbers import Expected
from research.check.page import Page, Unmeasured
from research.check.pages.kv import BEST, DECODED, SMOLLM2
from research.check.raw import raw, recorded

PAGE, CACHE = Page("docs/schemes.md", is_guide=True), Page("docs/kv-cache.md", is_guide=True)
PAGES = [PAGE, CACHE]
PAGE.table("you want | options | what you get", Unmeasured("options, and what they mean"))
PAGE.table("granularity | one scale per", Unmeasured("definitions"))
PAGE.table("target | what is rounded | one scale per", Unmeasured("definitions"))
PAGE.table("`--like` | is | not in it", Unmeasured("definitions"))
PAGE.table("format | elements | scale | bits | weights open elsewhere as", Unmeasured("definitions"))
PAGE.leaves("40,960 blocks that 512 tokens have", "a count, which tests/model/test_float_caches.py asserts")
PAGE.leaves("**Blocks of 128 × 128**", "DeepSeek's layout")
PAGE.leaves(
    "from a mantissa of 1.75 (mxfp6: 1.9375)", "compressed-tensors' rule, which tests/numbers/test_floats.py holds"
)
PAGE.leaves("4.5 stored bits per weight", "arithmetic: a scale of 16 bits for 32 codes of 4")
PAGE.leaves(
    "The bpw are 16, 8.5 (`8:g32`), 6.5 (`6:g32`), 4.5 (`4:g32`) and 4.13 (`4:g128`)",
    "arithmetic: a scale of 16 bits for 32 or 128 codes",
)
PAGE.leaves("take 5.0 bpw at `4:g32`", "arithmetic: a scale of 32 bits for 32 codes of 4")

_SIZES = [line.split() for line in recorded("diffquant inspect") if " MB" in line]
PAGE.says(
    "SmolLM2-135M's DIFF V2 goes from {} MB to {} MB",
    *(next(float(size[1]) for size in _SIZES if size[0] == width) for width in ("16:", "4:g32:")),
)
_MOTIF = raw("quantize-motif-2-12.7b.json")
PAGE.says("goes from {} GB to {} GB at `4:g128`", _MOTIF["source_bytes"] / 1e9, _MOTIF["output_bytes"] / 1e9)

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


def _share(row: str) -> float:
    return float(SMOLLM2["results"][_CACHES[row]]["bytes_long"]) / _FULL


def _cached(row: str, column: str) -> list[Expected]:
    if column == "of 16 bits":
        return [100 * _share(row)]
    return [1000 * _MODELS[column]["results"][_CACHES[row]]["prose"]["kl"]]


PAGE.table("options | stored bits | KL, nats | on another text | seconds", _rounded)
PAGE.says("`gptq` and `tuned` read {} tokens", _ROUNDED["settings"]["tokens"])
PAGE.says(
    "At 4.5 bits AutoRound has {}, HQQ {} and bitsandbytes nf4 {}",
    *(
        _ROUNDED["results"][peer]["kl"]
        for peer in ("AutoRound 4 bits, groups of 32", "HQQ 4 bits, groups of 64", "bitsandbytes nf4, blocks of 64")
    ),
)
PAGE.leaves("At 4.5 bits AutoRound", "arithmetic: 4 + 16 / 32")

CACHE.table(f"options | of 16 bits | {' | '.join(_MODELS)}", _cached)
CACHE.says("in windows of {} tokens for SmolLM2-135M", SMOLLM2["settings"]["window"])
CACHE.says("of {} for the small [English models of one rate]", DECODED["prose-diff-v1"]["settings"]["window"])
CACHE.says(
    "{} kB per token, {} MB for 4,096 tokens, and {} MB of them with `kv-4bit-best`",
    _FULL / 1e3,
    4096 * _FULL / 1e6,
    4096 * _FULL * _share("--preset kv-4bit-best") / 1e6,
)
CACHE.says("Plain `--kv 4` has a KL of {} on SmolLM2", _cached("--kv 4", "SmolLM2-135M")[0])
CACHE.means(
    "at about the size of the third row",
    abs(_share("--kv 4") - _share("--k 4:c32 --v 4:row:rotated")) < 0.01,
)
CACHE.means(
    "**3 bits** lose several times what 4 do",
    all(
        3 * _cached("--k 4:c32 --v 4:row:rotated", model)[0] < _cached("--k 3:c32 --v 3:row:rotated", model)[0]
        for model in _MODELS
    ),
)


def _times_less(model: str) -> dict[str, float]:
    """By what factor each part of the preset divides KL on the prose, added one after another to a scale per token."""
    steps = ("4:row, 4:row", "4:c32, 4:row", "4:c32, 4:row:rotated", BEST)
    kl = [_MODELS[model]["results"][cache]["prose"]["kl"] for cache in steps]
    return dict(zip(("keys", "rotation", "newest"), (a / b for a, b in pairwise(kl)), strict=True))


_HELPS = {model: max(found, key=found.__getitem__) for model in _MODELS for found in [_times_less(model)]}
CACHE.means(
    "In short windows those 64\n  help the small models most, and the keys' scales SmolLM2",
    _HELPS.pop("SmolLM2-135M") == "keys" and {*_HELPS.values()} == {"newest"},
)
CACHE.table("`--observer` | the range is | take it", Unmeasured("choices"))
for _text in ("cache of 4,096 tokens", "In contexts of 4,096 tokens", "MB for 4,096 tokens"):
    CACHE.leaves(_text, "a length")
