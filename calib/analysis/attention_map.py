"""Where attention goes when a model is to say a number it has read: Table 3 of the paper for any model.

Measured at the position that predicts the number's first token, over the weights that the values get:
map 1 - λ·map 2, or a Transformer's only map.

Source: arXiv 2410.05258, section 3.4, Table 3. Scores are means over heads and layers, as the authors say in
microsoft/unilm issue 1654; how signed weights are normalized neither says, so both readings are here.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from diffquant.calib.analysis.last_row import weights_of
from diffquant.calib.analysis.needle_parts import PARTS, Prompt, make_prompt
from diffquant.errors import NonFiniteError, UsageError
from diffquant.evals.protocols import needle
from diffquant.evals.torch_model import TorchModel
from diffquant.loading import load
from diffquant.model.modeling import DiffTransformer
from diffquant.model.walk import Walk
from diffquant.scheme import LAYER_TARGETS, Recipe
from diffquant.source.identity import check_distinct
from diffquant.source.source import open_source
from diffquant.support.devices import check_device, resolve
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions
from diffquant.text.corpus import identity, load_text

# Shares of the weights' magnitudes, the weights as they are, and each map's own.
SHARE, SIGNED, MAPS = "share", "signed", ("signal", "noise")
# Of each kind, the weight on each of `PARTS`.
Weights = dict[str, dict[str, float]]


@dataclass(frozen=True)
class AttentionMapOptions:
    """What is read.

    Attributes:
        plan: the items; one needle is asked for.
        text: of the haystack; the prose that ships by default.
        recipe: what to simulate; a quantized checkpoint's own by default.
        dtype, device: of the run; the rows measured are computed in float32.
    """

    plan: needle.NeedlePlan = field(default_factory=needle.NeedlePlan)
    text: Path | None = None
    recipe: Recipe | None = None
    dtype: str = "auto"
    device: str = "cpu"


@dataclass(frozen=True)
class Place:
    """The mean over the items of one length and depth.

    Attributes:
        right: share of items where the number's first token is the likeliest.
        overall: mean of the layers.
        layers: means over heads.
    """

    length: int
    depth: float
    items: int
    right: float
    overall: Weights
    layers: list[Weights]


@dataclass(frozen=True)
class ModelAttention:
    """One model; `items` is the digest of what it read, which depends on its tokenizer."""

    name: str
    generation: str
    fingerprint: str
    recipe: dict[str, Any]
    items: str
    places: list[Place]


@dataclass(frozen=True)
class AttentionMaps:
    """Several models over items of one plan."""

    models: list[ModelAttention]
    settings: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def map_attention(models: Sequence[Path], options: AttentionMapOptions, progress: Progress = silent) -> AttentionMaps:
    """Measure every model, one after the other.

    Raises:
        UsageError: a model named twice, more than one needle asked for, static schemes, items that cannot be made, or
            a device that is not there.
        NonFiniteError: a model computes NaN or infinity.
    """
    check_distinct(models)
    if options.plan.asked != 1:
        raise UsageError(f"attention goes to one answer at a time; {options.plan.asked} needles are to be asked for")
    if options.recipe is not None and any(options.recipe.is_static(target) for target in LAYER_TARGETS):
        raise UsageError("static scales are a model's own and are not taken here; use another granularity")
    check_device(options.device)
    text = load_text(options.text)
    found = [_of_model(Path(model), text, options, progress) for model in models]
    settings = {
        "text": identity(text),
        "items_format": needle.ITEMS_FORMAT,
        "plan": asdict(options.plan),
        "dtype": str(resolve(options.dtype, options.device)).removeprefix("torch."),
        "versions": versions(),
    }
    return AttentionMaps(found, settings)


def _of_model(path: Path, text: str, options: AttentionMapOptions, progress: Progress) -> ModelAttention:
    source = open_source(path)
    model = load(source, options.recipe, resolve(options.dtype, options.device), options.device)
    tokenizer = source.tokenizer
    items = needle.make_items_for(TorchModel(model), tokenizer, text, options.plan)
    cells: dict[tuple[int, float], list[tuple[Tensor, bool]]] = {}
    for number, item in enumerate(items, 1):
        cells.setdefault((item.length, item.depth), []).append(observe(model, make_prompt(tokenizer, item)))
        progress(number, len(items), path.name)
    model.require_fired()
    places = [_place(*place, observed) for place, observed in sorted(cells.items())]
    return ModelAttention(
        path.name,
        model.config.diff_spec.generation,
        source.fingerprint,
        model.recipe.to_dict(),
        needle.needle_digest(items),
        places,
    )


@torch.inference_mode()
def observe(model: DiffTransformer, prompt: Prompt) -> tuple[Tensor, bool]:
    """What the last position attends to, and whether it predicts the number's first token.

    Returns:
        float64 [layers, kinds, parts]: kinds are `SHARE`, `SIGNED` and the model's `MAPS`, parts `PARTS`.

    Raises:
        NonFiniteError: the model computes NaN or infinity.
    """
    walk = Walk.over(model, len(prompt.ids))
    parts = one_hot(torch.tensor(prompt.parts), len(PARTS)).double()
    x = walk.embed(torch.tensor([prompt.ids], device=model.device))
    found = []
    for layer in walk.layers:
        maps, weights = weights_of(walk, layer, x)
        share = weights.abs() / weights.abs().sum(-1, keepdim=True)
        found.append(torch.stack([share, weights, *maps]).mean(1).cpu().double() @ parts)
        x = walk.run(layer, x)
    logits = model.lm_head(model.model.norm(x[0, -1]))
    of_layers = torch.stack(found)
    if not (of_layers.isfinite().all() and logits.isfinite().all()):
        raise NonFiniteError("the model computes NaN or infinity; use --dtype float32, or wider bits")
    return of_layers, int(logits.argmax()) == prompt.answer


def _place(length: int, depth: float, observed: list[tuple[Tensor, bool]]) -> Place:
    layers = torch.stack([weights for weights, _ in observed]).mean(0)
    right = sum(is_right for _, is_right in observed) / len(observed)
    return Place(length, depth, len(observed), right, _named(layers.mean(0)), [_named(layer) for layer in layers])


def _named(weights: Tensor) -> Weights:
    kinds = (SHARE, SIGNED, *MAPS)[: len(weights)]
    rows = [[round(weight, 6) for weight in row] for row in weights.tolist()]
    return {kind: dict(zip(PARTS, row, strict=True)) for kind, row in zip(kinds, rows, strict=True)}
