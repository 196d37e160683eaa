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

from diffquant.errors import CheckpointError
from diffquant.formats.front_matter import CARD
from diffquant.formats.json_object import POINTER, holds_pointer, read_json
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.support.files import check_plain, check_plain_inside
from diffquant.support.listing import first_few
from diffquant.support.plain_data import parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What peft calls the settings of a LoRA adapter.
ADAPTER = "adapter_config.json"

# Names that modules have inside torch.compile, (Fully)ShardedDataParallel and the like.
_WRAPPER = re.compile(r"((_orig_mod|module|_fsdp_wrapped_module|_forward_module)\.)+")

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

# Suffixes of what else makes a checkpoint usable, the model's own code included, which is copied and never run.
SIDE_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".py"}
# Whatever else stands there is copied, too, since tokenizers, licences and policies have many names: all but what holds
# weights, in any format, or code, and files that are too large for anything else.
_LEFT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".data", ".msgpack",
    ".h5", ".hdf5", ".ot", ".npz", ".npy", ".pkl", ".pickle", ".joblib", ".pb", ".tflite", ".mlmodel", ".nemo",
    ".engine", ".zip", ".tar", ".tgz", ".7z", ".rar", ".whl", ".sh", ".bat", ".ps1", ".pyc", ".so", ".dll", ".dylib",
    ".exe", ".ipynb", ".js", ".c", ".cc", ".cpp", ".cu", ".h",
}  # fmt: skip
_LARGE = 64 * 2**20
# Chat templates by name, beside the one in chat_template.jinja.
TEMPLATES = "additional_chat_templates"
# What is written anew.
_OWN_NAMES = {"config.json", "diffquant.json", "recipe.yaml", CARD}


class FolderCheckpoint(Checkpoint):
    """A folder with config.json and model.safetensors, or shards and their index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_links(path)
        check_fetched(path)
        _check_adapter(path)
        self.config = _with_plain_dtypes(read_json(path / "config.json"), path / "config.json")
        index = _read_index(path)
        shards = sorted(set(index.values())) if index else [SINGLE]
        self._files = {shard: path / shard for shard in shards}
        self._handles, problems = _open_all(path, self._files)
        self.tensors, unlisted, unread = _list_tensors(self._handles, index)
        problems += unlisted
        if problems:
            raise CheckpointError(f"checkpoint {path} is not complete: {first_few(problems)}; download it again")
        if unread:
            raise CheckpointError(f"checkpoint {path} {_unread_problem(self.config, unread)}")
        _check_prefix(path, self.tensors)

    def read(self, name: str) -> Tensor:
        data: Tensor = self._handles[self.tensors[name].shard].get_tensor(name)
        return data

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        return self.read(name)[rows]

    def weight_files(self) -> list[Path]:
        return list(self._files.values())

    def write_side_files(self, folder: Path) -> None:
        copied = side_files(self.path)
        for file in copied:
            place = folder / file.relative_to(self.path)
            place.parent.mkdir(exist_ok=True)
            copyfile(file, place)
        if left := self._left_behind(copied):
            message = "left behind in %s, as no part of the new folder: %s"
            logging.getLogger(__name__).warning(message, self.path, first_few(left, ", "))

    def _left_behind(self, copied: Collection[Path]) -> list[str]:
        """Names of what is not copied, and not written anew either; a folder's end in a slash."""
        known = {*copied, *self._files.values(), self.path / TEMPLATES}
        return sorted(
            f"{file.name}/" if file.is_dir() else file.name
            for file in self.path.iterdir()
            if file not in known and not _is_written_anew(file) and not file.name.startswith(".")
        )


