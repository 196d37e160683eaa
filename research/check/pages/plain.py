"""Pages that give no result: whatever looks like one on them is listed here with its reason."""

from diffquant.bench.synthetic import preset
from research.check.page import Page, Unmeasured
from research.check.raw import raw

_GUIDES = (
    *("docs/differential-attention-op", "docs/any-model", "docs/cli", "docs/glossary", "docs/tutorial"),
    *("research/pages/many-shot", "docs/architecture", "docs/faq", "docs/run", "docs/gpu", "docs/python"),
    "docs/install",
)
_TOLD = ("research/pages/results", "research/pages/papers")
PAGES = [
    *(Page(f"{name}.md", is_guide=True) for name in _GUIDES),
    Page("docs/models.md", guides=("Your own training",)),
    *(Page(f"{name}.md") for name in _TOLD),
]
OPERATOR, ANY_MODEL, CLI, GLOSSARY, TUTORIAL, MANY_SHOT, *_, PYTHON, INSTALL, MODELS, RESULTS, PAPERS = PAGES
MANY_SHOT.leaves("reads its demonstrations over 250 times", "arithmetic: for each text once and again for each token")
MANY_SHOT.table("suffix | what it holds", Unmeasured("formats"))
GLOSSARY.table("word | meaning", Unmeasured("definitions"))
INSTALL.leaves("Python 3.11 or later", "a version")
PYTHON.leaves("`past_key_values` before 5.24", "a version")
CLI.table("exit code | meaning", Unmeasured("definitions"))
PAPERS.table("of | what it shows | command | our results", Unmeasured("numbers of tables and sections"))
for heads, sections in {
    "member of the family | generation | `signals_per_noise` | `lambda` | gates": (None,),
    "# | name | type | shape | ": (
        "Inputs",
        *(f"Inputs of {op}" for op in ("QuantizedAttention", "MatMulNBits", "CausalConvolution", "SelectiveScan")),
    ),
    "name | type | values": ("Attributes", "Attributes of QuantizedAttention", "Attributes of MatMulNBits"),
    "b | type | c | layout": (None,),
    "# | input | type | shape": ("diffquant::PolyNorm, version 2", "diffquant::ReadStreams, version 2"),
}.items():
    for section in sections:
        OPERATOR.table(heads, Unmeasured("definitions"), section=section)
MODELS.table(
    "model | opens | float64 | stock | real weights | exported | served | on a GPU",
    Unmeasured("links, which tests/docs/test_models.py follows"),
)
_INDEX = raw("quantize-motif-3.json")
_PART = _INDEX["part"]
MODELS.says(
    "the whole index, {} GB in holes of sparse files, are opened and planned in {} MB of memory",
    _INDEX["index"]["bytes_before"] / 1e9,
    _INDEX["index"]["peak_anonymous"] / 1e6,
)
MODELS.says("embedding and head, {} GB of holes, were quantized", _PART["source_bytes"] / 1e9)
MODELS.means("resumed to the same bytes", _PART["byte_identical"])
for size, what in {
    "a latent of 1,024 channels": "a size of the model",
    "in place of the 5,120 of keys": "arithmetic: 16 heads of 192 and 128",
    "a token takes 576 bytes": "arithmetic: 512 and 64 codes of a byte",
    "in place of\n  1,152": "arithmetic: two bytes each",
}.items():
    MODELS.leaves(size, what)
MODELS.means("first three layers", _INDEX["layers"] == 3)
MODELS.says(
    "with at most {} MB beside the mapped files",
    max(_PART[run]["peak_anonymous"] for run in ("whole", "killed", "resumed")) / 1e6,
)
_MADE = raw("generate-motif-3.json")
_CACHES = _MADE["caches"]
MODELS.says(
    "with {} experts each in place of {} and random weights",
    _MADE["shrunk"]["num_experts"],
    preset("motif-3")["num_experts"],
)
MODELS.means(
    "An eighth of its layers, seven",
    _MADE["shrunk"]["num_hidden_layers"] == 7 == round(preset("motif-3")["num_hidden_layers"] / 8),
)
MODELS.means("those of reading the text again, but for float32's rounding", _CACHES["16 bits"]["error"] < 1e-5)
MODELS.means("from a prompt longer than a window", _MADE["prompt"] > preset("motif-3")["sliding_window"])
MODELS.says(
    "The cache of {} tokens takes {} MB in float32, and\n  {} MB at `8:row:rotated`",
    _MADE["prompt"] + _CACHES["16 bits"]["tokens"] - 1,
    *(each["cache_bytes"] / 1e6 for each in _CACHES.values()),
)
MODELS.table(
    "model | `model_type` | attention | what runs | checked against | weights | licence",
    Unmeasured("names, and counts of published indexes, which test_motif.py and test_phi4flash.py have"),
)
MODELS.table("tensor | `diff_v1` | `diff_v2` | its rows", Unmeasured("definitions"))
MODELS.table("if yours has | then", Unmeasured("definitions"))
MODELS.leaves("λ_init = 0.8 − 0.6·exp(−0.3·layer)", "a formula of the paper")
RESULTS.table("number | raw result | made by", Unmeasured("names of files and commands"))
ANY_MODEL.table("to change it | ", Unmeasured("options"))
for stored in ("16        32.00", "4:g32         4.52", "16        16.00"):
    ANY_MODEL.leaves(stored, "arithmetic, of a small checkpoint that the tests write")
