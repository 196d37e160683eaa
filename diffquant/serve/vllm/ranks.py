"""Which heads each tensor-parallel rank computes: whole pairs, with both maps, their keys and their values."""

from typing import Any

from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.heads import PROJECTIONS
from diffquant.family.spec import DiffSpec
from diffquant.serve.modeling_diffquant import PlainHeads


def heads_of_rank(spec: dict[str, Any], ranks: int) -> PlainHeads:
    """The heads that each of some tensor-parallel ranks computes, in the order in which `row_orders` lays their rows.

    Raises:
        UsageError: the ranks would part a pair from its noise map or its keys.
    """
    heads = PlainHeads(spec | {"rope": "none"})
    if ranks == 1:
        return heads
    noises = heads.pairs // heads.sharing if heads.has_noise else heads.pairs
    stored = heads.kv_pairs // heads.repeats
    # One map of keys can be on several ranks, as vLLM's layer has it; of two it would repeat each by itself.
    is_repeated = heads.key_maps == heads.repeats == 1 and ranks % stored == 0
    if noises % ranks or (stored % ranks and not is_repeated):
        raise UsageError(
            f"tensor_parallel_size {ranks} does not divide {noises} pairs or groups of pairs and {stored} KV pairs: "
            "a pair's maps, keys and values have to be on one rank"
        )
    of_rank = {"pairs": heads.pairs // ranks, "kv_pairs": max(heads.kv_pairs // ranks, 1), "head_order": "adjacent"}
    return PlainHeads(spec | {"rope": "none"} | of_rank)


def row_orders(spec: dict[str, Any], ranks: int) -> dict[str, Tensor]:
    """For each projection whose rows move, the row of the checkpoint that each row is.

    Ranks take rows in a row, so that all signal heads before all noise heads have to become pairs. One rank takes them
    as they are, and so takes LoRA adapters.
    """
    if ranks == 1 or not PlainHeads(spec).are_in_halves:
        return {}
    known = {name: value for name, value in spec.items() if name not in ("kv_repeats", "output")}
    stored, served = DiffSpec(**known), DiffSpec(**known | {"head_order": "adjacent"})
    orders = {name: stored.layout.order_as(served.layout, name) for name in PROJECTIONS}
    return {name: order for name, order in orders.items() if order is not None}
