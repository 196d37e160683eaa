"""A model as small as a rented machine takes it: whole codes of each row, and their lengths by how often they occur.

    python -m research.bench.gpu.carried pack MODEL FOLDER
    python -m research.bench.gpu.carried unpack FOLDER PLAIN

A row's step is a share of its root mean square, so all matrices, the embedding too, take as many bits per weight: of
normal weights log2(4.13 / STEP), which is 3.4. No format that kernels read is as small at the same error, and nothing
has to run on it: `unpack` writes a plain folder in bfloat16. Both need transformers, and a .gguf file gguf, where it is
packed.
"""

import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from diffquant.errors import UsageError

STEP = 0.4
_LARGEST = 127
_FILE = "carried.safetensors"


def coded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [out, in] as compressed bytes of its codes, and a float32 step for each row [out, 1].

    Rows with entries so large that int8 would not hold their code take a larger step.
    """
    weight = weight.float()
    step = torch.maximum(STEP * weight.square().mean(1, keepdim=True).sqrt(), weight.abs().amax(1, True) / _LARGEST)
    codes = (weight / torch.where(step == 0, 1.0, step)).round().to(torch.int8)
    # No repeats are looked for, which random codes have none of: what is saved is in their lengths.
    lengths = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    stored = lengths.compress(codes.numpy().tobytes()) + lengths.flush()
    return torch.frombuffer(bytearray(stored), dtype=torch.uint8), step


def decoded(stored: Tensor, step: Tensor) -> Tensor:
    """The matrix [out, in] that `coded` made into these."""
    codes = torch.frombuffer(bytearray(zlib.decompress(stored.numpy().tobytes())), dtype=torch.int8)
    return codes.view(len(step), -1) * step


def pack(model: Path, folder: Path) -> None:
    """Write what `unpack` needs of a model: a folder of 16-bit weights that transformers loads, or a .gguf file.

    Raises:
        UsageError: its weights are packed.
    """
    place, options = (model.parent, {"gguf_file": model.name}) if model.suffix == ".gguf" else (model, {})
    loaded = AutoModelForCausalLM.from_pretrained(place, **options)
    tensors = {}
    for name, weight in loaded.state_dict().items():
        if name == "lm_head.weight" and loaded.config.tie_word_embeddings:
            continue
        if not weight.is_floating_point():
            raise UsageError(f"{model}: {name} holds codes; give the model that it was made of")
        if weight.dim() == 2:
            tensors[f"{name} codes"], tensors[f"{name} step"] = coded(weight)
        else:
            tensors[name] = weight.contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / _FILE)
    loaded.config.dtype = "bfloat16"
    # A GGUF file's, whose weights are floats by now.
    vars(loaded.config).pop("quantization_config", None)
    loaded.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, **options).save_pretrained(folder)


def unpack(folder: Path, plain: Path) -> None:
    """Write a folder that transformers and diffquant load."""
    carried = load_file(folder / _FILE)
    tensors = {}
    for key, tensor in carried.items():
        name, _, part = key.partition(" ")
        if part != "step":
            weight = decoded(tensor, carried[f"{name} step"]) if part else tensor
            tensors[name] = weight.bfloat16()
    plain.mkdir(parents=True)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    for file in folder.iterdir():
        if file.name != _FILE:
            (plain / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
