"""A checkpoint's files other than weights: reading JSON, which files to copy, links, and the card's front matter.

No torch here. Source of the front matter: the hub's model cards, huggingface.co/docs/hub/model-cards.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diffquant.errors import CheckpointError
from diffquant.support.files import check_no_special_files, check_regular_file
from diffquant.support.names import first_few
from diffquant.support.plain_data import parse_json

# As many bytes as the header of a safetensors file may have.
_LARGEST = 100_000_000
# End of a message about a file that Git LFS has not fetched yet, and the first bytes of such a file.
POINTER = "is a pointer of Git LFS, not the file itself (fetch it with `git lfs pull`)"
_BEGINS = b"version https://git-lfs"


def is_lfs_pointer(content: bytes | memoryview) -> bool:
    """Return whether a file's content, or its first bytes, is a pointer of Git LFS."""
    return bytes(content[: len(_BEGINS)]) == _BEGINS


def is_lfs_pointer_file(file: Path) -> bool:
    """Return whether a file is a pointer of Git LFS; false for a file that cannot be read."""
    try:
        with file.open("rb") as stream:
            return is_lfs_pointer(stream.read(len(_BEGINS)))
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file is absent, or does not hold a JSON object.
    """
    try:
        check_regular_file(path)
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than the limit of {_LARGEST}")
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; a checkpoint folder needs one") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text; download it again") from error
    except (OSError, ValueError) as error:
        if path.is_file() and not path.stat().st_size:
            raise CheckpointError(f"{path} is empty; download it again") from error
        if path.is_file() and is_lfs_pointer_file(path):
            raise CheckpointError(f"{path} {POINTER}") from error
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


CARD, TOKENIZER_CONFIG = "README.md", "tokenizer_config.json"
# Entries that stay true when weights are quantized or renamed; extra_gated_* ask users to accept the model's terms.
_CARRIED = re.compile(
    "license|license_name|license_link|language|pipeline_tag|base_model|base_model_relation|datasets|extra_gated_.*"
)
_TEXT = re.compile(r"---[ \t]*\r?\n(?P<yaml>.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


def read_front_matter(folder: Path) -> dict[str, Any]:
    """Return the entries of a model card's front matter that cards of derived models keep; empty if there are none.

    If the card cannot be read, the licence is the hub's "unknown". If the folder is a snapshot of a model on the hub,
    base_model is that model.
    """
    # Imported here, since importing yaml takes time that the command line's help does not need.
    from diffquant.support.yaml_text import parse_yaml

    card = folder / CARD
    try:
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        found = _TEXT.match(text)
        entries = parse_yaml(found["yaml"]) if found else {}
        if not isinstance(entries, Mapping):
            raise ValueError("no mapping")
    except (OSError, ValueError):
        entries = {"license": "unknown"}
    carried = {key: value for key, value in entries.items() if isinstance(key, str) and _CARRIED.fullmatch(key)}
    carried = _drop_unsafe_link(carried)
    if name := find_cached_name(folder):
        carried = {key: value for key, value in carried.items() if key != "base_model_relation"} | {"base_model": name}
    return carried


def gguf_front_matter(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that model cards of derived models keep, as in `read_front_matter`, from a GGUF's metadata."""
    keys = {
        "license": "general.license",
        "license_name": "general.license.name",
        "license_link": "general.license.link",
        "language": "general.languages",
    }
    stated = {key: metadata[theirs] for key, theirs in keys.items() if metadata.get(theirs)}
    # YAML has lists and no tuples.
    stated = {key: list(value) if isinstance(value, tuple) else value for key, value in stated.items()}
    _, hub, base = str(metadata.get("general.base_model.0.repo_url", "")).partition("//huggingface.co/")
    return _drop_unsafe_link(stated | ({"base_model": base} if hub and base else {}))


def _drop_unsafe_link(entries: dict[str, Any]) -> dict[str, Any]:
    """Drop a license_link that is neither a web page nor a file of the repository, since pages link to it."""
    link = entries.get("license_link")
    if link is None or (isinstance(link, str) and _is_web_link(link)):
        return entries
    return {key: value for key, value in entries.items() if key != "license_link"}


def _is_web_link(link: str) -> bool:
    # Browsers take a backslash for a slash, and skip spaces and control characters within a scheme.
    if "\\" in link or any(character <= " " for character in link):
        return False
    try:
        parts = urlsplit(link)
    except ValueError:
        return False
    if parts.scheme:
        return parts.scheme in ("http", "https") and bool(parts.netloc)
    return not parts.netloc and ":" not in link.partition("/")[0]


def format_front_matter(
    library: str, tags: Sequence[str], carried: Mapping[str, Any], relation: str | None = None
) -> str:
    """Return the front matter of a model card as YAML between lines of dashes.

    Args:
        library: the hub's name of the library that opens the folder.
        carried: entries that are kept from the source's card.
        relation: base_model_relation of the folder; by default that of the source.
    """
    import yaml

    entries = {key: value for key, value in carried.items() if key != "base_model_relation" or relation is None}
    if relation and "base_model" in entries:
        entries["base_model_relation"] = relation
    entries = {"library_name": library, **entries, "tags": list(tags)}
    return f"---\n{yaml.safe_dump(entries, sort_keys=False)}---\n"


