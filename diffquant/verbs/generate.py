"""The verb `generate`: the text that follows a prompt."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.checkpoints.places import Places
from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments
from diffquant.verbs.notes import chosen_device

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from diffquant.checkpoints.source import Source
    from diffquant.model.causal import CausalModel

AnyModel = Annotated["Path | str | Source | CausalModel", kinds.Kind(Path, "MODEL", by_place=True)]
Dtype = Annotated["torch.dtype | str", kinds.Kind(str, "NAME")]


@check_arguments
def generate(
    model: AnyModel,
    prompt: kinds.Prompt,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    recipe: kinds.RecipeFile | None = None,
    scales: kinds.File | None = None,
    max_new_tokens: kinds.Count = 64,
    temperature: kinds.Temperature = 0.0,
    seed: kinds.Seed = 0,
    chat: bool = False,
    dtype: Dtype | None = None,
    attention: kinds.Name = "auto",
    device: kinds.Name = "auto",
    device_map: kinds.DeviceMap | None = None,
    offload_folder: kinds.Folder | None = None,
    said: Callable[[str], None] | None = None,
) -> str:
    """Continue a prompt, token by token.

        diffquant generate model --prompt 'Once upon a time' --kv 8
        print(diffquant.generate("model-4bit", "The capital of France is", max_new_tokens=8))

    Args:
        model: as `quantize` takes it. In Python also a model that is loaded, with its tokenizer.
        prompt: text to continue; on the command line, - reads standard input.
        tokenizer: tokenizer of a model that is loaded, as `load_tokenizer` gives it; a checkpoint has its own.
        recipe: as `quantize` takes it.
        scales: ranges that diffquant calibrate wrote, for static schemes such as 8:static.
        max_new_tokens: largest number of tokens to add to the prompt.
        temperature: randomness of the choice of tokens; 0 takes the likeliest.
        seed: seed of the random choice where the temperature is above 0.
        chat: wrap the prompt in the model's chat template.
        dtype: dtype of the model: float32, bfloat16 or float16; the checkpoint's by default.
        attention: attention backend: auto, naive, flashdiff1, flashdiff2, triton, triton-int8, ...
        device: as `search` takes it.
        device_map: spread models over devices, then main memory, then the disk, in place of `device`.
        offload_folder: folder where `device_map` puts what only the disk has room for.
        said: function called with each piece of text as it comes.

    Returns:
        The continuation alone, without special tokens.

    Raises:
        UsageError: the prompt is empty, a loaded model comes without a tokenizer or with a recipe, or the chat template
            is missing.
        DiffQuantError: as `load` raises it.
    """
    import transformers

    from diffquant.attention import check_backend
    from diffquant.checkpoints.ranges import check_ranges_used
    from diffquant.checkpoints.source import open_source
    from diffquant.model.causal import CausalModel
    from diffquant.quantization.loading import load
    from diffquant.support.devices import as_dtype
    from diffquant.verbs.generation import stream

    wanted = None if recipe is None else Recipe.parse(recipe)
    check_backend(attention)
    if isinstance(model, CausalModel):
        for_loading = (wanted, scales, dtype, device_map, offload_folder)
        if tokenizer is None:
            raise UsageError(
                "a model that is loaded needs its tokenizer: tokenizer=diffquant.load_tokenizer(checkpoint)"
            )
        if any(given is not None for given in for_loading) or (attention, device) != ("auto", "auto"):
            raise UsageError(
                "recipe, dtype, device and its map are for loading; this model is loaded already: apply_recipe, to"
            )
        if isinstance(tokenizer, str):
            raise UsageError(f"tokenizer is a text: tokenizer=diffquant.load_tokenizer({tokenizer!r}) gives one")
        loaded = model
    else:
        places, chosen = Places.of(device, device_map, offload_folder), chosen_device(device)
        wanted_dtype = as_dtype(dtype, chosen)
        source = open_source(model)
        tokenizer = tokenizer or source.tokenizer
        loaded = load(source, wanted, wanted_dtype, chosen, scales=scales, device_map=places)
        check_ranges_used(scales, [loaded.recipe])
        loaded.use_attention(attention)
    if temperature:
        transformers.set_seed(seed)
    return print_and_join(stream(loaded, tokenizer, prompt, max_new_tokens, temperature, chat), said)


def print_and_join(pieces: Iterable[str], said: Callable[[str], None] | None) -> str:
    """Pass on text pieces as they arrive and return them joined."""
    made = []
    for piece in pieces:
        made.append(piece)
        if said is not None:
            said(piece)
    return "".join(made)
