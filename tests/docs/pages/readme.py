"""The figures of README.md."""

from statistics import median

from diffquant.sweep.table import text_table
from tests.docs.page import Page, Unmeasured
from tests.docs.raw import difference, measured, medians, points, raw, sweep

GGUF, V2, V1 = "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-diff-v2", "diffllama-1b"
PAGE = Page("README.md")

# `python -m studies.transcripts` records them; `lambda: recorded(f"diffquant {verb}")` then takes the place of this.
_TYPED = Unmeasured("typed from a terminal: its sizes, times and texts are in no raw file")

for verb in ("quantize", "generate", "convert", "inspect"):
    PAGE.shows(f"diffquant {verb}", _TYPED)
PAGE.shows(
    "diffquant sweep SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m-diff-v2 -o logits",
    lambda: text_table(sweep("smollm2-logits-500")).splitlines(),
)
PAGE.shows(
    "diffquant sweep SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m-diff-v2 smollm2-onnx",
    lambda: text_table(sweep("smollm2-onnx-500", (("smollm2-onnx", GGUF), ("smollm2-diff-v2-onnx", V2)))).splitlines(),
)

# Opening, quantizing, writing

_OPENING = raw("opening.json")
PAGE.says(
    "reading all of SmolLM2's took {} s where transformers' loader took {} s in the same run (medians of {}; a ratio "
    "of {})",
    medians(_OPENING["ours"], "seconds"),
    medians(_OPENING["transformers"], "seconds"),
    len(_OPENING["ours"]),
    _OPENING["ratio"],
)
_SIX_GB = raw("quantize-6gb.json")
PAGE.says(
    "a {} GB checkpoint took {} s ({} s from start to exit, one run) on {} cores and {} MB beyond the mapped "
    "files, {} MB of which are imports; with the mapped files the process held {} GB at most",
    _SIX_GB["source_bytes"] / 1e9,
    _SIX_GB["whole"]["seconds"],
    _SIX_GB["whole"]["process_seconds"],
    _SIX_GB["environment"]["cores"],
    _SIX_GB["whole"]["peak_anonymous"] / 1e6,
    _SIX_GB["anonymous_bytes_of_imports"] / 1e6,
    _SIX_GB["whole"]["peak_resident"] / 1e9,
)

# Rounding

_ROUNDING = raw("rounding/smollm2-135m.json")["results"]


def _kl(name: str) -> float:
    return float(_ROUNDING[name]["kl"])


PAGE.says(
    "falls from {} nats (nearest) to {} (mse) and {} (gptq); HQQ has {} at the same bits and bitsandbytes nf4 {}",
    _kl("nearest 4:g32"),
    _kl("mse 4:g32"),
    _kl("gptq 4:g32"),
    _kl("HQQ 4 bits, groups of 64"),
    _kl("bitsandbytes nf4, blocks of 64"),
)
PAGE.leaves("4.5 stored bits with their 16-bit scales", "arithmetic: 4 + 16 / 32")
PAGE.leaves("Scales take 16\nbits", "a format")

# Sweeps

_AT_3_ROW, _AT_3_TENSOR = (difference("smollm2-logits-500", GGUF, f"3:{g}") for g in ("row", "tensor"))
PAGE.says(
    "at 3 bits one scale a row loses {} points and one a tensor {} [{}, {}]",
    *(-x for x in (points(_AT_3_ROW)[0], points(_AT_3_TENSOR)[0])),
    *(-x for x in reversed(points(_AT_3_TENSOR)[1:])),
)
PAGE.says(
    "3 bits with one scale a tensor lose {} points [{}, {}], and with `shift` gain {} [{}, {}]",
    -points(_AT_3_TENSOR)[0],
    *(-x for x in reversed(points(_AT_3_TENSOR)[1:])),
    *points(difference("smollm2-logits-500-shift", GGUF, "3:tensor:shift")),
)
_FIRST, _SECOND = (measured(f"smollm2-{name}-500", GGUF, "16").score for name in ("logits", "onnx"))
PAGE.says("Its {} bits are {} % where the first sweep has {} %", 16, 100 * _SECOND, 100 * _FIRST)
PAGE.leaves("Bonett and Price's 95 % interval", "the interval's level")
PAGE.leaves("Bars are 95 % intervals of the difference", "the interval's level")
PAGE.table(
    "logits | 8 bits | 6 bits | 4 bits | 3 bits",
    lambda row, head: [measured("smollm2-logits-kl", GGUF, f"{head[0]}:{row}").details["kl"]],
)
PAGE.says(
    "SmolLM2-135M on {} characters of prose (perplexity {} at 16 bits)",
    sweep("smollm2-logits-kl").settings["options"]["characters"],
    measured("smollm2-logits-kl", GGUF, "16").details["perplexity"],
)
PAGE.says(
    "the 8-bit column was up to {} times as large",
    max(
        measured("smollm2-logits-kl-bfloat16", GGUF, f"8:{scheme}").details["kl"]
        / measured("smollm2-logits-kl", GGUF, f"8:{scheme}").details["kl"]
        for scheme in ("tensor", "row", "tensor:shift", "row:shift")
    ),
)
PAGE.says(
    "At 3 bits a row, perplexity is {} with plain absmax and {} with `shift`",
    measured("smollm2-logits-kl", GGUF, "3:row").details["perplexity"],
    measured("smollm2-logits-kl", GGUF, "3:row:shift").details["perplexity"],
)
PAGE.leaves("at most 0.30 of 16 bits at 4,096 tokens", "a bound that tests/model/test_cache.py asserts")

