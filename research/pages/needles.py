"""Figures of the models that retrieve, on the page on Figure 8."""

from research.pages import raw
from research.pages.render import fixed, table

NEEDLES = {"Transformer": "needle-transformer", "DIFF V1": "needle-diff-v1", "DIFF V2": "needle-diff-v2"}


def retrieved(seed: int, model: str, scheme: str) -> float:
    """Share of 100 contexts with four numbers whose number a model names, of the seed that ships (0) or another."""
    folder = "pocket-needle-seed-1" if seed else "pocket-needle"
    score = raw.measured(folder, model, scheme, "needle:4:1").score
    if score is None:
        raise LookupError(f"{folder}: no score")
    return score


def retrieval_table() -> str:
    """Both seeds side by side."""
    rows = [
        [f"`{scheme}`", *(fixed(retrieved(seed, model, scheme)) for model in NEEDLES.values() for seed in (0, 1))]
        for scheme in ("16", "4:tensor", "4:row", "3:tensor", "3:row")
    ]
    return table(["logits", *(f"{name}, seed {seed}" for name in NEEDLES for seed in (0, 1))], rows)


def losers(scheme: str) -> list[str]:
    """Which model retrieves least, by seed."""
    return [min(NEEDLES, key=lambda name: retrieved(seed, NEEDLES[name], scheme)) for seed in (0, 1)]


DEPENDS_ON_SEED = losers("4:tensor") == ["DIFF V2", "Transformer"]
