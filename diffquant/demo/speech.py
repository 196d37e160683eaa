"""The same prompt continued in torch and in ONNX Runtime, by the same low-bit model."""

from collections.abc import Callable, Iterable
from pathlib import Path
from shlex import quote

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
    say(
        "torch:        " + _continued(prompt, stream(load(low, dtype=torch.float32), low.tokenizer, prompt, new_tokens))
    )
    try:
        require()
    except MissingDependencyError as missing:
        say(f"ONNX Runtime is left out: {missing}")
        return
    from diffquant.export import ExportOptions, Generator, export

    # Float32 activations beside 4-bit weights, as in torch. The sentences may part by the cache and by the embedding,
    # which has 8 bits and, as the head, rounded activations.
    options = ExportOptions.parse(accuracy_level=1, embed_bits=8)
    summary = export(low, exported, options, overwrite=overwrite, progress=progress_for("export")).summary()
    generator = Generator(exported)
    say("ONNX Runtime: " + _continued(prompt, generator.stream(prompt, new_tokens)))
    say(f"{generator.speed}\n{summary}")
    say(f"To compare the two layer by layer:\n  diffquant verify {quote(str(exported))} {quote(str(checkpoint))}\n")


def _continued(prompt: str, pieces: Iterable[str]) -> str:
    """A prompt and what follows it; tokenizers of words leave out the space between them."""
    text = "".join(pieces)
    return prompt + ("" if text[:1].isspace() else " ") + text
