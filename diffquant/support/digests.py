"""Digests of weight files, by which they are known again: fast on every processor, and no defence against forgery."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

# SHA-256 took half of `quantize`'s time on a processor without instructions for it. Folders that were written with it
# are still read.
_ALGORITHMS: Mapping[str, str | Callable[[], xxhash.xxh3_128]] = {"xxh3_128": xxhash.xxh3_128, "sha256": "sha256"}
_DEFAULT = "xxh3_128"


def content_digest(file: Path, algorithm: str = _DEFAULT) -> str:
    """The digest of a file's content, as hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, _ALGORITHMS[algorithm]).hexdigest()


@dataclass(frozen=True)
class FileDigests:
    """Digests of some files by their names, as hex.

    Attributes:
        algorithm: name of the algorithm that made them.
    """

    by_name: Mapping[str, str]
    algorithm: str = _DEFAULT

    @classmethod
    def of(cls, files: Iterable[Path], algorithm: str = _DEFAULT) -> Self:
        """The digests of some files."""
        return cls({file.name: content_digest(file, algorithm) for file in files}, algorithm)

    @classmethod
    def read(cls, record: Mapping[str, object]) -> Self:
        """The digests in a record, which stand under their algorithm's name; none where it has none of them.

        Raises:
            TypeError: what stands there are no digests.
        """
        algorithm = next((name for name in _ALGORITHMS if name in record), _DEFAULT)
        by_name = record.get(algorithm, {})
        if not isinstance(by_name, dict) or not all(isinstance(digest, str) for digest in by_name.values()):
            raise TypeError(f"{algorithm} maps files' names to their digests, got {by_name!r:.40}")
        return cls(by_name, algorithm)

    def to_dict(self) -> dict[str, dict[str, str]]:
        """The entry of a record, which `read` takes."""
        return {self.algorithm: dict(self.by_name)}

    def changed(self, folder: Path) -> list[str]:
        """Names of the files that are not in a folder, or are others there."""
        return [name for name, digest in self.by_name.items() if not _is(folder / name, digest, self.algorithm)]

    @property
    def contents(self) -> frozenset[str]:
        """The digests alone: equal for the same files under other names."""
        return frozenset(self.by_name.values())


def _is(file: Path, digest: str, algorithm: str) -> bool:
    return file.is_file() and content_digest(file, algorithm) == digest
