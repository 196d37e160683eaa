"""Pages that give no result: whatever looks like one on them is listed here with its reason."""

from tests.docs.page import Page, Unmeasured

MANY_SHOT, ARCHITECTURE, OPERATOR, CLAIMS = PAGES = [
    Page("docs/many-shot.md"),
    Page("docs/architecture.md"),
    Page("docs/differential-attention-op.md"),
    Page("docs/claims.md"),
]
MANY_SHOT.table("suffix | what it holds", lambda *_: Unmeasured("formats"))
ARCHITECTURE.table("word | meaning", lambda *_: Unmeasured("definitions"))
for heads in ("# | name | type | shape | ", "name | type | values", "b | type | c | layout"):
    OPERATOR.table(heads, lambda *_: Unmeasured("definitions"))
for section in ("Quantized models", "When DIFF attention bears low bits better", "Speed and memory"):
    heads = "claim | n, interval | raw file | made by | refuted by"
    CLAIMS.table(heads, lambda *_: Unmeasured("how much was measured"), section=section)
CLAIMS.leaves("at most 1.3 M parameters", "a count")
