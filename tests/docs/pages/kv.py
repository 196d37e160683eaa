"""The figures of docs/kv.md."""

from studies.kv import cost_cells
from tests.docs.page import Page
from tests.docs.raw import raw

PAGE = Page("docs/kv.md")
MODELS = {name: raw(f"kv/{name}.json") for name in ("prose-transformer", "prose-diff-v1", "prose-diff-v2")}


def _cell(row: str, column: str) -> str:
    model, _, cache = row.partition(", ")
    return dict(zip(("bytes", "prose", "elsewhere"), cost_cells(MODELS[model], cache), strict=True))[column]


PAGE.table(
    "model | keys, values | bytes per token | KL, nats | elsewhere: KL, nats",
    _cell,
    names=2,
    columns=["bytes", "prose", "elsewhere"],
)
PAGE.says(
    "{} characters in windows of {} tokens", *(MODELS["prose-diff-v1"]["settings"][x] for x in ("characters", "window"))
)
PAGE.leaves("with its 95 % interval", "a level")
PAGE.leaves("one per channel over 32 tokens", "a scheme")
