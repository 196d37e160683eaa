"""Figures of the page on speed and memory: ONNX Runtime, served models, an H100, and what quantizing takes."""

from collections import Counter
from statistics import median
from typing import Any

from diffquant.measure.stats import Difference
from research.pages.formats import accuracy_change
from research.pages.raw import raw
from research.pages.render import ends, fixed, span, table

SMOLLM2, V2, V1 = "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-diff-v2", "diffllama-0.6gb"

# Generation in ONNX Runtime

EPYC, XEON = raw("generate-avx512.json")["models"], raw("generate.json")["models"]
EXPORT, FLOAT, BODY = "export 4:g32 kv 8 embed 8", "export float32", "function body, 4:g32 kv 8"
GENAI, LLAMA_CPP, LLAMA_BENCH = "onnxruntime-genai int4", "llama.cpp Q4_0", "llama-bench Q4_0"
_ROWS = {
    "torch, float32": "torch float32",
    "export, float32": FLOAT,
    "export, 4:g32, KV 8, embedding 8": EXPORT,
    "the same with KV 4": "export 4:g32 kv 4 embed 8",
    "KV 8 by the function body": BODY,
    "onnxruntime-genai, int4": GENAI,
    "llama.cpp, Q4_0, Python binding": LLAMA_CPP,
    "llama-bench, Q4_0": LLAMA_BENCH,
}
_COLUMNS = {
    "decode, tokens/s": ("decode_median", 1, 1),
    "prefill of 1,024, tokens/s": ("prefill_median", 1, 0),
    "folder, share of float32's": ("folder_of_export", 1, 2),
    "peak memory, MB": ("peak_bytes", 1e6, 0),
}


def generation_table(models: dict[str, Any]) -> str:
    """Speed and memory of every engine, one number for each model that it was measured with."""
    rows = []
    for shown, name in _ROWS.items():
        found = (models.get(model, {}).get(name, {}) for model in (SMOLLM2, V2, V1))
        measured = [each for each in found if "decode_median" in each]
        if measured:
            rows.append(
                [
                    shown,
                    *(
                        " / ".join(fixed(each[key] / unit, places) for each in measured if each.get(key) is not None)
                        for key, unit, places in _COLUMNS.values()
                    ),
                ]
            )
    return table(["", *_COLUMNS], rows)


def batches_table() -> str:
    """Several prompts of 64 tokens at once, SmolLM2 on the Xeon."""
    rows = [
        [
            shown,
            *(
                fixed(median(batches[prompts][what]), 0)
                for what in ("decode", "prefill")
                for prompts in ("1", "4", "16")
            ),
        ]
        for shown, name in _ROWS.items()
        if (batches := XEON[SMOLLM2].get(name, {}).get("batches"))
    ]
    heads = [f"{what}, {prompts}" for what in ("decode", "prefill") for prompts in ("1 prompt", "4", "16")]
    return table(["SmolLM2, tokens/s together", *heads], rows)


def over(models: dict[str, Any], what: str, peer: str, model: str = SMOLLM2) -> float:
    """How many times a peer's speed the 4-bit export has."""
    return float(models[model][EXPORT][f"{what}_median"] / models[model][peer][f"{what}_median"])


def over_genai(prompts: str) -> float:
    """The same of decoding several prompts at once beside onnxruntime-genai."""
    ours, theirs = (median(XEON[SMOLLM2][row]["batches"][prompts]["decode"]) for row in (EXPORT, GENAI))
    return ours / theirs


def turns_differ() -> float:
    """Largest ratio between turns of one row on the Xeon."""
    return max(
        max(turns) / min(turns)
        for rows in XEON.values()
        for row in rows.values()
        for each in (row, *row.get("batches", {}).values())
        for turns in (each.get("decode"), each.get("prefill"))
        if turns
    )


LEADS = all(
    over(models, what, peer) > 1
    for models, peers in ((EPYC, (GENAI, LLAMA_BENCH)), (XEON, (GENAI, LLAMA_CPP)))
    for peer in peers
    for what in ("decode", "prefill")
)


def exported_change(model: str) -> Difference:
    """Change of HellaSwag's accuracy of a 4-bit export from its checkpoint's 16 bits, in points."""
    base = SMOLLM2 if model == "smollm2-onnx" else V2
    return accuracy_change("4:g32 kv 8 embed 8", "smollm2-onnx-500", model, base)


EXPORTS_KEEP_ACCURACY = all(
    exported_change(model).low < 0 < exported_change(model).high for model in ("smollm2-onnx", "smollm2-diff-v2-onnx")
)

