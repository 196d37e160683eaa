"""Downloads models from the Hugging Face hub by name, and uploads folders to it."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffquant.checkpoints.side_files import SIDE_SUFFIXES, TOKENIZER_SUFFIXES, read_front_matter
from diffquant.errors import CheckpointError, UsageError
from diffquant.reports.tables import format_size
from diffquant.support.progress import clear_line

# The rules of huggingface_hub's validate_repo_id.
_MODEL = r"(?![\w./-]*(?:--|\.\.))\w[\w.-]*\b/\b[\w.-]{1,96}\b(?<!\.git)"
NAME = re.compile(rf"(?P<model>{_MODEL})(?:@(?P<revision>[\w./-]+))?", re.ASCII)
# Files to download: those that `FolderCheckpoint` reads or copies, and the card, which states the licence. Repositories
# may contain the weights again, in folders and other layouts.
_FETCHED = [
    "*.safetensors", *(f"*{suffix}" for suffix in sorted(SIDE_SUFFIXES | TOKENIZER_SUFFIXES)), "*.v[0-9]*",
    "LICENSE*", "NOTICE*", "*.md",
]  # fmt: skip
# Files to skip: all folders except `additional_chat_templates`, which these patterns can exclude only in this way.
_LEFT = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*"]
# Files of a model's weights; pushing weights replaces the existing ones.
_WEIGHTS = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]


def find_hub_name(path: Path) -> re.Match[str] | None:
    """Return the match of a name ORG/NAME or ORG/NAME@REVISION, or nothing if the path exists."""
    is_local = path.exists() or any(Path(part).exists() for part in path.parts[:1])
    return None if is_local else NAME.fullmatch(path.as_posix())


def fetch_to_local_path(path: Path) -> Path:
    """Return the path of a checkpoint named by a path, or by ORG/NAME or ORG/NAME@REVISION on the hub.

    An existing local path takes precedence. A model on the hub is downloaded into Hugging Face's cache, except for
    files that are already there.

    Raises:
        CheckpointError: the hub has no such model or revision, denies access, or cannot be reached.
    """
    named = find_hub_name(path)
    if named is None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    model, revision = named["model"], named["revision"]
    clear_line()  # the hub's client draws its own progress bars
    with _explain_errors(model, revision):
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FETCHED, ignore_patterns=_LEFT))


def check_pushable(model: str) -> None:
    """Check, before any work, that a folder can be uploaded to a model on the hub.

    Raises:
        UsageError: the name is not ORG/NAME, or nobody is logged in.
        CheckpointError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    if not re.fullmatch(_MODEL, model, re.ASCII):
        raise UsageError(f"cannot push to {model!r}: expected ORG/NAME")
    try:
        with _explain_errors(model, None):
            HfApi().whoami(token=True)
    except LocalTokenNotFoundError as error:
        raise UsageError(f"cannot push to {model}: log in with `hf auth login`, or set HF_TOKEN") from error


def describe_push(folder: Path, model: str) -> str:
    """Describe an upload to the hub in one line: files with their sizes, and the card's licence and base model."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    says = read_front_matter(folder)
    licence = f"licence {says['license']}" if says.get("license") else "no licence named"
    base = f", base model {says['base_model']}" if says.get("base_model") else ""
    sizes = ", ".join(f"{file.relative_to(folder).as_posix()} {format_size(file.stat().st_size)}" for file in files)
    return f"publishing to {model}, which is public if it is new: {licence}{base}; {len(files)} files: {sizes}"


def push(folder: Path, model: str) -> str:
    """Upload a folder to a model on the hub, which is created if needed, and return the model's URL.

    Weight files that the model already has are deleted, since readers might use them instead of the new ones. The
    model's other files stay.

    Raises:
        CheckpointError: the hub refuses the upload or cannot be reached; the local folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with _explain_errors(model, None):
            address = api.create_repo(model, exist_ok=True).url
            replaced = _WEIGHTS if any(folder.glob("model*.safetensors")) else None
            message = "Upload by diffquant"
            api.upload_folder(repo_id=model, folder_path=folder, commit_message=message, delete_patterns=replaced)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {folder} was written: upload it with `hf upload {model} {folder}`") from error
    return address


@contextmanager
def _explain_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub into one line that says what to do.

    Raises:
        CheckpointError: the hub refused, or could not be reached.
    """
    # HTTPError belongs to the HTTP library in use, which depends on the version.
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
            f"{model} is neither a local folder or .gguf file nor on the hub; a private model needs `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{model} on the hub has no revision {revision!r}") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"the hub refuses {model}: {str(error).partition(chr(10))[0]}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HTTPError) as error:
        raise CheckpointError(
            f"{model} is neither a local folder nor in Hugging Face's cache, and the hub cannot be reached; "
            f"`hf download {model} --local-dir FOLDER` on a connected machine makes a folder to copy here"
        ) from error
