"""A checkpoint that is a folder of safetensors files.

A pickle is never opened, since opening one runs its code.
"""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from shutil import copyfile
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffquant.checkpoints.reader import SAFETENSORS_DTYPES, Checkpoint, TensorInfo
from diffquant.checkpoints.side_files import (
    POINTER,
    TEMPLATES,
    check_links,
    check_side_files,
    is_generated_file,
    is_inside_folder_or_cache,
    is_lfs_pointer_file,
    list_side_files,
    read_json,
)
from diffquant.errors import CheckpointError
from diffquant.support.files import check_regular_file
from diffquant.support.names import first_few
from diffquant.support.plain_data import parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What peft calls the settings of a LoRA adapter.
ADAPTER = "adapter_config.json"

# Names that modules have inside torch.compile, (Fully)ShardedDataParallel and the like.
_WRAPPER = re.compile(r"((_orig_mod|module|_fsdp_wrapped_module|_forward_module)\.)+")


class FolderCheckpoint(Checkpoint):
    """A folder with config.json and model.safetensors, or shards and their index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        check_links(path)
        check_side_files(path)
        _check_adapter(path)
        self.config = _convert_dtypes(read_json(path / "config.json"), path / "config.json")
        index = _read_index(path)
        shards = sorted(set(index.values())) if index else [SINGLE]
        self._files = {shard: path / shard for shard in shards}
        self._handles, problems = _open_all(path, self._files)
        self.tensors, unlisted, unread = _list_tensors(self._handles, index)
        problems += unlisted
        if problems:
            raise CheckpointError(f"checkpoint {path} is not complete: {first_few(problems)}; download it again")
        if unread:
            raise CheckpointError(f"checkpoint {path} {_describe_unread(self.config, unread)}")
        _check_prefix(path, self.tensors)
        self._stored_names: dict[str, str] = {}

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._stored_names[new] = old

    def read(self, name: str) -> Tensor:
        data: Tensor = self._handles[self.tensors[name].shard].get_tensor(self._stored_names.get(name, name))
        return data

    def weight_files(self) -> list[Path]:
        return list(self._files.values())

    def write_side_files(self, folder: Path) -> None:
        copied = list_side_files(self.path)
        for file in copied:
            place = folder / file.relative_to(self.path)
            place.parent.mkdir(exist_ok=True)
            copyfile(file, place)
        if left := self._left_behind(copied):
            message = "not copied from %s to the new folder: %s"
            logging.getLogger(__name__).warning(message, self.path, first_few(left, ", "))

    def _left_behind(self, copied: Collection[Path]) -> list[str]:
        """List the files and folders that are neither copied nor generated; a folder's name ends in a slash."""
        known = {*copied, *self._files.values(), self.path / TEMPLATES}
        return sorted(
            f"{file.name}/" if file.is_dir() else file.name
            for file in self.path.iterdir()
            if file not in known and not is_generated_file(file) and not file.name.startswith(".")
        )


