"""Random DiffLlama checkpoints of any size, for measurements that depend on size and not on weights.

python -m diffquant.bench.synthetic diffllama-6gb --gigabytes 6
"""

import json
import zlib
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.formats.atomic_folder import staged
from diffquant.formats.row_stream import Block, Job, Shard, write_shards
from diffquant.formats.writer import OutputTensor
from diffquant.model.adapters import adapter_for
from diffquant.model.shapes import Shape
from diffquant.support.files import write_atomically
from diffquant.support.progress import Progress, progress_for, silent

_LAYER: dict[str, Any] = {
    "model_type": "diffllama",
    "architectures": ["DiffLlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}


def synthesize(folder: Path, gigabytes: float = 6.0, shards: int = 4, progress: Progress = silent) -> dict[str, Any]:
    """Write a random bfloat16 DiffLlama checkpoint of about a size.

    Args:
        folder: folder to make.
        gigabytes: size of all tensors, 10^9 bytes each; the number of layers follows from it.
        shards: number of files to spread them over.

    Returns:
        Config of the checkpoint.
    """
    config = _LAYER | {"num_hidden_layers": _layers_for(gigabytes * 1e9)}
    shapes = adapter_for(config).source_shapes()
    outputs = [OutputTensor(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    total = sum(output.nbytes for output in outputs)
    jobs = [random_job(output) for output in outputs]
    with staged(folder, {"verb": "synthesize", "config": config, "shards": shards}, total, overwrite=False) as staging:
        write_shards(_spread(jobs, shards, total), staging, total, progress)
        write_atomically(staging.folder / "config.json", json.dumps(config, indent=2) + "\n")
    return config


def random_job(output: OutputTensor) -> Job:
    """Job that makes a tensor's rows as they are written, the same for the same name every time.

    Norms are one, anything else is normal with a deviation of 0.02.
    """
    rows = output.shape[0]
    width = output.nbytes // output.dtype.itemsize // rows

    def make(first: int, last: int) -> Block:
        if "norm" in output.name:
            return Block({output.name: (first, torch.ones(last - first, dtype=output.dtype))})
        generator = torch.Generator().manual_seed(zlib.crc32(f"{output.name} {first}".encode()))
        values = torch.randn((last - first, *output.shape[1:]), generator=generator) * 0.02
        return Block({output.name: (first, values.to(output.dtype))})

    return Job(output.name, rows, width, (output,), make)


def _layers_for(nbytes: float) -> int:
    def size(layers: int) -> int:
        return 2 * sum(map(_elements, adapter_for(_LAYER | {"num_hidden_layers": layers}).source_shapes().values()))

    layer = size(2) - size(1)
    return max(1, round((nbytes - size(1)) / layer) + 1)


def _elements(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _spread(jobs: list[Job], shards: int, total: int) -> list[Shard]:
    """Files of about equal size that the jobs fill in order."""
    filled: list[list[Job]] = [[] for _ in range(shards)]
    before = 0
    for job in jobs:
        filled[min(shards - 1, before * shards // total)].append(job)
        before += job.outputs[0].nbytes
    return [Shard(None, tuple(part)) for part in filled if part]


def main(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    gigabytes: Annotated[float, typer.Option(help="Size of its tensors, about.")] = 6.0,
    shards: Annotated[int, typer.Option(min=1, help="Files to spread them over.")] = 4,
) -> None:
    """Write a random DiffLlama checkpoint."""
    synthesize(folder, gigabytes, shards, progress_for("synthesize"))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
