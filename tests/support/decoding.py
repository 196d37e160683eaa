"""What a model that reads a text piece by piece owes, whatever its layers keep of the past."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffquant.model.causal import CausalModel


def check_pieces(model: CausalModel, ids: Tensor, pieces: Sequence[int], tolerance: float) -> None:
    """Assert that ids [B, T], read in pieces of these lengths, have the logits of reading at once."""
    cache = model.new_cache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split(pieces, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits, rtol=0, atol=tolerance)


def check_padding(model: CausalModel, ids: Tensor, tolerance: float) -> None:
    """Assert that 17 ids have the same logits with 6 of padding among, before or behind them, also read in pieces."""
    wanted = model(ids[None]).logits[0]
    gaps = [torch.tensor(places) for places in ([*range(6), 9, 10, *range(14, 23)], range(6, 23), range(17))]
    padded, mask = torch.zeros(3, 23, dtype=torch.long), torch.zeros(3, 23, dtype=torch.long)
    for row, places in enumerate(gaps):
        padded[row, places], mask[row, places] = ids, 1
    for pieces in ([23], [11, 1, 11], [1] * 23):
        cache, logits, done = model.new_cache(), [], 0
        for part in padded.split(pieces, 1):
            done += part.shape[1]
            logits.append(model(part, attention_mask=mask[:, :done], past_key_values=cache).logits)
        read = torch.cat(logits, 1)
        for row, places in enumerate(gaps):
            torch.testing.assert_close(read[row, places], wanted, rtol=0, atol=tolerance)