# Products with codes


def products(file: str, rows: int, scheme: str, kernel: str) -> tuple[float, float]:
    """The library's product beside ONNX Runtime's, at least and at most over the shapes."""
    bits, _, block = scheme.partition(":g")
    wanted = {"rows": rows, "bits": int(bits), "block": int(block)}
    return ends(each["ratio"][kernel] for each in raw(file)["products"] if wanted.items() <= each.items())


def products_table() -> str:
    """Both processors."""
    made = []
    for rows in (1, 4, 16, 64, 128, 1024):
        epyc = [span(products("products-epyc.json", rows, scheme, "avx512vnni"), 1) for scheme in ("4:g32", "8:g64")]
        amx = (
            [span(products("products.json", rows, scheme, "amx"), 1) for scheme in ("4:g32", "8:g64")]
            if rows > 16
            else ["", ""]
        )
        made.append([f"{rows:,}", *epyc, *amx])
    return table(["rows", "4:g32, VNNI", "8:g64, VNNI", "4:g32, AMX", "8:g64, AMX"], made)


PRODUCTS_LEAD = all(
    products("products-epyc.json", rows, scheme, "avx512vnni")[0] > 1
    for rows in (1, 4, 16, 64, 128, 1024)
    for scheme in ("4:g32", "8:g64")
)


def kernel_over_body(context: int, tokens: int, kv_bits: int) -> tuple[float, float]:
    """Least and largest ratio of the native attention kernel to the function body, in float32."""
    wanted = {"context": context, "tokens": tokens, "kv_bits": kv_bits, "dtype": "float32"}
    return ends(each["ratio"] for each in raw("native-op.json")["results"] if wanted.items() <= each.items())


# Served models

_SERVED = raw("serve-bench.json")
_TURNS = {(e["model"], e["bits"], e["requests"], e["engine"]): e["values"] for e in _SERVED["rows"] if "values" in e}
_ENGINES = {
    "`diffquant serve`": "diffquant serve",
    "`diffquant generate`": "diffquant generate",
    "`generate_batch`": "transformers generate_batch",
    "ONNX Runtime": "ONNX Runtime",
}


def served_table() -> str:
    """Tokens per second with 1 and 32 requests."""
    rows = [
        [
            f"{model}, {bits} bits, {requests}",
            *(fixed(median(_TURNS[model, bits, requests, engine]), 0) for engine in _ENGINES.values()),
        ]
        for model in ("Transformer", "DIFF V2", "DIFF V1")
        for bits in ("16", "4")
        for requests in (1, 32)
    ]
    return table(["model, requests", *_ENGINES], rows)


def served_over(other: str) -> tuple[float, float]:
    """Served with 32 requests over another engine's batch, by paired turns: smallest and largest of models and bits."""
    return ends(aim["measured"] for aim in _SERVED["aims"] if aim["what"].endswith(f"32 requests: served / {other}"))


def served_gain() -> tuple[float, float]:
    """Tokens per second with 32 requests over those with one."""
    return ends(aim["measured"] for aim in _SERVED["aims"] if aim["what"].endswith("32 requests / 1"))


SERVED_TURNS = max(max(values) / min(values) for values in _TURNS.values())
_FOUND = raw("serving.json")["found"]
TOKENS_ARE_EQUAL = all(each["tokens equal"] for each in _FOUND if each.get("tokens equal") is not None)
_FURTHEST = [each for each in _FOUND if each.get("furthest") is not None and "cache" not in each]
FURTHEST = max(each["furthest"] for each in _FURTHEST if each["source"] != "motif3")
FURTHEST_OF_MOTIF3 = max(each["furthest"] for each in _FURTHEST if each["source"] == "motif3")
SERVED_DATES = ends([each["date"] for each in _FOUND])
SERVED_BY = raw("serving.json")["versions"]
SERVED_KINDS = len({each["source"] for each in _FOUND if each["where"] == "plugin" and "refused" not in each})
# Where the tests found something, as an engine and what of it was in use.
_WHERE = {
    "plugin": ("vLLM, plugin", ""),
    "chunked": ("vLLM, plugin", "chunks and prefixes"),
    "two ranks": ("vLLM, plugin", "two ranks"),
    "pipeline": ("vLLM, plugin", "pipeline"),
    "adapter": ("vLLM, plugin", "LoRA"),
    "adapter on two ranks": ("vLLM, plugin", "LoRA on two ranks"),
    "folder": ("vLLM, folder alone", ""),
    "folder on two ranks": ("vLLM, folder alone", "two ranks"),
    "transformers": ("transformers alone", ""),
}


