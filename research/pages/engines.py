"""Figures of the page on speed and memory: ONNX Runtime, served models, an H100, and what quantizing takes."""

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


def kernel_over_body(context: int, tokens: int, kv_bits: int) -> tuple[float, float]:
    """Least and largest ratio of the native attention kernel to the function body, in float32."""
    wanted = {"context": context, "tokens": tokens, "kv_bits": kv_bits, "dtype": "float32"}
    return ends(each["ratio"] for each in raw("native-op.json")["results"] if wanted.items() <= each.items())


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
