"""The figures of README.md."""

from collections.abc import Mapping
from typing import Any

from research.check.page import Page, Unmeasured, Values
from research.check.pages.figure8 import MORE, WON
from research.check.pages.figure8_larger_words import WON as LARGER
from research.check.pages.figure8_ratios_words import LEVEL_ENDS, SENSITIVITY, WON_AT_PAPERS, WON_BY_RANGE
from research.check.pages.rounding import SHIPPED, SMOLLM2
from research.check.raw import raw, recorded

PAGE = Page("README.md")
for verb in ("convert SmolLM2", "quantize smollm2", "generate smollm2", "export smollm2", "run smollm2"):
    PAGE.shows(f"diffquant {verb}", lambda verb=verb: recorded(f"diffquant {verb}"))
_METHODS = {
    "diffquant, --effort fast": "mse 4:g32",
    "diffquant, --effort balanced": "gptq 4:g32",
    "diffquant, --effort best": "tuned 4:g32",
    "AutoRound": "AutoRound 4 bits, groups of 32",
    "llm-compressor, GPTQ": "llm-compressor GPTQ, 4 bits, groups of 32, mse",
    "llama.cpp, IQ4_NL with an imatrix": "llama.cpp IQ4_NL, imatrix",
    "llama.cpp, Q4_K with an imatrix": "llama.cpp Q4_K, imatrix",
    "bitsandbytes, nf4": "bitsandbytes nf4, blocks of 64",
    "HQQ": "HQQ 4 bits, groups of 64",
}
_SPEED: Mapping[str, Any] = raw("generate.json")["models"]["SmolLM2-135M-Instruct.Q4_1.gguf"]


def _cell(method: str, column: str) -> Values:
    row = SMOLLM2["results"][_METHODS[method]]
    if column == "KL, nats":
        return [row["elsewhere"]["kl"]]
    if column.startswith("quantizing"):
        return [row["cpu_seconds"]]
    if column.startswith("opens"):
        return "yes" if method.startswith("diffquant") else "no"
    if method.startswith("diffquant"):
        return [_SPEED["export 4:g32 kv 8 embed 8"]["decode_of_torch"]]
    return [_SPEED["llama.cpp Q4_0"]["decode_of_torch"]] if "IQ4_NL" in method else ""


PAGE.table(" | KL, nats | quantizing, CPU seconds | decoding, × torch float32 | opens DIFF models", _cell)
PAGE.says("at {} bits per weight:", *{SMOLLM2["results"][method]["bits"] for method in _METHODS.values()})
PAGE.says(
    "is over {} windows of a text that no method was given",
    len(SMOLLM2["results"]["mse 4:g32"]["elsewhere"]["kl_by_window"]),
)
_ON_EPYC = raw("generate-avx512.json")["models"]["SmolLM2-135M-Instruct.Q4_1.gguf"]
PAGE.says(
    "ours decode at {} times the\nrate of onnxruntime-genai's own 4 bits and read prompts at {} times; "
    "on an AMD EPYC they do at {} and {} times",
    *(
        rows["export 4:g32 kv 8 embed 8"][rate] / rows["onnxruntime-genai int4"][rate]
        for rows in (_SPEED, _ON_EPYC)
        for rate in ("decode_median", "prefill_median")
    ),
)
PAGE.says(
    "A small DIFF V1 at {} to {} bits per weight",
    *(round(SHIPPED["DIFF V1"]["results"][f"nearest {size}"]["bits"], 1) for size in ("3:g32", "6:g128")),
)
PAGE.says(
    "DIFF V1 needs {} bits more than the Transformer (95 % interval {} to {}) and V2 {} ({} to {})",
    *(x for more in SENSITIVITY.values() for x in more),
)
PAGE.says("V1 needs {} bits more\n({} to {}) and V2 {} ({} to {})", *(x for more in MORE.values() for x in more))
PAGE.says("DIFF wins from r = {} to {} on", *LEVEL_ENDS)
PAGE.says("at r = 8, about the paper's, these models win {} to {} bits", *WON_AT_PAPERS)
PAGE.leaves("r times smaller earns about log2(r) bits", "arithmetic")
PAGE.means("Their own ranges hardly differ", all(abs(bits) < 0.35 for bits in WON_BY_RANGE))
PAGE.leaves("95 % interval", "a level")
PAGE.means("Each kind was trained six times", {len(won) for won in WON.values()} == {6})
PAGE.means(
    "three trainings of each with four times the parameters lose too", all(max(won) < 0 for won in LARGER.values())
)
PAGE.leaves("Python 3.11 or later", "a version")
PAGE.leaves("took 0.22 CPU seconds there", "how fast README's processor is, by which the walk judges durations")
PAGE.table(" | ", Unmeasured("contents"))
