"""Presents a folder whose weights another library packed as a checkpoint of the dequantized weights.

Each file is the reader of one layout or several; importing this package registers them.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.reader import Checkpoint, TensorInfo
from diffquant.checkpoints.side_files import read_json
from diffquant.errors import CheckpointError
from diffquant.support.names import first_few, import_all

# File with ModelOpt's quantization settings; newer versions write them into config.json too.
MODELOPT_CONFIG = "hf_quant_config.json"
# Files in which these libraries repeat the settings. If there is such a file, engines assume packed weights.
_STATED_AGAIN = (MODELOPT_CONFIG, "quantize_config.json", "quant_config.json", "quantization_config.json")
# Files in which AutoGPTQ and AutoAWQ wrote the settings before config.json had an entry for them, and AutoAWQ's keys.
_STATED_ALONE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_OLDER_KEYS = {"w_bit": "bits", "q_group_size": "group_size"}
# Layers that are transformers' Conv1D, and the models that have them: their weights are [in, out], but every library
# packs them as [out, in], like those of a Linear.
CONV1D = ("c_attn", "q_attn", "c_fc", "c_proj")
_OF_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
# Number of elements to dequantize at a time when a whole matrix is read, since unpacked codes and scales take memory.
_AT_A_TIME = 1 << 22


@dataclass(frozen=True)
class EncodedMatrix:
    """A matrix that a folder stores as codes.

    Attributes:
        shape: [out, in] of the matrix, or [experts, out, in] of experts in one tensor.
        parts: names of the tensors that it is made of, the codes first.
        dtype: dtype to which the library that packed the matrix dequantizes it; diffquant writes it unpacked in it too.
        rows: function that dequantizes rows, from int64 indices [n] to float32 [n, in]. The rows of all experts are
            numbered consecutively.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    dtype: torch.dtype
    rows: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class QuantizedMatrices:
    """A folder's quantized matrices, as its reader found them.

    Attributes:
        kind: number format of the codes, for messages.
        matrices: the packed matrices, by the names that they have when unpacked.
        unused: names of tensors that are read only by engines that quantize activations or caches.
        note: clause on what such engines quantize and diffquant does not; "" if there is nothing.
    """

    kind: str
    matrices: Mapping[str, EncodedMatrix]
    unused: tuple[str, ...] = ()
    note: str = ""


# (quantization_config, the folder) -> its contents, or None for a folder whose weights are read packed.
Layout = Callable[[Mapping[str, Any], Checkpoint], QuantizedMatrices | None]
LAYOUTS: dict[str, Layout] = {}


def register(quant_method: str) -> Callable[[Layout], Layout]:
    """Register the reader of the folders whose `quantization_config` has this `quant_method`.

    A reader checks names, shapes, types and settings, and reports all problems at once; it reads no codes.
    """

    def add(layout: Layout) -> Layout:
        LAYOUTS[quant_method] = layout
        return layout

    return add


