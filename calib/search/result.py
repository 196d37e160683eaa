"""What a search found, as plain data."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from diffquant.recipe import Recipe


@dataclass(frozen=True)
class Candidate:
    """A recipe on the text held out.

    Attributes:
        name: "searched", "spread evenly" or "uniform 4".
        bits: mean bits by target.
        nbytes: of the checkpoint that `quantize` would write.
        predicted: the sum of its units' costs; None where a width was not measured.
        kl, perplexity: as measured.
    """

    name: str
    bits: dict[str, float]
    nbytes: int
    predicted: float | None
    kl: float
    perplexity: float


@dataclass(frozen=True)
class Measurement:
    """A unit's cost at each width, and the width it got."""

    name: str
    target: str
    layer: int
    kind: str
    elements: int
    kl: dict[int, float]
    attention: dict[int, float | None]
    chosen: int


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        perplexity: of the 16-bit model on the text held out.
        candidates: the searched recipe first.
    """

    model: str
    budget: str
    perplexity: float
    candidates: list[Candidate]
    measurements: list[Measurement]
    recipe: Recipe
    settings: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"recipe": self.recipe.to_dict()}, indent=1) + "\n"
