"""The attention weights of a call, by the blocks of queries in which diffquant computes it."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffquant.attention.backends.blocks import combine_maps, iterate_softmax_blocks
from diffquant.family.call import AttentionCall
from diffquant.family.heads import repeat_noise_heads


def attention_weights(call: AttentionCall, first: int = 0) -> tuple[Tensor, Tensor]:
    """Compute the attention weights of each map, and the combined weights of values, for queries from `first` on.

    Args:
        call: any call; nothing is added to its meter.
        first: index of the first query to return.

    Returns:
        combined weights of values, [B, h, T - first, S]: g·map 1 - λ·map 2, or the only map.
        softmax of each map, [maps, B, h, T - first, S]. Noise maps that pairs share are repeated for each pair.
    """
    call = replace(call, meter=None)
    weights, maps = [], []
    for rows, block in iterate_softmax_blocks(call):
        # Only the returned queries are kept, since whole maps may not fit in memory.
        wanted = slice(max(first - rows.start, 0), None)
        maps.append(torch.stack([repeat_noise_heads(x, call.pairs) for x in block])[..., wanted, :])
        weights.append(combine_maps(call, block, rows)[..., wanted, :])
    whole, whole_maps = ([pad(x, (0, call.key_count - x.shape[-1])) for x in blocks] for blocks in (weights, maps))
    return torch.cat(whole, -2), torch.cat(whole_maps, -2)
