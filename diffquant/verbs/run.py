"""The verb `run`: continues a prompt with an exported folder."""

from collections.abc import Callable
from pathlib import Path

from diffquant.verbs import kinds
from diffquant.verbs.generate import print_and_join
from diffquant.verbs.kinds import check_arguments
from diffquant.verbs.notes import say, say_after_result


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
    text = print_and_join(generator.stream(prompt, max_new_tokens, temperature, seed, chat), on_text)
    say_after_result(str(generator.speed), aside=True)
    return text
