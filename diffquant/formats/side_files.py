"""The files beside a checkpoint's weights: which are read and copied, and where links may lead. No torch."""

from pathlib import Path

from diffquant.errors import CheckpointError
from diffquant.formats.front_matter import CARD
from diffquant.formats.json_object import POINTER, holds_pointer
from diffquant.support.files import check_plain_inside
from diffquant.support.listing import first_few

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
# Tokenizers of other kinds, as Marian, FSMT and PhoBERT have them.
TOKENIZER_SUFFIXES = {".spm", ".codes", ".bpe"}


def side_files(folder: Path) -> list[Path]:
    """Files beside the weights that a reader needs: tokenizer, generation settings, chat templates, code, licence."""
    return sorted(
        file
        for file in [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*.jinja")]
        if _is_side_file(file) and not is_written_anew(file) and file.is_file() and not _is_large(file)
    )


def read_files(folder: Path) -> list[Path]:
    """Return the side files that a model's or tokenizer's behaviour may depend on; logs and policies are not."""
    suffixes = SIDE_SUFFIXES | TOKENIZER_SUFFIXES
    return [
        file
        for file in side_files(folder)
        if file.suffix in suffixes or file.suffix[:2] == ".v" or file.parent.name == TEMPLATES
    ]


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


def is_written_anew(file: Path) -> bool:
    """Whether a copy of the folder gets a file of this name of its own."""
    return file.name in _OWN_NAMES or file.name.endswith(".index.json")


def _is_large(file: Path) -> bool:
    return file.suffix not in SIDE_SUFFIXES and file.stat().st_size > _LARGE


def check_links(folder: Path) -> None:
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