def _convert_dtypes(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """Convert a config's dtypes to transformers' form: older writers put "torch." before one, or "auto".

    Raises:
        CheckpointError: it names a dtype that torch does not have.
    """
    plain = dict(config)
    for key in ("dtype", "torch_dtype"):
        stated = config.get(key)
        if not isinstance(stated, str):
            continue
        name = stated.removeprefix("torch.")
        if name == "auto":
            del plain[key]
        elif isinstance(getattr(torch, name, None), torch.dtype):
            plain[key] = name
        else:
            raise CheckpointError(f"{file}: {key} is {stated!r}, which torch does not have; write for example float16")
    return plain


def _check_adapter(folder: Path) -> None:
    """Check that the folder holds no LoRA adapter: transformers would add its weights, diffquant does not.

    Raises:
        CheckpointError: there is one.
    """
    if (folder / ADAPTER).is_file():
        is_model = (folder / "config.json").is_file()
        raise CheckpointError(
            f"{folder} contains {ADAPTER}, but diffquant does not apply adapters: merge it into the model "
            "(peft's merge_and_unload), or, to have the model without it, "
            + (f"remove {ADAPTER}" if is_model else "use the model it was trained on")
        )


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return the shard of each tensor, by name, or None if one file holds them all."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return None
        pickles = sorted(file.name for file in folder.glob("*.bin")) + sorted(file.name for file in folder.glob("*.pt"))
        hint = f"; {', '.join(pickles)} are pickles, which can run code: convert to safetensors" if pickles else ""
        if others := sorted(file.name for file in folder.iterdir() if ".safetensors" in file.name):
            hint = f"; it holds {first_few(others, ', ')}: {_suggest_use(others)}"
        if (folder / "model.onnx").is_file():
            hint = "; it is an exported model: `diffquant run` generates text with it, and eval and sweep measure it"
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from tensor to file")
    if (folder / SINGLE).exists() and SINGLE not in weight_map.values():
        # For instance after a second `save_pretrained` into the folder, which removes neither.
        raise CheckpointError(
            f"{folder} holds two models: transformers reads {SINGLE}, other engines the files that {INDEX} names; "
            f"remove whichever is obsolete: {SINGLE}, or {INDEX} and its files"
        )
    return weight_map


def _suggest_use(files: list[str]) -> str:
    """Suggest what to do with safetensors files whose names are not those of a checkpoint."""
    if any(re.search(r"-\d+-of-\d+\.", name) for name in files):
        return f"{INDEX}, which lists the tensors of each shard, is missing: download it, or save the model again"
    if any(name.startswith("consolidated") for name in files):
        return "files called consolidated do not use transformers' tensor names: download the model* files instead"
    if not any(name.endswith(".safetensors") for name in files):
        return "the download is incomplete: resume it"
    return f"rename the model's file to {SINGLE}" + ("" if len(files) == 1 else ", and remove the others")


def _open_all(folder: Path, files: Mapping[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """Open a mapped handle for each shard, by name, and list what is wrong with the others."""
    handles: dict[str, Any] = {}
    problems: list[str] = []
    for shard, file in files.items():
        if not _is_inside(folder, shard):
            problems.append(f"{shard!r} is outside the folder or not a plain file name")
            continue
        try:
            check_regular_file(file)
        except FileNotFoundError:
            problems.append(f"{shard} is missing")
            continue
        except OSError as error:
            problems.append(f"{shard} cannot be read: {error.strerror}")
            continue
        try:
            handles[shard] = safe_open(file, "pt")
            _check_header(file)
        except (SafetensorError, OSError) as error:
            problems.append(f"{shard} {_describe_damage(file, error)}")
        except ValueError as error:
            problems.append(f"{shard} has an ambiguous header: {error}")
    return handles, problems


def _describe_damage(file: Path, error: Exception) -> str:
    """Explain why a file is not a valid safetensors file."""
    if is_lfs_pointer_file(file):
        return POINTER
    return f"({file.stat().st_size} bytes) is truncated or damaged ({error})"


def _check_header(file: Path) -> None:
    """Check that a readable safetensors file repeats no tensor: safetensors would use the last one.

    Raises:
        ValueError: it does; the name is given.
    """
    with file.open("rb") as stream:
        parse_json(stream.read(int.from_bytes(stream.read(8), "little")))


def _is_inside(folder: Path, shard: str) -> bool:
    """Return whether a shard's name is a plain name in the folder."""
    if PurePosixPath(shard).parts != (shard,) or shard == ".." or "\0" in shard:
        return False
    return is_inside_folder_or_cache(folder, folder / shard)


def _describe_unread(config: Mapping[str, Any], unread: Mapping[str, str]) -> str:
    """Describe tensors whose data types, by name, are not supported."""
    names = first_few((f"{name} of type {dtype}" for name, dtype in unread.items()), ", ")
    if isinstance(config.get("quantization"), Mapping) and "U32" in unread.values():
        return (
            f"was quantized by MLX, whose packed weights are not supported ({names}): use the model it was made from, "
            "or write its weights as floats with `mlx_lm.convert --dequantize`"
        )
    return f"has tensors of unsupported types: {names}; supported are {', '.join(SAFETENSORS_DTYPES)}"


def _check_prefix(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that the names are not those of a model that was saved inside a wrapper.

    Raises:
        CheckpointError: every name begins with the wrapper's.
    """
    begins = {match[0] if (match := _WRAPPER.match(name)) else "" for name in tensors}
    if len(begins) == 1 and (prefix := begins.pop()):
        raise CheckpointError(
            f"checkpoint {folder}: every tensor's name begins with {prefix!r}, the prefix of a wrapper such as "
            "torch.compile's (_orig_mod.) or DistributedDataParallel's (module.), under which transformers does "
            "not find the weights either; save the inner model, or rename the tensors without the prefix"
        )


def _list_tensors(
    handles: Mapping[str, Any], index: Mapping[str, str] | None
) -> tuple[dict[str, TensorInfo], list[str], dict[str, str]]:
    """List the tensors of all shards by name, those missing from their shard, and the types of unsupported ones."""
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    unread: dict[str, str] = {}
    for shard, handle in handles.items():
        present = set(handle.keys())
        listed = {name for name, place in index.items() if place == shard} if index else present
        absent = sorted(listed - present)
        if absent:
            problems.append(f"{shard} lacks {first_few(absent, ', ')}, which the index lists there")
        for name in sorted(listed & present):
            header = handle.get_slice(name)
            dtype = SAFETENSORS_DTYPES.get(header.get_dtype())
            if dtype is None:
                unread[name] = header.get_dtype()
            else:
                tensors[name] = TensorInfo(dtype, tuple(header.get_shape()), shard)
    return tensors, problems, unread