# HellaSwag beside lm-eval


def turns(name: str, dtype: str, batch: int | None = None) -> list[float]:
    """Seconds of each turn."""
    (timing,) = (
        each
        for each in raw("hellaswag-speed.json")["timings"]
        if (each["name"], each["dtype"], each["batch_size"]) == (name, dtype, batch)
    )
    return list(timing["seconds"])


def _times(dtype: str, batch: int, ours: str | None = None) -> float:
    return median(turns("HFLM", dtype, batch)) / median(turns("diffquant", ours or dtype))


PAGE.says(
    "it scored {} times the items a second in float32 and {} times in bfloat16 with HFLM at batch 8, and {} and {} "
    "times at its default batch of 1",
    _times("float32", 8),
    _times("bfloat16", 8),
    _times("float32", 1),
    _times("bfloat16", 1),
)
PAGE.says("HFLM's two in float32 at batch 1 were {} and {} s", *sorted(turns("HFLM", "float32", 1)))
PAGE.says("With each one's defaults it was {} times", _times("float32", 1, ours="bfloat16"))

# Search

_SEARCH = raw("smollm2-search/search-4.5-bits.json")["candidates"]
PAGE.says(
    "DIFF V2 at {} stored bits, KL on held-out text is {} nats; uniform widths, interpolated, have {}",
    # The file counts codes; scales in groups of 32 take 16 bits each.
    _SEARCH[0]["bits"]["weights"] + 16 / 32,
    _SEARCH[0]["kl"],
    (_SEARCH[2]["kl"] * _SEARCH[3]["kl"]) ** 0.5,
)
PAGE.leaves("changes results by about a percent", "never measured: the kernel has run on no GPU")

# The bench


def _throughput(path: str) -> list[float]:
    cells = raw("cpu/bench.json")["cells"]
    return sorted(cell["ratio"] for cell in cells if (cell["section"], cell["path"]) == ("throughput", path))


PAGE.says(
    "runs at {} to {} of the Transformer's throughput as DIFF V1 and {} to {} as DIFF V2",
    *_throughput("DIFF V1"),
    *_throughput("DIFF V2"),
)

# Generation in ONNX Runtime

_ROWS = {
    "torch float32 (DiffTransformer)": "torch float32",
    "float32 export": "export float32",
    "4:g32, KV 8, embedding 8": "export 4:g32 kv 8 embed 8",
    "transformers' own export, plain": "transformers export",
    "transformers' own export, fused": "transformers export, fused",
    "transformers' own export, fused, NNCF's 4 bits": "transformers export, fused, 4 bits",
    "llama.cpp, Q4_0": "llama.cpp Q4_0",
}
_COLUMNS = {
    "decode, tokens/s": ("decode_median", 1),
    "× torch float32": ("decode_of_torch", 1),
    "prefill of 1,024, tokens/s": ("prefill_median", 1),
    "folder, share of float32's": ("folder_of_export", 1),
    "peak memory, MB": ("peak_bytes", 1e6),
}


def _generation(row: str, head: str) -> list[float]:
    """Values of the models that the row was measured for; one where all of them are 1."""
    name, unit = _COLUMNS[head]
    rows = [raw("generate.json")["models"][model].get(_ROWS[row], {}) for model in (GGUF, V2, V1)]
    values = [each[name] / unit for each in rows if name in each]
    return values[:1] if set(values) == {1.0} else values


PAGE.table(f" | {' | '.join(_COLUMNS)}", _generation)


def _written(model: str) -> tuple[float, float]:
    """Seconds and megabytes beyond mapped files of writing a model's 4-bit folder."""
    row = raw("generate.json")["models"][model]["export 4:g32 kv 8 embed 8"]
    return row["write_seconds"], row["write_anonymous_bytes"] / 1e6


PAGE.says(
    "Writing the 4-bit folder took {} s and {} MB beyond mapped files for SmolLM2, {} s and {} MB for its V2, {} s "
    "and {} MB for the 1 B model",
    *_written(GGUF),
    *_written(V2),
    *_written(V1),
)
PAGE.says(
    "it decoded slower ({}) than its own float32 ({})",
    *_generation("transformers' own export, fused, NNCF's 4 bits", "decode, tokens/s"),
    *_generation("transformers' own export, fused", "decode, tokens/s"),
)
PAGE.leaves("calibrated on 64 random tokens", "a setting of the program")
PAGE.leaves("malloc hid 59 of 152 of them", "a count over a file that is withdrawn; bench/results/cpu/bench.md has it")


def _kernel(context: int, tokens: int, kv_bits: int) -> tuple[float, float]:
    """Least and largest ratio of the native kernel to the body, in float32 over the layer shapes."""
    ratios = [
        each["ratio"]
        for each in raw("native-op.json")["results"]
        if (each["context"], each["tokens"], each["kv_bits"], each["dtype"]) == (context, tokens, kv_bits, "float32")
    ]
    return min(ratios), max(ratios)


PAGE.says("the kernel is {} to {} times as fast in float32 decode at 4K context", *_kernel(4096, 1, 0))
PAGE.says("{} to {} times in a prefill of 1K", *_kernel(1024, 1024, 0))
PAGE.says("and {} to {} times in decode over an 8-bit cache", *_kernel(4096, 1, 8))

# Not measured

PAGE.leaves("three models of 0.15 M parameters", "a count")
PAGE.leaves("(64×64 tiles)", "a size")
PAGE.leaves("830M to 13.1B", "the paper's sizes")
