"""The figures of research/pages/onnx.md, and of what docs/onnx.md has of them."""

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

from research.check.numbers import ends
from research.check.page import Page, Unmeasured
from research.check.raw import raw

GGUF, V2, V1 = "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-diff-v2", "diffllama-0.6gb"
PAGE, GUIDE = Page("research/pages/onnx.md"), Page("docs/onnx.md", is_guide=True)
PAGES = [PAGE, GUIDE]
GUIDE.table(
    "portable folder | OpenVINO 2026.4.1 | transformers.js 4.3.1 | onnxruntime-web 1.30.0 | onnxruntime-node 1.30.0"
    " | oldest ONNX Runtime",
    Unmeasured("what tests/readers holds, and versions"),
)
GUIDE.leaves("as Netron 9.3.3 shows it", "versions")
GUIDE.leaves("has read since 0.12; 0.18 was tried", "versions")
GUIDE.leaves("the versions tried\nare 1.18.1, 1.20.1, 1.23.2 and 1.27.0", "versions")

# Generation in ONNX Runtime

_ROWS = {
    "torch float32 (DiffTransformer)": "torch float32",
    "float32 export": "export float32",
    "4:g32, KV 8, embedding 8": "export 4:g32 kv 8 embed 8",
    "the same with KV 4": "export 4:g32 kv 4 embed 8",
    "KV 8 by the function body": "function body, 4:g32 kv 8",
    "onnxruntime-genai's int4": "onnxruntime-genai int4",
    "transformers' own export": "transformers export",
    "the same with its fused operators": "transformers export, fused",
    "llama.cpp, Q4_0": "llama.cpp Q4_0",
    "llama-bench, Q4_0": "llama-bench Q4_0",
}
_COLUMNS = {
    "decode, tokens/s": ("decode_median", 1),
    "× torch float32": ("decode_of_torch", 1),
    "prefill of 1,024, tokens/s": ("prefill_median", 1),
    "folder, share of float32's": ("folder_of_export", 1),
    "peak memory, MB": ("peak_bytes", 1e6),
}
_BATCHES = [f"{what}, {many}" for what in ("decode", "prefill") for many in ("1 prompt", "4", "16")]


def _generation(models: Mapping[str, Any], row: str, head: str) -> list[float]:
    """Values of the models that the row was measured for; one where all of them are 1."""
    name, unit = _COLUMNS[head]
    rows = [models[model].get(_ROWS[row], {}) for model in (GGUF, V2, V1) if model in models]
    values = [each[name] / unit for each in rows if each.get(name) is not None]
    return values[:1] if set(values) == {1.0} else values


_MODELS, _ON_EPYC = raw("generate.json")["models"], raw("generate-avx512.json")["models"]
_FLOAT, _LOW, _BODY = "export float32", "export 4:g32 kv 8 embed 8", "function body, 4:g32 kv 8"
_GENAI, _LLAMA_CPP, _LLAMA_BENCH = "onnxruntime-genai int4", "llama.cpp Q4_0", "llama-bench Q4_0"


def _together(model: str, row: str, what: str, prompts: str) -> float:
    """Median speed of several prompts at once."""
    return median(_MODELS[model][row]["batches"][prompts][what])


def _of_batches(row: str, head: str) -> list[float]:
    what, _, prompts = head.partition(", ")
    there = [model for model in (GGUF, V2) if "batches" in _MODELS[model].get(_ROWS[row], {})]
    return [_together(model, _ROWS[row], what, prompts.split()[0]) for model in there]


PAGE.table(f" | {' | '.join(_COLUMNS)}", partial(_generation, _MODELS), section="Speed and memory in ONNX Runtime")
PAGE.table(f" | {' | '.join(_BATCHES)}", _of_batches)
for _page, _section in ((PAGE, "With both peers in one run"), (GUIDE, None)):
    _page.table(f" | {' | '.join(_COLUMNS)}", partial(_generation, _ON_EPYC), section=_section)
    _page.says("a random DiffLlama V1 of {} B parameters", _ON_EPYC[V1][_FLOAT]["folder_bytes"] / 4e9)


def _ratio(models: Mapping[str, Any], what: str, peer: str, model: str = GGUF) -> float:
    """How many times a peer's speed the 4-bit export has."""
    return float(models[model][_LOW][f"{what}_median"] / models[model][peer][f"{what}_median"])


