"""Torch models as language models: `DiffTransformer`, and any causal model with transformers' interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import Cache, DynamicCache, PreTrainedModel

from diffquant.checkpoints.placement import move_to_compute_device
from diffquant.checkpoints.tokens import end_token, max_length
from diffquant.measure import has_scales_across_keys
from diffquant.measure.language_model import LanguageModel, ModelOutputs, TokenCache
from diffquant.model.adapters.sizes import MOVING_ROPE
from diffquant.recipe import Recipe

# Elements of the head's weight to convert to float32 at once: 32 MiB.
_WIDENED_ENTRIES = 1 << 23


@dataclass(frozen=True)
class HiddenStates(ModelOutputs):
    """The last hidden states at some positions, and the head that computes logits from them.

    Attributes:
        head: projection of W channels to the V tokens of the vocabulary.
    """

    head: nn.Linear

    @property
    def vocabulary_size(self) -> int:
        return self.head.out_features

    def logits(self) -> Tensor:
        logits: Tensor = self.head(self.values)
        return logits.float()

    def float32_logits(self) -> Tensor:
        wide = self.values.float()
        rows = max(1, _WIDENED_ENTRIES // self.head.in_features)
        with move_to_compute_device(self.head):
            return torch.cat([linear(wide, part.float()) for part in self.head.weight.split(rows)], -1)


class TorchModel(LanguageModel):
    """A causal model in torch.

    Args:
        model: a `DiffTransformer`, or another causal model of transformers, in eval mode.
        tokenizer: its tokenizer, or None if only token ids are used.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def recipe(self) -> Recipe:
        # A model without a recipe is not quantized.
        return getattr(self.model, "recipe", None) or Recipe()

    @property
    def can_share_prefixes(self) -> bool:
        # In a layer with a window, the first key of a call is not the sequence's first: groups of keys begin elsewhere.
        moves_groups = getattr(self.model.model, "has_windows", False) and has_scales_across_keys(self.recipe)
        return super().can_share_prefixes and not moves_groups and not self._has_moving_angles

    @property
    def can_take_padding(self) -> bool:
        return super().can_take_padding and not self._has_moving_angles

    @property
    def _has_moving_angles(self) -> bool:
        """Whether the longest sequence of a batch determines the rotary angles of all."""
        return getattr(getattr(self.model.model, "rotary_emb", None), "rope_type", "") in MOVING_ROPE

    @property
    def max_length(self) -> int:
        return max_length(self.model.config, self.tokenizer)

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.vocab_size)

    def new_cache(self) -> Cache:
        return self.model.new_cache() if hasattr(self.model, "new_cache") else DynamicCache()

    def compute_outputs(self, ids: Tensor, mask: Tensor | None = None, cache: TokenCache | None = None) -> HiddenStates:
        """Compute the last hidden states; in a `DiffTransformer`, positions are counted without padding."""
        out = self.model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=cache is not None)
        return HiddenStates(out.last_hidden_state, self.model.lm_head)

    def generate(
        self, prompt: Sequence[int], new_tokens: int, stops: Sequence[str], sampling: Mapping[str, object]
    ) -> list[int]:
        ids = torch.tensor([list(prompt)], device=self.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            stop_strings=list(stops),
            tokenizer=self.tokenizer,
            pad_token_id=end_token(self.tokenizer),
            **{"do_sample": False, **sampling},
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens
