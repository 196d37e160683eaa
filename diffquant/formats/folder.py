"""A checkpoint that is a folder of safetensors files.

A pickle is never opened, since opening one runs its code.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from shutil import copyfile
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.formats.front_matter import CARD
from diffquant.formats.json_object import read_json
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.support.listing import first_few
from diffquant.support.plain_data import parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What a file of Git LFS begins with until its content is fetched.
_POINTER = b"version https://git-lfs"
# What peft calls the settings of a LoRA adapter.
ADAPTER = "adapter_config.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# Suffixes of what else makes a checkpoint usable, the model's own code included, which is copied and never run; what
# holds weights, in any format, is not copied.
SIDE_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".py"}
_OWN_NAMES = {"config.json", "diffquant.json"}


class FolderCheckpoint(Checkpoint):
    """A folder with config.json and model.safetensors, or shards and their index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_links(path)
        _check_adapter(path)
        self.config = read_json(path / "config.json")
        index = _read_index(path)
        shards = sorted(set(index.values())) if index else [SINGLE]
        self._files = {shard: path / shard for shard in shards}
        self._handles, problems = _open_all(path, self._files)
        self.tensors, unlisted = _list_tensors(self._handles, index)
        problems += unlisted
        if problems:
            raise CheckpointError(f"checkpoint {path} is not complete: {first_few(problems)}; download it again")

    def read(self, name: str) -> Tensor:
        data: Tensor = self._handles[self.tensors[name].shard].get_tensor(name)
        return data

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        return self.read(name)[rows]

    def weight_files(self) -> list[Path]:
        return list(self._files.values())

    def write_side_files(self, folder: Path) -> None:
        for file in side_files(self.path):
            copyfile(file, folder / file.name)


def side_files(folder: Path) -> list[Path]:
    """Files beside the weights that a reader needs: tokenizer, generation settings, chat template, code, licence."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and _is_text(file) and file.name not in _OWN_NAMES and not file.name.endswith(".index.json")
    )


def _is_text(file: Path) -> bool:
    """Whether a file is of a kind that is read or copied beside the weights."""
    return file.suffix in SIDE_SUFFIXES or file.name.upper().startswith(("LICENSE", "NOTICE"))


def _check_links(folder: Path) -> None:
    """Check that no file that is read or copied beside the weights is a link to somewhere else.

    What such a link leads to would stand in the output, which people publish.

    Raises:
        CheckpointError: some are; the first are named.
    """
    links = sorted(
        file.name for file in folder.iterdir() if file.is_symlink() and (_is_text(file) or file.name == CARD)
    )
    outside = [f"{name} -> {(folder / name).readlink()}" for name in links if not _is_inside(folder, name)]
    if outside:
        raise CheckpointError(
            f"checkpoint {folder} has links to files outside it, which are not followed: {first_few(outside, ', ')}; "
            "put the files themselves there, or remove the links"
        )


def _check_adapter(folder: Path) -> None:
    """Check that no LoRA adapter lies in the folder: transformers adds its weights, and nothing here reads them.

    Raises:
        CheckpointError: there is one.
    """
    if (folder / ADAPTER).is_file():
        is_model = (folder / "config.json").is_file()
        raise CheckpointError(
            f"{folder} holds {ADAPTER}, and the weights of an adapter are not added here: merge it into the model "
            "(peft's merge_and_unload), or, to have the model without it, "
            + (f"remove {ADAPTER}" if is_model else "give the model that it was trained on")
        )


def _read_index(folder: Path) -> dict[str, str] | None:
    """The shard of each tensor, by name, or None if one file holds them all."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return None
        pickles = sorted(file.name for file in folder.glob("*.bin")) + sorted(file.name for file in folder.glob("*.pt"))
        hint = f"; {', '.join(pickles)} are pickles, which run code when opened: convert them" if pickles else ""
        if (folder / "model.onnx").is_file():
            hint = "; it is an exported model: `diffquant run` continues texts with it, and eval and sweep measure it"
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from tensor to file")
    if (folder / SINGLE).exists() and SINGLE not in weight_map.values():
        # As after a second `save_pretrained` into the folder, which removes neither.
        raise CheckpointError(
            f"{folder} holds two models: transformers reads {SINGLE}, other engines the files that {INDEX} names; "
            f"remove {SINGLE}, or {INDEX} and its files, whichever is left over"
        )
    return weight_map


def _open_all(folder: Path, files: Mapping[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """A mapped handle for each shard, by name, and what is wrong with the shards that have none."""
    handles: dict[str, Any] = {}
    problems: list[str] = []
    for shard, file in files.items():
        if not _is_inside(folder, shard):
            problems.append(f"{shard!r} lies outside the folder or is no plain file name")
            continue
        try:
            handles[shard] = safe_open(file, "pt")
            _check_header(file)
        except FileNotFoundError:
            problems.append(f"{shard} is missing")
        except (SafetensorError, OSError) as error:
            problems.append(f"{shard} {_damage(file, error)}")
        except ValueError as error:
            problems.append(f"{shard} has a header that readers take differently: {error}")
    return handles, problems


def _damage(file: Path, error: Exception) -> str:
    """What a file holds that is no safetensors file, after its name."""
    with file.open("rb") as stream:
        begins = stream.read(len(_POINTER))
    if begins == _POINTER:
        return "is a pointer of Git LFS and not the weights, which `git lfs pull` fetches"
    return f"({file.stat().st_size} bytes) is truncated or damaged ({error})"


def _check_header(file: Path) -> None:
    """Check that a safetensors file, which opens, gives no tensor twice: safetensors takes the last.

    Raises:
        ValueError: it does; the name is given.
    """
    with file.open("rb") as stream:
        parse_json(stream.read(int.from_bytes(stream.read(8), "little")))


def _is_inside(folder: Path, shard: str) -> bool:
    """Whether a shard's name is a plain name in the folder.

    Download caches keep a folder of links to content elsewhere, so a link that is named plainly is
    followed only to a file of a cache laid out so: its own "blobs" folder, two levels up.
    """
    if PurePosixPath(shard).parts != (shard,) or shard == ".." or "\0" in shard:
        return False
    return leads_inside(folder, folder / shard)


def leads_inside(folder: Path, path: Path) -> bool:
    """Whether a path leads into a folder, or to a blob of the download cache that the folder is a snapshot of."""
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):
        # A link that leads back to itself.
        return False
    return target.is_relative_to(root) or target.parent == root.parent.parent / "blobs"


def _list_tensors(
    handles: Mapping[str, Any], index: Mapping[str, str] | None
) -> tuple[dict[str, TensorInfo], list[str]]:
    """Tensors of all shards by name, and what is wrong: absent where the index places them, or of an unread type."""
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for shard, handle in handles.items():
        present = set(handle.keys())
        listed = {name for name, place in index.items() if place == shard} if index else present
        absent = sorted(listed - present)
        if absent:
            problems.append(f"{shard} lacks {first_few(absent, ', ')}, which the index places there")
        for name in sorted(listed & present):
            header = handle.get_slice(name)
            dtype = _DTYPES.get(header.get_dtype())
            if dtype is None:
                problems.append(f"{name} has data type {header.get_dtype()}, which is not read")
            else:
                tensors[name] = TensorInfo(dtype, tuple(header.get_shape()), shard)
    return tensors, problems