def _of_genai(prompts: str) -> float:
    """Decoding several prompts at once beside onnxruntime-genai."""
    return _together(GGUF, _LOW, "decode", prompts) / _together(GGUF, _GENAI, "decode", prompts)


_TURNS = [
    turns
    for rows in _MODELS.values()
    for row in rows.values()
    for each in (row, *row.get("batches", {}).values())
    for turns in (each.get("decode"), each.get("prefill"))
    if turns
]
PAGE.says("so that turns of a row differ by up to {} times", max(max(turns) / min(turns) for turns in _TURNS))
PAGE.leaves("we aimed at once the prefill and 1.1 times the decode", "aims")
PAGE.leaves("we aimed at a 4-bit prefill of 1.5 times the float32 export's", "an aim")
PAGE.says(
    "The 4-bit export's prefill is {} times onnxruntime-genai's and {} times\n"
    "  llama.cpp's, its decode {} and {} times",
    *(_ratio(_MODELS, what, peer) for what in ("prefill", "decode") for peer in (_GENAI, _LLAMA_CPP)),
)
PAGE.says("it decodes {} times what onnxruntime-genai decodes, with 16 {} times", *map(_of_genai, ("4", "16")))
PAGE.says("the float32 export's: it is {} times", _ratio(_MODELS, "prefill", _FLOAT, V2))
PAGE.says("SmolLM2's prefill is {}\n  times as fast", _ratio(_MODELS, "prefill", _BODY))


def _written(model: str) -> tuple[float, float]:
    """Seconds and megabytes beyond mapped files of writing a model's 4-bit folder."""
    row = _MODELS[model][_LOW]
    return row["write_seconds"], row["write_anonymous_bytes"] / 1e6


PAGE.says(
    "Writing the 4-bit folder took {} s and {} MB beyond mapped files for SmolLM2, {} s and {} MB for its V2",
    *_written(GGUF),
    *_written(V2),
)
GUIDE.means("took a quarter to half a minute on two cores", all(12 < _written(model)[0] < 30 for model in (GGUF, V2)))
_BEFORE_PRODUCTS = raw("generate-2026-11-22.json")["models"][GGUF]
PAGE.says(
    "SmolLM2's 4-bit export decoded\n  {} tokens per second and read {}",
    *(_BEFORE_PRODUCTS[_LOW][f"{what}_median"] for what in ("decode", "prefill")),
)
PAGE.says("and onnxruntime-genai decoded {}", _BEFORE_PRODUCTS[_GENAI]["decode_median"])
_EARLIER = raw("generate-2026-11-20.json")["models"]
PAGE.says(
    "the same export decoded {} tokens per second, {} times as many as torch, and its V2 {}, {} times as many; "
    "llama.cpp decoded {}",
    *(_EARLIER[model][_LOW][name] for model in (GGUF, V2) for name in ("decode_median", "decode_of_torch")),
    _EARLIER[GGUF][_LLAMA_CPP]["decode_median"],
)
PAGE.says(
    "its prefill was {} of the float32 export's",
    _EARLIER[GGUF][_LOW]["prefill_median"] / _EARLIER[GGUF][_FLOAT]["prefill_median"],
)
PAGE.says(
    "{} tokens per second, {} with\n  its fused operators, and {} with NNCF's 4 bits",
    *(_EARLIER[GGUF][f"transformers export{kind}"]["decode_median"] for kind in ("", ", fused", ", fused, 4 bits")),
)
PAGE.says(
    "The prefill of the 4-bit export is {} times llama-bench's and {} times onnxruntime-genai's, its decode {} and {} "
    "times",
    *(_ratio(_ON_EPYC, what, peer) for what in ("prefill", "decode") for peer in (_LLAMA_BENCH, _GENAI)),
)
PAGE.says("it is {} and {} times", *(_ratio(_ON_EPYC, "prefill", _FLOAT, model) for model in (V2, V1)))
GUIDE.says(
    "has {} times the decode and {} times the prefill of onnxruntime-genai's, and {} and {} times llama-bench's",
    *(_ratio(_ON_EPYC, what, peer) for peer in (_GENAI, _LLAMA_BENCH) for what in ("decode", "prefill")),
)
GUIDE.says(
    "On an Intel Xeon it is {} and {} times onnxruntime-genai's, and {} times its decode with 16 prompts at once",
    *(_ratio(_MODELS, what, _GENAI) for what in ("decode", "prefill")),
    _of_genai("16"),
)
PAGE.means(
    "The native library computes the attention and the products with codes",
    all(
        "attention" in models[_LOW]["kernels"] and "products avx512vnni" in models[_LOW]["kernels"]
        for models in (*_ON_EPYC.values(), *_MODELS.values())
    ),
)