def find_cached_name(folder: Path) -> str | None:
    """Return ORG/NAME of a folder in Hugging Face's cache, or None if it is elsewhere."""
    place = folder.resolve()
    # The cache has models--ORG--NAME/snapshots/COMMIT.
    kind, _, name = place.parent.parent.name.partition("--")
    return name.replace("--", "/", 1) if place.parent.name == "snapshots" and kind == "models" else None


# Suffixes of the other files that make a checkpoint usable. The model's code is copied but never run.
SIDE_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".py"}
# Files with other suffixes are copied, too, since tokenizers, licences and policies have many names. Exceptions are
# weights in any format, programs, and files above `_LARGE` bytes.
_LEFT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".data", ".msgpack",
    ".h5", ".hdf5", ".ot", ".npz", ".npy", ".pkl", ".pickle", ".joblib", ".pb", ".tflite", ".mlmodel", ".nemo",
    ".engine", ".zip", ".tar", ".tgz", ".7z", ".rar", ".whl", ".sh", ".bat", ".ps1", ".pyc", ".so", ".dll", ".dylib",
    ".exe", ".ipynb", ".js", ".c", ".cc", ".cpp", ".cu", ".h",
}  # fmt: skip
_LARGE = 64 * 2**20
# Folder of named chat templates; the default one is in chat_template.jinja.
TEMPLATES = "additional_chat_templates"
# Files that are generated for every output, never copied.
_OWN_NAMES = {"config.json", "diffquant.json", "recipe.yaml", CARD}
# Suffixes of other tokenizers, such as those of Marian, FSMT and PhoBERT.
TOKENIZER_SUFFIXES = {".spm", ".codes", ".bpe"}


def list_side_files(folder: Path) -> list[Path]:
    """List the files other than weights that a reader needs: tokenizer, generation, chat templates, code, licence."""
    return sorted(
        file
        for file in _possible_side_files(folder)
        if not is_generated_file(file) and file.is_file() and not _is_large(file)
    )


def list_behaviour_files(folder: Path) -> list[Path]:
    """List the side files that may change what a model or tokenizer computes, unlike logs and licences."""
    suffixes = SIDE_SUFFIXES | TOKENIZER_SUFFIXES
    return [
        file
        for file in list_side_files(folder)
        if file.suffix in suffixes or file.suffix[:2] == ".v" or file.parent.name == TEMPLATES
    ]


def check_side_files(folder: Path) -> None:
    """Check that no file other than weights is a pointer of Git LFS, and that tokenizer_config.json can be read.

    If a JSON file has a key twice, transformers uses the second entry, and other libraries use the first.

    Raises:
        CheckpointError: files are pointers, of which the message names the first; or tokenizer_config.json is not a
            JSON object or has a key twice.
    """
    files = filter(Path.is_file, _possible_side_files(folder))
    pointers = sorted(file.name for file in files if is_lfs_pointer_file(file))
    if pointers:
        raise CheckpointError(f"checkpoint {folder}: {first_few([f'{name} {POINTER}' for name in pointers])}")
    if (folder / TOKENIZER_CONFIG).exists():
        read_json(folder / TOKENIZER_CONFIG)


def _possible_side_files(folder: Path) -> list[Path]:
    """List files, links and folders whose names are of a kind that is read or copied with the weights."""
    files = [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*.jinja")]
    return [file for file in files if file.suffix.lower() not in _LEFT_SUFFIXES and not file.name.startswith(".")]


def is_generated_file(file: Path) -> bool:
    """Return whether an output gets a new file with this name instead of a copy."""
    return file.name in _OWN_NAMES or file.name.endswith(".index.json")


def _is_large(file: Path) -> bool:
    return file.suffix not in SIDE_SUFFIXES and file.stat().st_size > _LARGE


def check_links(folder: Path) -> None:
    """Check that no file is a pipe or device, and that side files are not links to files outside the folder.

    The target of such a link would be copied into the output, which people publish.

    Raises:
        CheckpointError: there are such files; the message names the first.
    """
    try:
        for inside in (folder, *filter(Path.is_dir, [folder / TEMPLATES])):
            check_no_special_files(inside)
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {folder}: {error}; remove it") from error
    read = (file for file in _possible_side_files(folder) if file.name == TEMPLATES or not file.is_dir())
    links = sorted(file for file in read if file.is_symlink())
    outside = [f"{link.name} -> {link.readlink()}" for link in links if not is_inside_folder_or_cache(folder, link)]
    if outside:
        raise CheckpointError(
            f"checkpoint {folder} has links to files outside it, which are not followed: {first_few(outside, ', ')}; "
            "put the files themselves there, or remove the links"
        )


def is_inside_folder_or_cache(folder: Path, file: Path) -> bool:
    """Return whether a file lies in a folder after links are resolved, or in the blobs of the folder's hub cache.

    In Hugging Face's cache, a model's folder is REPOSITORY/snapshots/COMMIT or inside it. The files there are links to
    REPOSITORY/blobs.
    """
    try:
        root, target = folder.resolve(), file.resolve()
    except (OSError, RuntimeError):
        # A circular link.
        return False
    if target.is_relative_to(root):
        return True
    return any(place.name == "snapshots" and target.parent == place.parent / "blobs" for place in root.parents)
