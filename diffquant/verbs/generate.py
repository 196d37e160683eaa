"""The verbs `generate` and `run`: continue a prompt, with a model in torch or with an exported folder."""

from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.checkpoints.places import OffloadPlan
from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments
from diffquant.verbs.notes import choose_device, say, say_after_result

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from diffquant.checkpoints.source import Source
    from diffquant.model.causal import CausalModel

AnyModel = Annotated["Path | str | Source | CausalModel", kinds.MODEL]
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
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Continue a prompt, token by token.

        diffquant generate model --prompt 'Once upon a time' --kv 8
        print(diffquant.generate("model-4bit", "The capital of France is", max_new_tokens=8))

    Args:
        model: see `quantize`. In Python also a loaded model, with its tokenizer.
        prompt: text to continue; on the command line, - reads standard input.
        tokenizer: tokenizer of a loaded model, from `load_tokenizer`; a checkpoint contains its tokenizer.
        recipe: see `quantize`.
        scales: ranges that diffquant calibrate wrote, for static schemes such as 8:static.
        max_new_tokens: maximum number of tokens to generate.
        temperature: sampling temperature; 0 always takes the likeliest token.
        seed: seed of sampling.
        chat: wrap the prompt in the model's chat template.
        dtype: dtype of the model: float32, bfloat16 or float16; the checkpoint's by default.
        attention: attention backend: auto, naive, flashdiff1, flashdiff2, triton, triton-int8, ...
        device: see `search`.
        device_map: spread models over devices, then main memory, then disk, instead of `device`.
        offload_folder: folder for weights that `device_map` puts on disk.
        on_text: function called with each piece of text as it is generated.

    Returns:
        The continuation, without the prompt and special tokens.

    Raises:
        UsageError: the prompt is empty, a loaded model comes without a tokenizer or with a recipe, or the chat template
            is missing.
        DiffQuantError: the checkpoint or the recipe cannot be used, see `load`.
    """
    wanted = None if recipe is None else Recipe.parse(recipe)
    import torch

    from diffquant.attention import check_backend
    from diffquant.checkpoints.ranges import check_ranges_used
    from diffquant.checkpoints.source import open_source
    from diffquant.model.causal import CausalModel
    from diffquant.quantization.loading import load
    from diffquant.support.devices import as_dtype
    from diffquant.verbs.generation import stream

    check_backend(attention)
    if isinstance(tokenizer, str | PathLike):
        raise UsageError(
            f"tokenizer is a path, not a tokenizer; use tokenizer=diffquant.load_tokenizer({str(tokenizer)!r})"
        )
    if isinstance(model, CausalModel):
        for_loading = (wanted, scales, dtype, device_map, offload_folder)
        if tokenizer is None:
            raise UsageError("a loaded model needs its tokenizer: tokenizer=diffquant.load_tokenizer(checkpoint)")
        if any(given is not None for given in for_loading) or (attention, device) != ("auto", "auto"):
            raise UsageError(
                "recipe, dtype, device and device_map apply only when a model is loaded, but this one is loaded "
                "already; use its methods apply_recipe and to"
            )
        loaded = model
    else:
        places, chosen = OffloadPlan.of(device, device_map, offload_folder), choose_device(device)
        wanted_dtype = as_dtype(dtype, chosen)
        source = open_source(model)
        tokenizer = tokenizer or source.tokenizer
        loaded = load(source, wanted, wanted_dtype, chosen, scales=scales, device_map=places)
        check_ranges_used(scales, [loaded.recipe])
        loaded.use_attention(attention)
    drawn_on = [loaded.device] if loaded.device.type == "cuda" else []
    with torch.random.fork_rng(drawn_on):
        torch.manual_seed(seed)
        return _print_and_join(stream(loaded, tokenizer, prompt, max_new_tokens, temperature, chat), on_text)


@check_arguments
def run(
    folder: kinds.Exported,
    prompt: kinds.Prompt,
    *,
    max_new_tokens: kinds.Count = 64,
    temperature: kinds.Temperature = 0.0,
    seed: kinds.Seed = 0,
    chat: bool = False,
    threads: kinds.Threads = 0,
    device: kinds.Name = "auto",
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Continue a prompt in ONNX Runtime.

        diffquant run model-onnx --prompt 'Once upon a time'
        print(diffquant.run("model-onnx", "Once upon a time"))

    Speed and memory go to stderr.

    Args:
        folder: a folder that `diffquant export` wrote.
        prompt, max_new_tokens, temperature, seed, chat, device, on_text: see `generate`.
        threads: number of ONNX Runtime's threads; 0 uses all cores.

    Returns:
        The continuation, without the prompt and special tokens.

    Raises:
        CheckpointError: the folder is damaged, was changed since it was exported, or has no cache or no tokenizer.
        UsageError: the prompt is empty or longer than the model's context, or there is no chat template.
        MissingDependencyError: ONNX Runtime is not installed, or cannot use the device.
    """
    from diffquant.onnx import check_installed

    check_installed()
    from diffquant.onnx.runtime.device import describe_cpu_nodes
    from diffquant.onnx.runtime.generation import Generator

    generator = Generator(Path(folder), threads, device=device)
    if device == "auto" and generator.model.device.kind != "cpu":
        say(f"runs on {generator.model.device.name}")
    if fallbacks := generator.model.cpu_node_counts:
        say(describe_cpu_nodes(fallbacks))
    text = _print_and_join(generator.stream(prompt, max_new_tokens, temperature, seed, chat), on_text)
    say_after_result(str(generator.speed), aside=True)
    return text


def _print_and_join(pieces: Iterable[str], on_text: Callable[[str], None] | None) -> str:
    """Pass text pieces to `on_text` as they arrive and return them joined."""
    made = []
    for piece in pieces:
        made.append(piece)
        if on_text is not None:
            on_text(piece)
    return "".join(made)
