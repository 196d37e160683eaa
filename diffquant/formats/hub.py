"""Models by their names on the Hugging Face hub: fetched when they are named, and sent when that is asked for."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffquant.errors import CheckpointError, UsageError
from diffquant.formats.folder import SIDE_SUFFIXES
from diffquant.formats.front_matter import read_front_matter
from diffquant.report.tables import megabytes
from diffquant.support.progress import clear_lines

# As huggingface_hub's validate_repo_id has it.
_MODEL = r"(?![\w./-]*(?:--|\.\.))\w[\w.-]*\b/\b[\w.-]{1,96}\b(?<!\.git)"
_NAME = re.compile(rf"(?P<model>{_MODEL})(?:@(?P<revision>[\w./-]+))?", re.ASCII)
# Files that `FolderCheckpoint` reads and copies, and the card, which says the licence. Repositories may hold weights
# again, in folders and other layouts.
_FETCHED = [
    "*.safetensors", *(f"*{suffix}" for suffix in sorted(SIDE_SUFFIXES)), "*.spm", "*.codes", "*.bpe", "*.v[0-9]*",
    "LICENSE*", "NOTICE*", "*.md",
]  # fmt: skip
# Folders, but for that of chat templates, which these patterns have no other way to spare.
_LEFT = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*"]
# Files of one model's weights: a push of weights takes the place of those that are there.
_WEIGHTS = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]


def local_path(path: Path) -> Path:
    """The path of a checkpoint that is named by a path, or by ORG/NAME or ORG/NAME@REVISION on the hub.

    A path where something stands goes first. What is on the hub is fetched into Hugging Face's cache, but for the files
    that are there already.

    Raises:
        CheckpointError: the hub has no such model or revision, does not give it, or cannot be reached.
    """
    named = _NAME.fullmatch(path.as_posix())
    if named is None or path.exists() or Path(path.parts[0]).exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    model, revision = named["model"], named["revision"]
    clear_lines()  # the hub's client draws lines of its own
    with _told(model, revision):
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FETCHED, ignore_patterns=_LEFT))


def check_pushable(model: str) -> None:
    """Check, before any work, that a folder can be sent to a model on the hub.

    Raises:
        UsageError: the name is not ORG/NAME, or nobody is logged in.
        CheckpointError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    if not re.fullmatch(_MODEL, model, re.ASCII):
        raise UsageError(f"cannot push to {model!r}: expected ORG/NAME")
    try:
        with _told(model, None):
            HfApi().whoami(token=True)
    except LocalTokenNotFoundError as error:
        raise UsageError(f"cannot push to {model}: log in with `hf auth login`, or set HF_TOKEN") from error


def published(folder: Path, model: str) -> str:
    """One line about a push: files with their sizes, and the card's licence and base."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    says = read_front_matter(folder)
    licence = f"licence {says['license']}" if says.get("license") else "no licence named"
    base = f", base model {says['base_model']}" if says.get("base_model") else ""
    sizes = ", ".join(f"{file.relative_to(folder).as_posix()} {megabytes(file.stat().st_size)}" for file in files)
    return f"publishing to {model}, for everybody where it is new: {licence}{base}; {len(files)} files: {sizes}"


def push(folder: Path, model: str) -> str:
    """Send a folder, its card included, to a model on the hub, which is made if it is not there; returns its address.

    Weights take the place of the model's former ones, in whatever shards, since readers find either. Other files stay.

    Raises:
        CheckpointError: the hub refuses, or cannot be reached; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with _told(model, None):
            address = api.create_repo(model, exist_ok=True).url
            replaced = _WEIGHTS if any(folder.glob("model*.safetensors")) else None
            message = "Upload by diffquant"
            api.upload_folder(repo_id=model, folder_path=folder, commit_message=message, delete_patterns=replaced)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; {folder} is written: send it again with `hf upload {model} {folder}`"
        ) from error
    return address


@contextmanager
def _told(model: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub in a line that says what to do.

    Raises:
        CheckpointError: the hub refused, or could not be reached.
    """
    # HTTPError is that of the HTTP library below, which versions choose differently.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except LocalTokenNotFoundError:
        raise
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated: accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model} is neither a folder or .gguf file here nor on the hub; a private model needs `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{model} on the hub has no revision {revision!r}") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"the hub refuses {model}: {str(error).partition(chr(10))[0]}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HTTPError) as error:
        raise CheckpointError(
            f"{model} is neither a folder here nor in Hugging Face's cache, and the hub cannot be reached; "
            f"`hf download {model} --local-dir FOLDER` elsewhere makes a folder to bring here"
        ) from error
