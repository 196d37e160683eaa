"""Converts the `attention_mask` and `position_ids` that transformers' callers pass to a `Mask`."""

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.mask import Mask

# Added to a logit, this hides a key from softmax: callers use the lowest number of the dtype, or -1e4.
_HIDING = -1e4


def read_mask(attention_mask: Tensor | None, batch: int, length: int, keys: int) -> Mask:
    """The mask of T = `length` new tokens over S = `keys` cached and new ones.

    Args:
        attention_mask: validity [B, S], 0 where padding; or which keys each query sees, [B or 1, 1, T, S], in place of
            causal order: bool, or numbers to add to logits, 0 and the lowest of their dtype. None means causal order
            without padding.

    Raises:
        UsageError: it has another form or shape, or holds numbers that neither show nor hide a key.
    """
    if attention_mask is None:
        return Mask()
    if not isinstance(attention_mask, Tensor):
        raise UsageError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    shape = list(attention_mask.shape)
    if shape == [batch, keys]:
        return Mask(None if attention_mask.all() else attention_mask.bool())
    if attention_mask.dim() == 4 and shape[0] in (1, batch) and shape[1:] == [1, length, keys]:
        return Mask(seen=_seen(attention_mask))
    raise UsageError(
        f"attention_mask must be [{batch}, {keys}] over cached and new tokens, or [{batch}, 1, {length}, {keys}] with "
        f"what each new one sees, the same for all heads; got {shape}"
    )


def _seen(mask: Tensor) -> Tensor:
    """Which keys a 4-D mask shows."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not mask.is_floating_point() or not (seen | (mask <= _HIDING)).all():
        raise UsageError(
            "a 4-D attention_mask is bool, True where a key is seen, or of floats that are added to logits: 0 where it "
            f"is seen and the dtype's lowest where not; got {mask.dtype} from {mask.min().item()} to "
            f"{mask.max().item()}. Other numbers are a bias, which is not computed"
        )
    return seen


def packed_mask(position_ids: Tensor) -> Mask | None:
    """The mask of sequences packed into one row, recognized by positions that restart; None if there is only one.

    Args:
        position_ids: [B, T].
    """
    starts = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    if not starts.any():
        return None
    sequence = starts.cumsum(-1)
    order = torch.ones(2 * position_ids.shape[-1:], dtype=torch.bool, device=position_ids.device).tril()
    return Mask(seen=((sequence[:, :, None] == sequence[:, None]) & order)[:, None])
