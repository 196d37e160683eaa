"""Attention by part of a prompt when a model is to say a number it has read: the paper's Table 3 for any model.

Measured at the position that predicts the number's first token, over the weights that the values get:
map 1 - λ·map 2, or a Transformer's only map.

Source: arXiv 2410.05258, section 3.4, Table 3. Scores are means over heads and layers, as the authors say in
microsoft/unilm issue 1654; how signed weights are normalized neither says, so both readings are here.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from diffquant.attention import backend_for
from diffquant.attention.registry import Backend
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.texts import load_text, text_digest
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.measure.language_model import require_finite
from diffquant.measure.protocols import needle
from diffquant.measure.sweep.result import model_names
from diffquant.measure.torch_model import TorchModel
from diffquant.model import attention as modules
from diffquant.model.attention import PairAttention
from diffquant.model.fused_cache import FusedCache
from diffquant.model.modeling import DiffLayer, DiffTransformer
from diffquant.model.walk import LayerRunner
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.files import check_distinct
from diffquant.support.installation import provenance, versions
from diffquant.support.progress import Progress, report_nothing
from research.studies.needle_parts import PARTS, Prompt, make_prompt
from tests.support.attention_weights import attention_weights

# Shares of the weights' magnitudes, the weights as they are, and each map's own.
SHARE, SIGNED, MAPS = "share", "signed", ("signal", "noise")
# The weight on each of `PARTS`, by kind.
Weights = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Place:
    """Attention at one length and depth, as the mean over its items.

    Attributes:
        length: tokens of context.
        depth: place of the needle in the context, from 0 to 1.
        items: number of items.
        right: share of items where the number's first token is the likeliest.
        overall: weights as the mean over the layers.
        layers: weights of each layer as the mean over its heads.
    """

    length: int
    depth: float
    items: int
    right: float
    overall: Weights
    layers: list[Weights]


@dataclass(frozen=True)
class ModelAttention:
    """Where the attention of one model goes.

    Attributes:
        name: name of the checkpoint's folder or file.
        generation: "DIFF V1", "DIFF V2" or "Transformer".
        fingerprint: fingerprint of the checkpoint.
        recipe: recipe that was simulated.
        items: digest of the items that it read, which depend on its tokenizer.
        places: attention at each length and depth.
    """

    name: str
    generation: str
    fingerprint: str
    recipe: dict[str, Any]
    items: str
    places: list[Place]


@dataclass(frozen=True)
class AttentionMaps:
    """Where the attention of several models goes over items of one plan.

    Attributes:
        models: results of the models, in the order asked for.
        settings: text, plan, dtype and versions of the run.
    """

    models: list[ModelAttention]
    settings: dict[str, Any]

    def to_json(self) -> str:
        """The results as a JSON document."""
        return json.dumps(asdict(self), indent=1) + "\n"


def map_attention(
    models: Sequence[Path],
    plan: needle.NeedlePlan,
    *,
    text: Path | None = None,
    recipe: Recipe | None = None,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress = report_nothing,
) -> AttentionMaps:
    """Measure where the attention of every model goes, one model after the other.

    Args:
        plan: plan of the needle items, which asks for one needle.
        text: file whose prose is the haystack; the bundled text by default.
        recipe: recipe to simulate; a quantized checkpoint's own by default.
        dtype: dtype of the models; the rows measured are computed in float32.
        device: device that they run on.

    Raises:
        UsageError: a model named twice, more than one needle asked for, static schemes, items that cannot be made, or
            a device that is not there.
        NonFiniteError: a model computes NaN or infinity.
    """
    check_distinct(models)
    if plan.asked != 1:
        raise UsageError(f"attention goes to one answer at a time; {plan.asked} needles are to be asked for")
    if recipe is not None and any(recipe.is_static(target) for target in LAYER_TARGETS):
        raise UsageError("static scales are a model's own and are not taken here; use another granularity")
    device = resolve_device(device)
    run_dtype = resolve_dtype(dtype, device)
    haystack = load_text(text)
    sources = [open_source(model) for model in models]
    for source in sources:
        source.require_transformer("attention-map")
        _ = source.tokenizer
    names = model_names(list(models))
    attention_by_model = [
        _map_model(load(source, recipe, run_dtype, device), source, names[path], haystack, plan, progress)
        for path, source in zip(models, sources, strict=True)
    ]
    settings = {
        "text": text_digest(haystack),
        "items_format": needle.ITEMS_FORMAT,
        "plan": asdict(plan),
        "dtype": str(run_dtype).removeprefix("torch."),
        "versions": versions(),
    } | provenance()
    return AttentionMaps(attention_by_model, settings)


def _map_model(
    model: DiffTransformer, source: Source, name: str, haystack: str, plan: needle.NeedlePlan, progress: Progress
) -> ModelAttention:
    items = needle.make_checked_items(TorchModel(model, source.tokenizer), haystack, plan)
    observed_at: dict[tuple[int, float], list[tuple[Tensor, bool]]] = {}
    for number, item in enumerate(items, 1):
        observation = attention_by_part(model, make_prompt(source.tokenizer, item, model.config.vocab_size))
        observed_at.setdefault((item.length, item.depth), []).append(observation)
        progress(number, len(items), name)
    model.check_quantizers_ran()
    places = [_mean_at(*place, observed) for place, observed in sorted(observed_at.items())]
    return ModelAttention(
        name,
        model.config.diff_spec.attention_name,
        source.fingerprint,
        model.recipe.to_dict(),
        needle.needle_digest(items),
        places,
    )


@torch.inference_mode()
def attention_by_part(model: DiffTransformer, prompt: Prompt) -> tuple[Tensor, bool]:
    """The last position's attention by part of the prompt, and whether it predicts the number's first token.

    Returns:
        float64 [layers, kinds, parts]: kinds are `SHARE`, `SIGNED` and the model's `MAPS`, parts `PARTS`.

    Raises:
        NonFiniteError: the model computes NaN or infinity.
    """
    walk = model.new_layer_runner(len(prompt.ids))
    parts = one_hot(torch.tensor(prompt.parts), len(PARTS)).double()
    x = walk.embed(torch.tensor([prompt.ids], device=model.device))
    sums_by_layer = []
    for layer in walk.layers:
        x, weights, maps = last_weights(walk, layer, x)
        share = weights.abs() / weights.abs().sum(-1, keepdim=True)
        sums_by_layer.append(torch.stack([share, weights, *maps]).mean(1).cpu().double() @ parts)
    logits = model.lm_head(model.model.norm(x[0, -1]))
    sums = torch.stack(sums_by_layer)
    require_finite(sums)
    require_finite(logits)
    return sums, int(logits.argmax()) == prompt.answer


@contextmanager
def record_calls(attention: PairAttention) -> Iterator[list[AttentionCall]]:
    """Record the calls that an attention makes inside this context, in order."""
    calls: list[AttentionCall] = []

    def choose(call: AttentionCall, name: str) -> Backend:
        if call.meter is attention.meter:
            calls.append(call)
        return backend_for(call, name)

    # The decode kernel makes no call.
    without_kernel = patch.object(FusedCache, "attend", lambda *_, **__: None)
    with patch.object(modules, "backend_for", choose), without_kernel:
        yield calls


def last_weights(walk: LayerRunner[Tensor], layer: DiffLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's output, and the weights that its last position gives each position's value, under the model's recipe.

    They are those of the very call that the layer makes.

    Args:
        walk: walk over the model.
        layer: layer that is run.
        x: [1, T, D] its input.

    Returns:
        [1, T, D]; [h, T], the weights: map 1 - λ·map 2, or the only map; and [maps, h, T], each map's softmax.
    """
    with record_calls(layer.self_attn) as calls:
        x = walk.run_layer(layer, x)
    weights, maps = attention_weights(calls[0], x.shape[1] - 1)
    return x, weights[0, :, 0], maps[:, 0, :, 0]


def _mean_at(length: int, depth: float, observed: list[tuple[Tensor, bool]]) -> Place:
    layers = torch.stack([weights for weights, _ in observed]).mean(0)
    right = sum(is_right for _, is_right in observed) / len(observed)
    return Place(length, depth, len(observed), right, _by_name(layers.mean(0)), [_by_name(layer) for layer in layers])


def _by_name(weights: Tensor) -> Weights:
    """Weights [kinds, parts] by the names of kinds and parts."""
    kinds = (SHARE, SIGNED, *MAPS)[: len(weights)]
    rounded = [[round(weight, 6) for weight in parts] for parts in weights.tolist()]
    return {kind: dict(zip(PARTS, parts, strict=True)) for kind, parts in zip(kinds, rounded, strict=True)}
