"""Sources of calibration data: files of plain text, JSON lines, and datasets by the datasets library."""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.checkpoints.hub import NAME
from diffquant.checkpoints.texts import load_text
from diffquant.data import calibration_books
from diffquant.errors import MissingDependencyError, UsageError
from diffquant.support.installation import install_command

Sources = Path | str | Sequence[Path | str] | None
Row = Mapping[str, Any]

_LINES = (".jsonl", ".ndjson")
# Files that the datasets library reads; any other file is plain text.
_TABLES = (".parquet", ".arrow", ".json", ".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst")
# Colons outside of a slice such as train[:512].
_COLON = re.compile(r":(?![^\[]*\])")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A source of calibration data.

    Attributes:
        name: name for messages and records.
        weight: share of the sequences that are from this source, relative to the weights of other sources.
        text: content of a plain text file, or None if the source has rows.
        rows: rows with `messages` or `text`.
    """

    name: str
    weight: float
    text: str | None
    rows: Sequence[Row] = ()


def open_corpora(sources: Sources) -> list[Corpus]:
    """Open sources in the form that `read_calibration` accepts, weights included.

    Raises:
        UsageError: one is neither a file nor a dataset, or cannot be read.
        MissingDependencyError: one is a dataset, and the datasets library is missing.
    """
    if sources is None:
        return [Corpus("the bundled text", 1.0, calibration_books())]
    return [_open(str(each)) for each in ([sources] if isinstance(sources, str | Path) else sources)]


def _open(given: str) -> Corpus:
    place, weight = _split_weight(given)
    parts, file = _COLON.split(place), Path(place)
    # The datasets library fails where a relative folder has no name, as the current one.
    folder, name = Path(parts[0]).absolute(), file.name
    if file.is_dir() or (folder.is_dir() and not file.exists()):
        return Corpus(folder.name, weight, None, _load_rows(place, str(folder), parts[1:]))
    if name.endswith(_LINES):
        return Corpus(name, weight, None, _read_lines(file))
    if name.endswith(_TABLES) and file.is_file():
        return Corpus(name, weight, None, _load_rows(place, str(file.absolute().parent), (), data_files=[name]))
    is_path = Path(file.parts[0]).exists() or name.endswith((*_TABLES, ".txt", ".md"))
    if named := None if is_path else NAME.fullmatch(parts[0]):
        return Corpus(place, weight, None, _load_rows(place, named["model"], parts[1:], revision=named["revision"]))
    return Corpus(name, weight, load_text(file))


def _split_weight(given: str) -> tuple[str, float]:
    """Split SOURCE=WEIGHT; the weight is 1 by default."""
    place, separator, amount = given.rpartition("=")
    try:
        weight = float(amount)
    except ValueError:
        weight = math.nan
    if not separator or math.isnan(weight) or Path(given).exists():
        return given, 1.0
    if not 0 < weight < math.inf:
        raise UsageError(f"the weight of {place} must be a positive number, got {amount}")
    return place, weight


def _load_rows(place: str, where: str, parts: Sequence[str], **options: Any) -> Sequence[Row]:
    """Load the rows of a dataset with the datasets library, which runs no code of the dataset.

    Args:
        place: source as it was given.
        where: folder, or name on the hub.
        parts: [CONFIG][, SPLIT]; the split is train by default.

    Raises:
        MissingDependencyError: the library is not installed.
        UsageError: it cannot read the dataset.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"{place} is read by the datasets library, which is not installed: {install_command('datasets')}"
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    last: Exception | None = None
    for name in _places(where, options):
        try:
            rows = _load_split(name, parts, options if name == where else {})
            columns = [column for column in ("messages", "text", "tools") if column in rows.column_names]
            read: Sequence[Row] = rows.select_columns(columns) if columns else rows
            return read
        except Exception as error:  # readers of some twenty formats raise their own
            if last is None or isinstance(last, ConnectionError):
                last = error
            if name == where and not isinstance(error, ConnectionError):
                break
    offline = f"; run `hf download {where} --repo-type dataset` once with a connection"
    raise UsageError(
        f"the datasets library cannot read {place}: {' '.join(str(last).split())}"
        + (offline if isinstance(last, ConnectionError) else "")
    ) from last


def _places(where: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the places to look for a dataset: the hub, and its cache, which comes first without a connection."""
    import datasets
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if Path(where).is_dir():
        yield where
        return
    if not datasets.config.HF_HUB_OFFLINE:
        yield where
    with suppress(LocalEntryNotFoundError):
        yield snapshot_download(where, repo_type="dataset", revision=options["revision"], local_files_only=True)
    if datasets.config.HF_HUB_OFFLINE:
        yield where


def _load_split(where: str, parts: Sequence[str], options: Mapping[str, Any]) -> Any:
    import datasets

    if len(parts) > 2:
        raise ValueError("its name may be followed only by :CONFIG:SPLIT")
    split = parts[-1] if parts else "train"
    if any((Path(where) / name).is_file() for name in ("state.json", "dataset_dict.json")):
        saved = datasets.load_from_disk(where)
        splits = {"train": saved} if isinstance(saved, datasets.Dataset) else saved
        if split not in splits:
            raise ValueError(f"it has no split {split}; its splits are {', '.join(splits)}")
        return splits[split]
    config = parts[0] if len(parts) == 2 else None
    if len(parts) == 1 and split in datasets.get_dataset_config_names(where, **options):
        config, split = split, "train"
    return datasets.load_dataset(where, config, split=split, **options)


def _read_lines(file: Path) -> list[Row]:
    """Read the rows of a JSONL file.

    Raises:
        UsageError: a line is not a JSON object.
    """
    rows: list[Row] = []
    for number, line in enumerate(load_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"line {number} of {file} is not JSON ({error}); JSONL has one object a line") from error
        if not isinstance(row, dict):
            raise UsageError(f'line {number} of {file} is not a JSON object, such as {{"text": "..."}}')
        rows.append(row)
    return rows
