"""A GGUF file as a checkpoint, read by transformers' own loader."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.formats.reader import Checkpoint, TensorInfo

# What transformers adds to every config; none of it describes the model.
_LOADING_KEYS = {
    "quantization_config",
    "transformers_version",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
}


class GgufCheckpoint(Checkpoint):
    """A GGUF file, dequantized to float32 in memory when it is opened.

    Its tensors already carry the file's own quantization: a weight sweep on it starts from there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        model = _load(path)
        self.config = _describing(model.config.to_dict()) | {
            "architectures": [type(model).__name__],
            "dtype": "float32",
        }
        self._data = _parameters(model)
        self.tensors = {
            name: TensorInfo(tensor.dtype, tuple(tensor.shape), path.name) for name, tensor in self._data.items()
        }

    def read(self, name: str) -> Tensor:
        return self._data[name]

    def weight_files(self) -> list[Path]:
        return [self.path]

    def write_side_files(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        except Exception as error:
            raise CheckpointError(f"cannot read the tokenizer in {self.path}: {error}") from error
        tokenizer.save_pretrained(folder)
        tokens = {
            key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in self.config
        }
        (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")


def _load(path: Path) -> Any:
    """The file as a transformers model in float32.

    Raises:
        CheckpointError: the file is absent, damaged, or of an architecture transformers does not read.
    """
    from transformers import AutoModelForCausalLM

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        # Its progress bars ignore transformers' own switch and go to stderr, terminal or not.
        with contextlib.redirect_stderr(io.StringIO()):
            return AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, **_dense_loading()
            )
    except Exception as error:
        raise CheckpointError(f"transformers cannot read {path}: {error}") from error


def _dense_loading() -> dict[str, Any]:
    """Ask for dense tensors: newer versions keep a GGUF's blocks packed where a kernel is installed."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _describing(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in _LOADING_KEYS and not k.startswith("_") and v is not None}


def _parameters(model: Any) -> dict[str, Tensor]:
    """Parameters by name, a tied head once."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors
