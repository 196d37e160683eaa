"""The figures of docs/quantize.md."""

from statistics import median

from research.check.page import Page
from research.check.raw import medians, raw, recorded

PAGE = Page(
    "docs/quantize.md",
    guides=("Recipes", "From Python", "What a quantized folder is", "Sources", "Convert and inspect"),
)
PAGE.shows("diffquant inspect", lambda: recorded("diffquant inspect"))

# Opening, quantizing, writing

_OPENING = raw("opening.json")
PAGE.says(
    "reading all of SmolLM2's took {} s where transformers' loader took {} s in the same run (medians of {}; a ratio "
    "of {})",
    medians(_OPENING["ours"], "seconds"),
    medians(_OPENING["transformers"], "seconds"),
    len(_OPENING["ours"]),
    medians(_OPENING["transformers"], "seconds") / medians(_OPENING["ours"], "seconds"),
)
_SIX_GB = raw("quantize-6gb.json")
PAGE.says(
    "A {} GB checkpoint took {} s ({} s from start to exit, one run) on {} cores and {} MB beyond the mapped "
    "files, {} MB of which are imports; with the mapped files the process held {} GB at most",
    _SIX_GB["source_bytes"] / 1e9,
    _SIX_GB["whole"]["seconds"],
    _SIX_GB["whole"]["process_seconds"],
    _SIX_GB["environment"]["cores"],
    _SIX_GB["whole"]["peak_anonymous"] / 1e6,
    _SIX_GB["anonymous_bytes_of_imports"] / 1e6,
    _SIX_GB["whole"]["peak_resident"] / 1e9,
)

_MOTIF = raw("quantize-motif-2-12.7b.json")
PAGE.says(
    "{} GB in {} files, took {} s at 4:g128 and {} MB beyond the mapped files, {} MB of which are imports; killed "
    "after {} s it was resumed in {} s",
    _MOTIF["source_bytes"] / 1e9,
    _MOTIF["source_files"],
    _MOTIF["whole"]["seconds"],
    _MOTIF["whole"]["peak_anonymous"] / 1e6,
    _MOTIF["anonymous_bytes_of_imports"] / 1e6,
    _MOTIF["killed"]["process_seconds"],
    _MOTIF["resumed"]["seconds"],
)
PAGE.means("with the same bytes", _MOTIF["byte_identical"])
_PEERS = raw("quantize-peers.json")
_OURS, _TORCHAO = (median(_PEERS["turns"][name]["seconds"]) for name in ("diffquant quantize", "torchao in memory"))

PAGE.says(
    "`quantize` from file to file took {} s against {} s, on two cores and {} GB of bfloat16 (medians of {} turns "
    "each)",
    _OURS,
    _TORCHAO,
    _PEERS["source_bytes"] / 1e9,
    len(_PEERS["turns"]["torchao in memory"]["seconds"]),
)
PAGE.says("it was {} times as fast for each byte that is packed", _TORCHAO / _OURS)
PAGE.means("That was an AMD EPYC", "AMD EPYC" in _PEERS["environment"]["cpu"])
_BEFORE = raw("quantize-peers-2026-11-22.json")
PAGE.says(
    "on a Xeon the day before, it was {} times as fast",
    median(_BEFORE["turns"]["torchao in memory"]["seconds"])
    / median(_BEFORE["turns"]["diffquant quantize"]["seconds"]),
)
_STARTS = {name: medians(turns, "seconds") for name, turns in raw("inspect-motif-2-12.7b.json")["turns"].items()}
PAGE.says(
    "answers in {} s, {} times as long as importing torch alone",
    _STARTS["diffquant inspect"],
    raw("inspect-motif-2-12.7b.json")["ratio"],
)

# Rounding

_ROUNDING = raw("rounding/smollm2-135m-windows.json")["results"]


def _kl(name: str) -> float:
    return float(_ROUNDING[name]["kl"])


PAGE.says(
    "falls from {} nats (nearest) to {} (mse), {} (gptq) and {} (tuned); at the same bits AutoRound has {}, HQQ {} and "
    "bitsandbytes nf4 {}",
    _kl("nearest 4:g32"),
    _kl("mse 4:g32"),
    _kl("gptq 4:g32"),
    _kl("tuned 4:g32"),
    _kl("AutoRound 4 bits, groups of 32"),
    _kl("HQQ 4 bits, groups of 64"),
    _kl("bitsandbytes nf4, blocks of 64"),
)
_TIMED, _TIMED_ELSEWHERE = raw("quantize-roundings.json"), raw("quantize-roundings-8192-tokens.json")
PAGE.says(
    "on the {} cores of an AMD EPYC with AVX-512, `gptq` took {} s and {} GB beyond the mapped files, and `tuned` {} s "
    "and {} GB (one run each)",
    _TIMED["environment"]["cores"],
    *(
        value
        for name in ("gptq", "tuned")
        for value in (
            _TIMED["roundings"][name]["process_seconds"],
            _TIMED["roundings"][name]["peak_anonymous"] / 1e9,
        )
    ),
)
PAGE.means("cores of an AMD EPYC with AVX-512", _TIMED["environment"]["cpu"] == "AMD EPYC")
PAGE.says("`tuned` took {} s on one without AVX-512", _TIMED_ELSEWHERE["roundings"]["tuned"]["process_seconds"])
PAGE.leaves("Over half the text, 8,192 tokens", "a setting")
PAGE.leaves("4.5 stored bits with their 16-bit scales", "arithmetic: 4 + 16 / 32")
PAGE.leaves("Scales take 16\nbits", "a format")

# Search

_SEARCH = raw("smollm2-search/search-4.5-bits.json")["candidates"]
PAGE.says(
    "DIFF V2 at {} stored bits, KL on held-out text is {} nats; uniform widths, interpolated, have {}",
    # The file counts codes; scales in groups of 32 take 16 bits each.
    _SEARCH[0]["bits"]["weights"] + 16 / 32,
    _SEARCH[0]["kl"],
    (_SEARCH[2]["kl"] * _SEARCH[3]["kl"]) ** 0.5,
)
