"""The figures of docs/kv.md."""

from studies.kv import TEXTS, cost_cells, gain
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


def _less(bits: int, text: str) -> list[float]:
    """Percent of DIFF V1's KL that rotated values take off, by the scheme of its keys."""
    results = MODELS["prose-diff-v1"]["results"]
    pairs = [(f"{bits}:{keys}, {bits}:row:rotated", f"{bits}:{keys}, {bits}:row") for keys in ("row", "c32")]
    return [100 * (1 - results[ours][text]["kl"] / results[plain][text]["kl"]) for ours, plain in pairs]


_FOUR, _THREE = _less(4, "prose"), _less(3, "prose")
_THERE = _less(4, "elsewhere") + _less(3, "elsewhere")
PAGE.says(
    "takes {} to {} % of its KL off DIFF V1 at 4 bits and {} to {} % at 3 bits",
    min(_FOUR),
    max(_FOUR),
    min(_THREE),
    max(_THREE),
)
PAGE.says("and {} to {} % elsewhere", min(_THERE), max(_THERE))
_PLAIN = [
    change
    for model in ("prose-transformer", "prose-diff-v2")
    for bits in (4, 3)
    for keys in ("row", "c32")
    for text in TEXTS
    if (change := gain(MODELS[model]["results"], f"{bits}:{keys}, {bits}:row:rotated", text))
]
PAGE.means(
    "of their sixteen intervals one lies below zero, by less than 0.001 nats",
    len(_PLAIN) == 16
    and [change.mean > -0.001 for change in _PLAIN if change.high < 0] == [True]
    and not [change for change in _PLAIN if change.low > 0],
)
PAGE.means(
    "Rotated keys gain nothing on any of the three models",
    all(
        change is None or change.high >= 0
        for model in MODELS.values()
        for bits in (4, 3)
        for text in TEXTS
        for change in [gain(model["results"], f"{bits}:row:rotated, {bits}:row", text)]
    ),
)
PAGE.leaves("by less than 0.001 nats", "a bound that a claim beside it checks")
PAGE.means(
    "every interval of that lies above zero",
    all(
        change and change.low > 0
        for bits in (4, 3)
        for text in TEXTS
        if (change := gain(MODELS["prose-diff-v1"]["results"], f"{bits}:row:rotated, {bits}:row", text))
    ),
)
PAGE.means(
    "is the best of the seven caches for DIFF V1 on both texts, at 4 bits and at 3",
    all(
        min(rows, key=lambda name: rows[name][text]["kl"]) == f"{bits}:c32, {bits}:row:rotated"
        for bits in (4, 3)
        for text in TEXTS
        for rows in [{n: r for n, r in MODELS["prose-diff-v1"]["results"].items() if n.startswith(str(bits))}]
    ),
)
PAGE.leaves("The models have 1.25 M parameters", "a count")
PAGE.leaves("with its 95 % interval", "a level")
PAGE.leaves("one per channel over 32 tokens", "a scheme")

# The best 4-bit cache

DECODED = {
    file.stem: raw(f"kv-decoded/{file.name}") for file in sorted((RESULTS / "kv-decoded").glob("*.json"))
}
BEST = "4:c32, 4:row:rotated, residual 32"


def _decoded_cell(row: str, column: str) -> str:
    model, _, cache = row.partition(", ")
    names = ("bytes", "long", *TEXTS)
    results = next(one["results"] for one in DECODED.values() if one["settings"]["model"] == model)
    return dict(zip(names, byte_cells(results, cache), strict=True))[column]


PAGE.table(
    "model | keys, values | bytes per token | in 4,096 tokens | KL, 0.001 nats | elsewhere",
    _decoded_cell,
    names=2,
    columns=["bytes", "long", "prose", "elsewhere"],
)