def dequantize_folder(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of the dequantized weights of a folder that another library quantized.

    Any other folder is returned unchanged.

    Raises:
        CheckpointError: the folder's quant_method or a setting is not supported, or tensors are missing or have other
            shapes or types; the message names the first.
    """
    entry = _entry(checkpoint)
    if entry is None:
        return checkpoint
    method = entry.get("quant_method")
    if str(method) not in LAYOUTS:
        raise CheckpointError(
            f"this checkpoint is quantized by {method!r}; diffquant reads 16-bit checkpoints and those quantized by "
            f"{', '.join(sorted(LAYOUTS))}"
        )
    contents = LAYOUTS[str(method)](entry, checkpoint)
    if contents is None:
        return checkpoint
    if not contents.matrices:
        what_to_do = "remove quantization_config from its config.json to open it as a 16-bit checkpoint"
        if contents.unused:
            scales = first_few(contents.unused, ", ")
            what_to_do = f"it has only scales of activations or caches, {scales}: open the 16-bit original instead"
        raise CheckpointError(
            f"{checkpoint.path} has no weights packed by {method}, although its config declares that; {what_to_do}"
        )
    if checkpoint.config.get("model_type") in _OF_CONV1D:
        matrices = {name: _transpose(name, matrix) for name, matrix in contents.matrices.items()}
        contents = replace(contents, matrices=matrices)
    return DequantizedCheckpoint(checkpoint, contents)


def _transpose(name: str, matrix: EncodedMatrix) -> EncodedMatrix:
    """Transpose a matrix that a model with Conv1D stores as [in, out] when it is not packed."""
    if name.split(".")[-2] not in CONV1D:
        return matrix
    outputs, inputs = matrix.shape
    return replace(matrix, shape=(inputs, outputs), rows=lambda rows: matrix.rows(torch.arange(outputs)).T[rows])


def _entry(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of config.json, or what a library wrote into a separate file."""
    entry = checkpoint.config.get("quantization_config")
    if entry is not None:
        return entry if isinstance(entry, Mapping) else None
    if (file := checkpoint.path / MODELOPT_CONFIG).is_file():
        stated = read_json(file).get("quantization")
        return {"quant_method": "modelopt", **stated} if isinstance(stated, Mapping) else None
    if any(name.endswith(".qweight") for name in checkpoint.tensors):
        for name, method in _STATED_ALONE.items():
            if (file := checkpoint.path / name).is_file():
                stated = {_OLDER_KEYS.get(key, key): value for key, value in read_json(file).items()}
                return {"quant_method": method, **stated}
    return None


class DequantizedCheckpoint(Checkpoint):
    """A checkpoint of a folder's dequantized weights in float32, where a 16-bit scale times a code is exact.

    Args:
        stored: the folder with its packed tensors.
        contents: quantized matrices that a layout's reader found in it.
    """

    def __init__(self, stored: Checkpoint, contents: QuantizedMatrices) -> None:
        self.path, self._stored, self._contents = stored.path, stored, contents
        self._matrices = contents.matrices
        self.config = {key: value for key, value in stored.config.items() if key != "quantization_config"}
        first = {matrix.parts[0]: name for name, matrix in self._matrices.items()}
        others = {part for matrix in self._matrices.values() for part in matrix.parts[1:]} | set(contents.unused)
        # In the folder's order, so that neighbours in a file stay neighbours.
        kept = ((first.get(name, name), info) for name, info in stored.tensors.items() if name not in others)
        self.tensors = {
            name: TensorInfo(torch.float32, self._matrices[name].shape, info.shard) if name in self._matrices else info
            for name, info in kept
        }

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._stored.rename(old, new)
        self._matrices = {new if name == old else name: matrix for name, matrix in self._matrices.items()}

    def read(self, name: str) -> Tensor:
        return self.read_rows(name, slice(None)) if name in self._matrices else self._stored.read(name)

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._stored.read_rows(name, rows)
        *lead, height, width = matrix.shape
        wanted = torch.arange(matrix.shape[0])[rows]
        if not lead:
            return _values(matrix, wanted)
        # All rows of the requested experts.
        of_all = (wanted[:, None] * height + torch.arange(height)).flatten()
        return _values(matrix, of_all).view(len(wanted), height, width)

    def read_matrix_rows(self, name: str, first: int, last: int) -> Tensor:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._stored.read_matrix_rows(name, first, last)
        return _values(matrix, torch.arange(first, last))

    def weight_files(self) -> list[Path]:
        return self._stored.weight_files()

    def write_side_files(self, folder: Path) -> None:
        self._stored.write_side_files(folder)
        for file in _STATED_AGAIN:
            (folder / file).unlink(missing_ok=True)

    def output_dtype(self, name: str) -> torch.dtype:
        return self._matrices[name].dtype if name in self._matrices else self._stored.output_dtype(name)

    @property
    def is_compressed_tensors(self) -> bool:
        """Whether llm-compressor or another writer of compressed-tensors packed the weights."""
        entry = _entry(self._stored)
        return entry is not None and entry.get("quant_method") == "compressed-tensors"

    @property
    def earlier_format(self) -> str:
        return self._contents.kind

    @property
    def engine_difference_note(self) -> str:
        return self._contents.note

    @property
    def stored_nbytes(self) -> int:
        return self._stored.stored_nbytes


def _values(matrix: EncodedMatrix, rows: Tensor) -> Tensor:
    """Return values float32 [n, in] of some rows, dequantized a few at a time."""
    values = torch.empty(len(rows), matrix.shape[-1])
    height = max(1, _AT_A_TIME // max(1, matrix.shape[-1]))
    for piece, some in zip(values.split(height), rows.split(height), strict=True):
        piece.copy_(matrix.rows(some))
    return values


import_all(sys.modules[__name__])
