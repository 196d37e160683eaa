"""The counts of docs/reliability.md, which the programs it names print; no result of a model is among them."""

from tests.docs.page import Page, Unmeasured

PAGE = Page("docs/reliability.md")
_HEADS = "program | tried | came back, or were refused in a line or read rightly"
PAGE.table(_HEADS, lambda *_: Unmeasured("counts that the page's commands print"))
PAGE.leaves("more than ten seconds", "a setting of the programs")