def _ratios(file: str, row: str, head: str) -> list[dict[str, float]]:
    """How many times as fast as ONNX Runtime's each kernel's product is, for each shape."""
    bits, _, block = head.partition(":g")
    wanted = {"rows": int(row.replace(",", "")), "bits": int(bits), "block": int(block)}
    return [each["ratio"] for each in raw(file)["products"] if wanted.items() <= each.items()]


def _products(row: str, head: str) -> tuple[float, float]:
    """The library's product beside ONNX Runtime's, at least and at most over the shapes."""
    ratios = [each["avx512vnni"] for each in _ratios("products-epyc.json", row, head)]
    return ends(ratios)


_KERNELS = {
    "VNNI": lambda ratio: ratio["avx512vnni"],
    "AMX": lambda ratio: ratio["amx"],
    "AMX beside VNNI": lambda ratio: ratio["amx"] / ratio["avx512vnni"],
}


def _tiles(row: str, head: str) -> tuple[float, float]:
    """The same where the processor has a matrix unit, of the kernels that the row names."""
    rows, _, kernel = row.partition(", ")
    ratios = [_KERNELS[kernel](each) for each in _ratios("products.json", rows, head)]
    return ends(ratios)


PAGE.table("rows | 4:g32 | 8:g64", _products)
PAGE.table("rows and kernel | 4:g32 | 8:g64 | 4:g128", _tiles)
PAGE.leaves("calibrated on 64 random tokens", "a setting of the program")


def _kernel(context: int, tokens: int, kv_bits: int) -> tuple[float, float]:
    """Least and largest ratio of the native kernel to the body, in float32 over the layer shapes."""
    ratios = [
        each["ratio"]
        for each in raw("native-op.json")["results"]
        if (each["context"], each["tokens"], each["kv_bits"], each["dtype"]) == (context, tokens, kv_bits, "float32")
    ]
    return ends(ratios)


PAGE.says("the kernel was {} to {} times as fast in float32 decode at 4K context", *_kernel(4096, 1, 0))
PAGE.says("{} to {} times in a prefill of 1K", *_kernel(1024, 1024, 0))
PAGE.says("and {} to {} times in decode over an 8-bit cache", *_kernel(4096, 1, 8))
_WHERE = raw("native-op.json")["environment"]
PAGE.means("on an AMD EPYC on 20 November 2026", (_WHERE["cpu"], _WHERE["date"]) == ("AMD EPYC", "2026-11-20"))

# Time and memory of an export

_EXPORTING = raw("exporting.json")
GUIDE.says(
    "takes {} times the processor time of a float32 export, of which {} s of {} s calibrate",
    _EXPORTING["of_float32"]["4 bits"],
    _EXPORTING["parts"]["4 bits"]["calibration"],
    _EXPORTING["cpu_seconds"]["4 bits"],
)
GUIDE.says("at most {} MB beyond mapped files", _EXPORTING["peak_anonymous"]["4 bits"] / 1e6)
GUIDE.says("rounded on the way it takes {} times", _EXPORTING["of_float32"]["4 bits, rounded on the way"])

# An hour of serving

_SOAK = raw("soak.json")
_FIRST, _LAST = _SOAK["samples"][0], _SOAK["samples"][-1]
GUIDE.says(
    "In {} minutes and {}\nrounds on a busy machine it generated {} tokens",
    _LAST["seconds"] / 60,
    _LAST["rounds"],
    _SOAK["tokens"],
)
GUIDE.says("its memory went from {} MB to {} MB", _FIRST["resident"] / 1e6, _LAST["resident"] / 1e6)
GUIDE.means("each round's the same as the first one's", _SOAK["is_constant"])
GUIDE.means("from two sessions each", _SOAK["sessions"] == 2 * len(_SOAK["models"]))
GUIDE.leaves("the end of a context of 32,768 tokens", "a setting")
GUIDE.leaves("beyond 2 and 8 GB of a file", "settings")