def support_table() -> str:
    """What works and what is refused, by engine and model; what is in neither was not tried."""
    models: dict[tuple[str, str], dict[str, dict[str, bool]]] = {}
    for each in _FOUND:
        if each["where"] in _WHERE:
            engine, use = _WHERE[each["where"]]
            cells = models.setdefault((engine, each["source"]), {"weights": {}, "cache": {}, "activations": {}, "": {}})
            what, said = next(
                ((of, each[of]) for of in ("cache", "activations") if each.get(of, "16") != "16"),
                ("weights", each["bits"]),
            )
            if what == "activations":
                said = f"{said} with {each['bits']}"
            cells["" if use else what][use or said] = "refused" not in each
    rows: dict[tuple[str, ...], list[str]] = {}
    for (engine, source), cells in models.items():
        rows.setdefault((engine, *map(_works, cells.values())), []).append(source)
    heads = ["engine", "models", "weights", "cache", "activations", "also"]
    return table(heads, sorted([engine, ", ".join(sources), *cells] for (engine, *cells), sources in rows.items()))


def _works(found: dict[str, bool]) -> str:
    """What works, then what is refused."""
    parts = [[name for name, works in found.items() if works is wanted] for wanted in (True, False)]
    return (
        "; ".join(f"{said}{', '.join(names)}" for said, names in zip(("", "refused: "), parts, strict=True) if names)
        or "–"
    )


_OVER_HTTP = raw("serving-hellaswag.json")
SCORES_AGREE = (
    _OVER_HTTP["lm_eval_acc"] == _OVER_HTTP["our_acc"] and _OVER_HTTP["lm_eval_acc_norm"] == _OVER_HTTP["our_acc_norm"]
)
OVER_HTTP_ITEMS = _OVER_HTTP["items"]

# An H100

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

# Quantizing

_6GB, _MOTIF, _TEXTS = (raw(f"quantize-{name}.json") for name in ("6gb", "motif-2-12.7b", "roundings"))


def quantize_table() -> str:
    """Time and memory by the size of the model."""
    runs = (
        ("SmolLM2-135M, 0.1 GB of GGUF, `gptq`", _TEXTS, _TEXTS["roundings"]["gptq"]),
        ("SmolLM2-135M, 0.1 GB of GGUF, `tuned`", _TEXTS, _TEXTS["roundings"]["tuned"]),
        (f"random weights, {_6GB['source_bytes'] / 1e9:.1f} GB, `nearest`", _6GB, _6GB["whole"]),
        (f"Motif-2-12.7B's shapes, {_MOTIF['source_bytes'] / 1e9:.1f} GB, `nearest`", _MOTIF, _MOTIF["whole"]),
    )
    rows = [
        [
            name,
            about["environment"]["cpu"].replace("(R)", "").removesuffix(" Processor"),
            fixed(run["process_seconds"], 0),
            fixed(run["peak_anonymous"] / 1e6, 0),
        ]
        for name, about, run in runs
    ]
    return table(["checkpoint, rounding", "two cores of", "seconds", "MB beyond mapped files"], rows)


MOTIF_GB = _MOTIF["source_bytes"] / 1e9
IN_A_GIGABYTE = _MOTIF["whole"]["peak_anonymous"] < 1e9
RESUMES_TO_THE_SAME = bool(_MOTIF["byte_identical"])


def medians(entries: list[dict[str, Any]], name: str = "seconds") -> float:
    """Median of turns."""
    return float(median(entry[name] for entry in entries))


def over_torchao(file: str) -> float:
    """How many times as fast as torchao in memory `quantize` is, for each byte that is packed."""
    turns = raw(file)["turns"]
    return float(median(turns["torchao in memory"]["seconds"]) / median(turns["diffquant quantize"]["seconds"]))


_KILLED = [raw(f"sweep-kills/{name}.json") for name in ("local", "local-again", "ray")]
KILLS = sum(sum(run["kills"].values()) for run in _KILLED)
KILLS_CHANGE_NOTHING = not any(run["faults"] for run in _KILLED)
_MUTANTS = raw("mutants.json")["groups"]
PLANTED, NOTICED = (sum(each[key] for each in _MUTANTS.values()) for key in ("planted", "killed"))
_FAULTS = raw("planted-faults.json")["results"]
FAULTS_REFUSED = len(_FAULTS) == 5 and all(each["refused"] == (name != "none") for name, each in _FAULTS.items())
