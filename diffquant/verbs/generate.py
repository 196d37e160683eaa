"""The verb `generate`: the text that follows a prompt."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from diffquant.errors import UsageError
from diffquant.generation import stream
from diffquant.loading import load
from diffquant.model.causal import CausalModel
from diffquant.recipe import RecipeLike
from diffquant.source.places import DeviceMap
from diffquant.source.source import Source, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def generate(
    model: Path | str | Source | CausalModel,
    prompt: str,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    recipe: RecipeLike | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    dtype: torch.dtype | str | None = None,
    device: str = "auto",
    device_map: DeviceMap | None = None,
    offload_folder: Path | str | None = None,
) -> str:
    """Continue a prompt.

        print(diffquant.generate("checkpoint-4bit", "The capital of France is", max_new_tokens=8))

    Args:
        model: checkpoint, which is loaded for this one text; or a model that is loaded, with its tokenizer.
        prompt: text to continue.
        tokenizer: tokenizer of a model that is loaded, as `load_tokenizer` gives it; a checkpoint has its own.
        recipe: recipe to simulate, as `Recipe.parse` takes it; not for a model that is loaded.
        max_new_tokens: largest number of tokens that follow the prompt.
        temperature: divisor of the vocabulary logits that tokens are drawn from; 0 decodes greedily.
        seed: seed of the draws where the temperature is above 0.
        chat: whether the prompt is wrapped in the tokenizer's chat template, as a user's message.
        dtype, device, device_map, offload_folder: as `load` takes them; not for a model that is loaded.

    Returns:
        The continuation alone, without special tokens.

    Raises:
        UsageError: the prompt is empty, a loaded model comes without a tokenizer or with a recipe, or the chat template
            is missing.
        DiffQuantError: as `load` raises it.
    """
    if isinstance(model, CausalModel):
        if tokenizer is None:
            raise UsageError(
                "a model that is loaded needs its tokenizer: tokenizer=diffquant.load_tokenizer(checkpoint)"
            )
        if (recipe, dtype, device, device_map, offload_folder) != (None, None, "auto", None, None):
            raise UsageError(
                "recipe, dtype, device and its map are for loading; this model is loaded already: apply_recipe, to"
            )
        loaded = model
    else:
        source = open_source(model)
        tokenizer = tokenizer or source.tokenizer
        loaded = load(source, recipe, dtype, device, device_map=device_map, offload_folder=offload_folder)
    if temperature:
        transformers.set_seed(seed)
    return "".join(stream(loaded, tokenizer, prompt, max_new_tokens, temperature, chat))
