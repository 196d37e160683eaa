"""The figures of README.md."""

from tests.docs.page import Page, Unmeasured
from tests.docs.raw import raw, recorded

PAGE = Page("README.md")
for verb in ("convert", "quantize", "generate", "export", "run"):
    PAGE.shows(f"diffquant {verb}", lambda verb=verb: recorded(f"diffquant {verb}"))
_GENERATION = raw("generate.json")["models"]["smollm2-135m-diff-v2"]["export 4:g32 kv 8 embed 8"]
PAGE.says(
    "this 4-bit export generated {} tokens per second, {} times as many as torch in float32",
    _GENERATION["decode_median"],
    _GENERATION["decode_of_torch"],
)
PAGE.leaves("tested on Linux with Python 3.11", "a version")
PAGE.table("for | take | why", lambda *_: Unmeasured("options, and what their schemes store"))
PAGE.table("page | what it has", lambda *_: Unmeasured("contents"))
