"""Projections of windows of text, layer by layer, on their way through a model."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from diffquant.errors import NonFiniteError
from diffquant.model.causal import CausalModel
from diffquant.model.walk import batches
from diffquant.numbers.absmax import is_finite
from diffquant.source.placement import at_hand
from diffquant.support.spelling import spelled


class Projections(NamedTuple):
    """A layer's rotated queries and keys, its values, and both as it caches them, [B, heads, T, width] each."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    cached: tuple[Tensor, Tensor]


def projected_layers(model: CausalModel, ids: Tensor, batch_tokens: int) -> Iterator[list[Projections]]:
    """Each layer's queries, keys and values under the model's recipe, one entry a batch of windows; none without any.

    Memory holds the inputs of one layer for all windows, and that layer's projections.

    Args:
        ids: [N, T] windows.
        batch_tokens: most tokens of one pass.

    Raises:
        NonFiniteError: the model computes NaN or infinity.
    """
    walk = model.walk(ids.shape[1])
    inputs = [walk.embed(batch) for batch in batches(ids, batch_tokens)]
    last = len(walk.layers) - 1
    for number, layer in enumerate(walk.layers):
        with at_hand(layer):
            projected = [(x, walk.project(layer, x)) for x in inputs]
            yield [Projections(*each, walk.cached(layer, x, each)) for x, each in projected if each is not None]
            if number == last:
                return
            inputs = [walk.run(layer, x) for x in inputs]
        if not all(is_finite(walk.hidden(x)) for x in inputs):
            raise NonFiniteError(f"layer {number} computes NaN or infinity; use {spelled('dtype', 'float32')}")


def by_token(states: Tensor) -> Tensor:
    """Keys or values [B, H, T, d] as float32 [B·T, H, d]."""
    return states.float().transpose(1, 2).flatten(0, 1)
