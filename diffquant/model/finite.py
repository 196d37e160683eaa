"""Stops generation when logits overflow, and names the layer where that began."""

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from diffquant.errors import NonFiniteError


class FiniteLogits(LogitsProcessor):
    """Refuses vocabulary logits whose maximum is not finite; -inf is allowed, since it marks excluded tokens."""

    def __init__(self, model: PreTrainedModel, attention_mask: Tensor | None, has_ids: bool) -> None:
        """A guard of one call of `generate`.

        Args:
            model: `CausalModel` that generates.
            attention_mask: [B, T] of the prompt, if it was passed.
            has_ids: whether the prompt came as tokens, so that it can be read again.
        """
        self.model = model
        self.attention_mask = attention_mask
        self.has_ids = has_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [B, V] as they are.

        Raises:
            NonFiniteError: a sequence's largest is NaN or infinite.
        """
        if not torch.isfinite(scores.amax(-1)).all():
            raise NonFiniteError(self._message(input_ids))
        return scores

    def _message(self, ids: Tensor) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        where = self._place(ids) if self.has_ids and ids.shape[1] else "the model"
        advice = "in bfloat16 or float32" if dtype == "float16" else "with weights that are finite, or with wider bits"
        return f"{where} computes NaN or infinity in {dtype}, and no token can be chosen: run it {advice}"

    def _place(self, ids: Tensor) -> str:
        """Name of the first module within the layers whose output for tokens [B, T] is not finite."""
        mask = self.attention_mask
        # One that says what each query sees is not known of those that came later.
        if mask is not None and mask.dim() != 2:
            mask = None
        if mask is not None:
            mask = mask.repeat_interleave(len(ids) // len(mask), 0)
            mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
        out = self.model.model(ids, mask, output_hidden_states=True)
        names = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(len(self.model.model.layers)))]
        is_finite = [bool(torch.isfinite(states).all()) for states in out.hidden_states]
        return next((name for name, fine in zip(names, is_finite, strict=True) if not fine), "lm_head")
