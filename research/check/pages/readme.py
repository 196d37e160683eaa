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
    "bitsandbytes, nf4": "bitsandbytes nf4, blocks of 64",
    "HQQ": "HQQ 4 bits, groups of 64",
    "diffquant, --effort balanced, groups of 144": "gptq 4:g128",
    "diffquant, --effort best, groups of 144": "tuned 4:g128",
    "AutoRound, groups of 128": "AutoRound 4 bits, groups of 128",
    "llama.cpp, IQ4_XS with an imatrix": "llama.cpp IQ4_XS, imatrix",
}
_READS_NONE = {"mse", "bitsandbytes", "HQQ"}
_SPEED: Mapping[str, Any] = raw("generate.json")["models"]["SmolLM2-135M-Instruct.Q4_1.gguf"]


def _cell(method: str, column: str) -> Values:
    name = _METHODS[method]
    row = SMOLLM2["results"][name]
    if column == "KL, nats":
        return [row["elsewhere"]["kl"]]
    if column == "CPU seconds":
        return [row["cpu_seconds"]]
    if column == "bits per weight":
        return [row["bits"]]
    return "none" if name.split()[0] in _READS_NONE else [SMOLLM2["settings"]["tokens"]]


PAGE.table(" | bits per weight | tokens read | KL, nats | CPU seconds", _cell)
PAGE.says(
    "the mean over {} windows of HellaSwag contexts",
    len(SMOLLM2["results"]["mse 4:g32"]["elsewhere"]["kl_by_window"]),
)
PAGE.says("diffquant's default of {}, and AutoRound's own default is {} times as many", 16384, 128 * 2048 / 8192)
PAGE.means("half of diffquant's default", 2 * SMOLLM2["settings"]["tokens"] == 16384)
_KL_AT_4 = {m: SMOLLM2["results"][name]["elsewhere"]["kl"] for m, name in _METHODS.items()}
_COARSE = [m for m, name in _METHODS.items() if SMOLLM2["results"][name]["bits"] < 4.3]
PAGE.means("IQ4_XS leads", "IQ4_XS" in min(_COARSE, key=lambda m: _KL_AT_4[m]))
PAGE.says(
    "at {} % more bits",
    100 * (SMOLLM2["results"]["llama.cpp IQ4_XS, imatrix"]["bits"] / SMOLLM2["results"]["tuned 4:g128"]["bits"] - 1),
)
PAGE.leaves("Between 4.1 and 4.25 bits", "the table's")
PAGE.leaves("A DIFF V1 of 1.25 M parameters", "the trained size")
PAGE.leaves("onnxruntime-genai's own 4 bits and prefills", "a width")
_ON_EPYC = raw("generate-avx512.json")["models"]["SmolLM2-135M-Instruct.Q4_1.gguf"]
_RATIOS = [
    rows["export 4:g32 kv 8 embed 8"][rate] / rows["onnxruntime-genai int4"][rate]
    for rows in (_ON_EPYC, _SPEED)
    for rate in ("decode_median", "prefill_median")
]
PAGE.says("decodes {} times as fast as onnxruntime-genai's own 4 bits and prefills {} times as fast", *_RATIOS[:2])
PAGE.says("ratios were {} and {}", *_RATIOS[2:])
PAGE.says(
    "parameters at {} to {} bits per weight",
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
