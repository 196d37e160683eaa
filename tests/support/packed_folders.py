"""Folders as GPTQ and AWQ libraries write them, packed bit by bit in NumPy from the formats' descriptions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import edit_json, write_checkpoint

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_packed(
    folder: Path,
    method: str,
    source: str = "llama",
    *,
    bits: int = 4,
    size: int = 32,
    changes: Any = None,
    **entry: Any,
) -> dict[str, np.ndarray]:
    """A random checkpoint of a source with its layers' matrices packed.

    Args:
        method: "gptq" or "awq".
        size: inputs in a group; -1 for all.
        changes: entries of config.json that differ.
        entry: entries of quantization_config beside bits and group_size; with desc_act, groups are in random order.

    Returns:
        The matrices' values in float64, by name.
    """
    write_checkpoint(folder, source, torch.float16, **(changes or {}))
    tensors, expected = load_file(folder / "model.safetensors"), {}
    generator = np.random.default_rng(7)
    for name in [name for name in tensors if name.endswith("_proj.weight") and "lambda" not in name]:
        outputs, inputs = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        in_group = inputs if size == -1 else size
        order = np.arange(inputs) // in_group
        if entry.get("desc_act"):
            order = generator.permutation(order)
        groups = -(-inputs // in_group)
        codes = generator.integers(0, 2**bits, (inputs, outputs))
        # Version 1 has no place for a zero point of 0.
        zeros = generator.integers(0 if is_plain(method, entry) else 1, 2**bits, (groups, outputs))
        scales = (generator.uniform(0.5, 1.5, (groups, outputs)) * 2**-bits).astype(np.float16)
        expected[name] = (scales[order].astype(np.float64) * (codes - zeros[order])).T
        packed = pack_awq if method == "awq" else pack_gptq
        parts = packed(codes, zeros, order, bits, is_plain(method, entry)) | {"scales": torch.from_numpy(scales)}
        tensors |= {f"{module}.{part}": data for part, data in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = {"quant_method": method, "bits": bits, "group_size": size} | entry
    edit_json(folder / "config.json", quantization_config=stated)
    return expected


def is_plain(method: str, entry: dict[str, Any]) -> bool:
    """Whether zero points are stored as they are."""
    return method == "awq" or "gptq_v2" in (entry.get("checkpoint_format"), entry.get("format"))


def pack_gptq(
    codes: np.ndarray, zeros: np.ndarray, order: np.ndarray, bits: int, plain: bool
) -> dict[str, torch.Tensor]:
    return {
        "qweight": torch.from_numpy(bit_string(codes.T, bits).T.copy()),
        "qzeros": torch.from_numpy(bit_string(zeros if plain else zeros - 1, bits)),
        "g_idx": torch.from_numpy(order.astype(np.int32)),
    }


def pack_awq(
    codes: np.ndarray, zeros: np.ndarray, _order: np.ndarray, bits: int, _plain: bool
) -> dict[str, torch.Tensor]:
    def packed(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(bit_string(rows.reshape(len(rows), -1, 8)[..., AWQ_ORDER].reshape(len(rows), -1), bits))

    return {"qweight": packed(codes), "qzeros": packed(zeros)}


def bit_string(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, length] as int32 words [n, length·bits/32]: each code's bits in turn, lowest first."""
    single = (codes[..., None] >> np.arange(bits)) & 1
    octets = np.packbits(single.reshape(len(codes), -1).astype(np.uint8), axis=-1, bitorder="little")
    return octets.view("<i4")


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a folder by name; None takes one away."""
    file = folder / "model.safetensors"
    kept = {name: data for name, data in (load_file(file) | changes).items() if data is not None}
    save_file(kept, file, metadata={"format": "pt"})


def edit_entry(folder: Path, **changes: Any) -> None:
    """Change entries of a folder's quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", quantization_config=config["quantization_config"] | changes)
