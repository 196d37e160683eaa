"""The same prompt continued in torch and in ONNX Runtime, by the same low-bit model."""

from collections.abc import Callable
from pathlib import Path

import torch

from diffquant.errors import MissingDependencyError
from diffquant.generation import stream
from diffquant.loading import load
from diffquant.source.source import open_source
from diffquant.support.progress import progress_for


def speak_twice(
    checkpoint: Path, exported: Path, prompt: str, new_tokens: int, overwrite: bool, say: Callable[[str], None]
) -> None:
    """Continue a prompt by a checkpoint, export it, and continue by the export.

    Without the packages that exporting needs, the second half is left out and what is missing is said.
    """
    from diffquant.export import require

    low = open_source(checkpoint)
    say("torch:        " + prompt + "".join(stream(load(low, dtype=torch.float32), low.tokenizer, prompt, new_tokens)))
    try:
        require()
    except MissingDependencyError as missing:
        say(f"ONNX Runtime is left out: {missing}")
        return
    from diffquant.export import ExportOptions, Generator, export

    # Float32 activations, as in torch, so that the sentence is the same to the letter.
    options = ExportOptions(accuracy_level=1)
    summary = export(low, exported, options, overwrite=overwrite, progress=progress_for("export")).summary()
    generator = Generator(exported)
    say("ONNX Runtime: " + prompt + "".join(generator.stream(prompt, new_tokens)))
    say(f"{generator.speed}\n{summary}")
    say(f"`diffquant verify {exported} {checkpoint}` compares the two layer by layer.\n")