def side_files(folder: Path) -> list[Path]:
    """Files beside the weights that a reader needs: tokenizer, generation settings, chat templates, code, licence."""
    return sorted(
        file
        for file in [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*.jinja")]
        if _is_side_file(file) and not _is_written_anew(file) and file.is_file() and not _is_large(file)
    )


def check_fetched(folder: Path) -> None:
    """Check that no file beside the weights is a pointer of Git LFS.

    Raises:
        CheckpointError: some are; the first are named.
    """
    files = [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*.jinja")]
    pointers = sorted(file.name for file in files if _is_side_file(file) and file.is_file() and holds_pointer(file))
    if pointers:
        raise CheckpointError(f"checkpoint {folder}: {first_few([f'{name} {POINTER}' for name in pointers])}")


def _is_side_file(file: Path) -> bool:
    """Whether a file is of a kind that is read or copied beside the weights."""
    return file.suffix.lower() not in _LEFT_SUFFIXES and not file.name.startswith(".")


def _is_written_anew(file: Path) -> bool:
    return file.name in _OWN_NAMES or file.name.endswith(".index.json")


def _is_large(file: Path) -> bool:
    return file.suffix not in SIDE_SUFFIXES and file.stat().st_size > _LARGE


def _with_plain_dtypes(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """A config whose dtypes are as transformers reads them: older writers put "torch." before one, or "auto".

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
            raise CheckpointError(
                f"{file}: {key} is {stated!r}, which is no dtype of torch; write float16, for instance"
            )
    return plain


def _check_links(folder: Path) -> None:
    """Check that no file is a pipe or device, and that none beside the weights is a link to somewhere else.

    What a link leads to would stand in the output, which people publish.

    Raises:
        CheckpointError: some are; the first are named.
    """
    try:
        for inside in (folder, *filter(Path.is_dir, [folder / TEMPLATES])):
            check_plain_inside(inside)
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {folder}: {error}; remove it") from error
    files = [*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]
    read = (file for file in files if _is_side_file(file) and (file.name == TEMPLATES or not file.is_dir()))
    links = sorted(file for file in read if file.is_symlink())
    outside = [f"{link.name} -> {link.readlink()}" for link in links if not leads_inside(folder, link)]
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
        if others := sorted(file.name for file in folder.iterdir() if ".safetensors" in file.name):
            hint = f"; it holds {first_few(others, ', ')}: {_use_of(others)}"
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


def _use_of(files: list[str]) -> str:
    """Say what to do with safetensors files that have other names than those of a checkpoint."""
    if any(re.search(r"-\d+-of-\d+\.", name) for name in files):
        return f"{INDEX}, which says what is in each shard, is missing: download it, or save the model again"
    if any(name.startswith("consolidated") for name in files):
        return "files called consolidated have other names inside than transformers': download the others, model*"
    if not any(name.endswith(".safetensors") for name in files):
        return "the download did not end: go on with it"
    return f"rename the file of the model to {SINGLE}" + ("" if len(files) == 1 else ", and leave one of them alone")


def _open_all(folder: Path, files: Mapping[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """A mapped handle for each shard, by name, and what is wrong with the shards that have none."""
    handles: dict[str, Any] = {}
    problems: list[str] = []
    for shard, file in files.items():
        if not _is_inside(folder, shard):
            problems.append(f"{shard!r} lies outside the folder or is no plain file name")
            continue
        try:
            check_plain(file)
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
            problems.append(f"{shard} {_damage(file, error)}")
        except ValueError as error:
            problems.append(f"{shard} has a header that readers take differently: {error}")
    return handles, problems


def _damage(file: Path, error: Exception) -> str:
    """What a file holds that is no safetensors file, after its name."""
    if holds_pointer(file):
        return POINTER
    return f"({file.stat().st_size} bytes) is truncated or damaged ({error})"


def _check_header(file: Path) -> None:
    """Check that a safetensors file, which opens, gives no tensor twice: safetensors takes the last.

    Raises:
        ValueError: it does; the name is given.
    """
    with file.open("rb") as stream:
        parse_json(stream.read(int.from_bytes(stream.read(8), "little")))


def _is_inside(folder: Path, shard: str) -> bool:
    """Whether a shard's name is a plain name in the folder."""
    if PurePosixPath(shard).parts != (shard,) or shard == ".." or "\0" in shard:
        return False
    return leads_inside(folder, folder / shard)


def leads_inside(folder: Path, file: Path) -> bool:
    """Whether a file, links followed, lies in the folder or in the "blobs" of the hub's cache that holds the folder.

    Hugging Face's cache has REPOSITORY/snapshots/COMMIT, of links to REPOSITORY/blobs; the folder may lie in a commit.
    """
    try:
        root, target = folder.resolve(), file.resolve()
    except (OSError, RuntimeError):
        # A link that leads back to itself.
        return False
    if target.is_relative_to(root):
        return True
    return any(place.name == "snapshots" and target.parent == place.parent / "blobs" for place in root.parents)


def _unread_problem(config: Mapping[str, Any], unread: Mapping[str, str]) -> str:
    """Describe tensors whose data types, by name, are not read."""
    names = first_few((f"{name} of type {dtype}" for name, dtype in unread.items()), ", ")
    if isinstance(config.get("quantization"), Mapping) and "U32" in unread.values():
        return (
            f"was quantized by MLX, whose packed weights are not read ({names}): give the model that it was made of, "
            "or write its floats out with `mlx_lm.convert --dequantize`"
        )
    return f"has tensors of types that are not read: {names}; read are {', '.join(_DTYPES)}"


def _check_prefix(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that the names are not those of a model that was saved inside a wrapper.

    Raises:
        CheckpointError: every name begins with the wrapper's.
    """
    begins = {match[0] if (match := _WRAPPER.match(name)) else "" for name in tensors}
    if len(begins) == 1 and (prefix := begins.pop()):
        raise CheckpointError(
            f"checkpoint {folder}: every tensor's name begins with {prefix!r}, the prefix of a wrapper such as "
            "torch.compile's (_orig_mod.) or DistributedDataParallel's (module.), under which transformers finds no "
            "weight either; save the model that is inside, or rename the tensors without the prefix"
        )


def _list_tensors(
    handles: Mapping[str, Any], index: Mapping[str, str] | None
) -> tuple[dict[str, TensorInfo], list[str], dict[str, str]]:
    """Tensors of all shards by name, those that the index places where they are not, and the types of unread ones."""
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    unread: dict[str, str] = {}
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
                unread[name] = header.get_dtype()
            else:
                tensors[name] = TensorInfo(dtype, tuple(header.get_shape()), shard)
    return tensors, problems, unread
