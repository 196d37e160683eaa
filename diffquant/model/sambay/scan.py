"""Mamba-1's recurrence and its convolution, in plain torch and good to float64.

Source: arXiv 2312.00752, algorithm 2.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv1d

# Tokens whose decays are held at once: the memory does not grow with the sequence.
_BLOCK_TOKENS = 64


def selective_scan(
    u: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence h ← exp(Δ·A)∘h + Δ·B·u, read out as y = C·h + D∘u, a token after the other.

    Args:
        u: inputs [B, T, E].
        step: Δ [B, T, E], above zero; 0 where a token leaves the state as it is.
        a: A [E, N], below zero.
        b, c: B and C [B, T, N].
        d: D [E].
        state: h [B, E, N] before the first token.

    Returns:
        y [B, T, E], and h after the last token; all in the dtype of the arguments, which is one.
    """
    if not u.shape[1]:
        return u, state
    read: list[Tensor] = []
    parts = (x.split(_BLOCK_TOKENS, 1) for x in (u, step, b, c))
    for inputs, steps, into, out_of in zip(*parts, strict=True):
        decay = torch.exp(steps[..., None] * a)
        fed = (steps * inputs)[..., None] * into[:, :, None, :]
        states = []
        for token in range(inputs.shape[1]):
            state = decay[:, token] * state + fed[:, token]
            states.append(state)
        read.append(torch.einsum("bten,btn->bte", torch.stack(states, 1), out_of))
    return torch.cat(read, 1) + d * u, state


def causal_convolution(u: Tensor, weight: Tensor, bias: Tensor | None, earlier: Tensor) -> Tensor:
    """Each channel's convolution over a token and those before it.

    Args:
        u: [B, T, E].
        weight: [E, 1, W], that of the newest token last.
        bias: [E], if there is one.
        earlier: [B, W - 1, E] the inputs before the first token.

    Returns:
        [B, T, E].
    """
    if not u.shape[1]:
        return u
    inputs = torch.cat([earlier, u], 1).mT
    return conv1d(inputs, weight, bias, groups=len(weight)).mT


def last_inputs(u: Tensor, counts: Tensor | None, earlier: Tensor) -> Tensor:
    """The inputs that the convolution of later tokens will see.

    Args:
        u: [B, T, E].
        counts: [B] number of valid tokens at the start of each sequence; None if all are valid.
        earlier: [B, W - 1, E] the inputs before the first token.

    Returns:
        [B, W - 1, E].
    """
    inputs, kept = torch.cat([earlier, u], 1), earlier.shape[1]
    if counts is None:
        return inputs[:, inputs.shape[1] - kept :]
    places = counts[:, None] + torch.arange(kept, device=u.device)
    return inputs.take_along_dim(places[..., None], 1)
