"""How long quantizing will take on this machine, before it starts."""

from functools import partial

import torch

from diffquant.quantization.plan import QuantizationPlan
from diffquant.quantization.roundings import rounding_named
from diffquant.scheme import Scheme
from diffquant.source.source import Source
from diffquant.source.weight_source import WeightSource
from diffquant.support.machine import cores
from diffquant.support.progress import silent
from diffquant.support.speed import quickest, seconds_per_product

# Rows and columns of what is timed: some milliseconds each.
_ROWS, _WIDTH = 64, 1024
# Tokens that a rule reads where nothing else is said.
_TOKENS = 16384


def estimated_seconds(source: Source | WeightSource, plan: QuantizationPlan) -> float:
    """Seconds that packing the weights of a plan will take here, by what a sample of the work takes now.

    A rule that reads a text takes as long as its `work` products with every weight, for each token. Of any other rule
    a block of random weights is rounded; where one scale spans all rows, that block has one, too.
    """
    settings = plan.recipe.rounding
    rounding = rounding_named(settings.name)
    by_scheme: dict[Scheme, int] = {}
    for tensor in plan.tensors:
        if tensor.scheme.quantizes:
            by_scheme[tensor.scheme] = by_scheme.get(tensor.scheme, 0) + tensor.elements
    weights = sum(by_scheme.values())
    if rounding.needs_text:
        return seconds_per_product() * rounding.work * weights * (settings.tokens or _TOKENS)
    round_rows = rounding.prepare(source, plan.schemes, settings, silent).round
    total = 0.0
    for scheme, elements in by_scheme.items():
        values = torch.randn(_ROWS, 8 * (scheme.size or _WIDTH // 8))
        total += elements * quickest(partial(round_rows, "", values, scheme, torch.bfloat16)) / values.numel()
    return total / cores()
