"""The checkpoints that the goldens start from: the smallest models that ship, and random ones of each source format."""

import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from diffquant.model.adapters import adapter_for
from tests.support.checkpoints import MOTIF, NATIVE, PHI4FLASH, SIZES, UNILM
from tests.support.gguf_files import write_gguf

POCKET = Path(__file__).parents[2] / "diffquant" / "data" / "pocket"
WRITTEN = Path(__file__).parent / "written"

_STOCK = SIZES | {"head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_CONFIGS = {
    "diffllama": _STOCK | {"model_type": "diffllama", "attention_bias": False, "lambda_std_dev": 0.1},
    "llama": _STOCK | {"model_type": "llama", "attention_bias": False, "mlp_bias": False},
    **UNILM,
    **MOTIF,
    **NATIVE,
    **PHI4FLASH,
}
RANDOM = tuple(_CONFIGS)


def write_source(folder: Path, name: str) -> Path:
    """A checkpoint in `folder` under its name: a model that ships, a random one, or a GGUF file of the random Llama.

    Or what an earlier commit wrote, whose larger files are kept as .xz.
    """
    place = folder / name
    if name == "llama.gguf":
        return write_gguf(place, _write_random(folder / "llama-of-the-gguf", "llama", torch.float32))
    if name in _CONFIGS:
        return _write_random(place, name, torch.bfloat16)
    kept = (WRITTEN if (WRITTEN / name).exists() else POCKET) / name
    if kept.is_file():
        return Path(shutil.copy(kept, place))
    shutil.copytree(kept, place)
    for packed in place.rglob("*.xz"):
        packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
        packed.unlink()
    return place


def _write_random(folder: Path, name: str, dtype: torch.dtype) -> Path:
    """NumPy promises that `RandomState` draws the same numbers in every version; torch promises nothing of the kind."""
    config = {"num_hidden_layers": 2, "eos_token_id": None} | _CONFIGS[name]
    if name in PHI4FLASH:
        config["num_hidden_layers"] = PHI4FLASH[name]["num_hidden_layers"]
    draws = np.random.RandomState(1)
    folder.mkdir()
    tensors = {}
    for tensor, shape in sorted(adapter_for(config).source_shapes().items()):
        normal = draws.standard_normal(shape) * 0.3 + (1.0 if "norm" in tensor else 0.0)
        tensors[tensor] = torch.from_numpy(normal).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
