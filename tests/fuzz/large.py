"""Checkpoints larger than memory, and tensors as large as a checkpoint: quantizing either takes less than a gigabyte.

Files are sparse, all zeros, and take no room on a disk; what is written of them does. Each run is a process of its own,
whose memory beyond mapped files is watched.

    python -m tests.fuzz.large --gigabytes 40 --scheme 4:g32
    python -m tests.fuzz.large --tensor-gigabytes 8 --scheme 4:tensor
"""

import argparse
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffquant.model.adapters import adapter_for
from diffquant.model.blocks import Shape
from tests.support.apart import quantize_once
from tests.support.synthetic import sized_diffllama

LIMIT = 10**9
_SHARD = 5 * 10**9
_WIDTH = 2048


def of_one_layer(tensor_gigabytes: float) -> dict[str, Any]:
    """Config of a DiffLlama of one layer whose MLP is three matrices of so many times 10^9 bytes in bfloat16."""
    inner = round(tensor_gigabytes * 1e9 / 2 / _WIDTH / 32) * 32
    return sized_diffllama(0) | {"num_hidden_layers": 1, "intermediate_size": inner}


def write_sparse(folder: Path, config: dict[str, Any]) -> int:
    """Write a checkpoint of zeros in bfloat16, in sparse files of about 5 GB; returns the bytes of its tensors."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(_shards(config)):
        file, end, header = f"model-{number:05d}.safetensors", 0, {}
        for name, shape in shapes.items():
            start, end = end, end + _nbytes(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / file, 8 + len(text) + end)
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def _shards(config: dict[str, Any]) -> Iterator[dict[str, Shape]]:
    shard: dict[str, Shape] = {}
    for name, shape in adapter_for(config).source_shapes().items():
        if shard and sum(map(_nbytes, shard.values())) + _nbytes(shape) > _SHARD:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def _nbytes(shape: Shape) -> int:
    nbytes = 2
    for size in shape:
        nbytes *= size
    return nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gigabytes", type=float, help="of a whole checkpoint")
    size.add_argument("--tensor-gigabytes", type=float, help="of each of the three matrices of one layer's MLP")
    parser.add_argument("--scheme", default="4:g32")
    parser.add_argument("--place", type=Path, help="folder with room for a third of the checkpoint")
    arguments = parser.parse_args()
    whole, tensor = arguments.gigabytes, arguments.tensor_gigabytes
    with tempfile.TemporaryDirectory(dir=arguments.place) as place:
        nbytes = write_sparse(Path(place) / "source", of_one_layer(tensor) if tensor else sized_diffllama(whole))
        run = quantize_once(Path(place) / "source", Path(place) / "out", arguments.scheme)
    print(
        f"{nbytes / 1e9:.2f} GB{f' in tensors of {tensor:g} GB' if tensor else ''}, {arguments.scheme}: "
        f"{run['peak_anonymous'] / 1e6:.0f} MB beyond mapped files, {run['process_seconds']:.0f} s"
    )
    return 1 if run["peak_anonymous"] >= LIMIT else 0


if __name__ == "__main__":
    raise SystemExit(main())
