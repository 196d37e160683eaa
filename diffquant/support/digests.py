"""Computes digests that identify weight files: fast on every CPU, but no protection against forgery."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from diffquant.support.files import file_digest

# SHA-256 took half of `quantize`'s time on a CPU without instructions for it. We still read folders written with it.
_ALGORITHMS: Mapping[str, str | Callable[[], xxhash.xxh3_128]] = {"xxh3_128": xxhash.xxh3_128, "sha256": "sha256"}
_DEFAULT = "xxh3_128"


def content_digest(file: Path, algorithm: str = _DEFAULT) -> str:
    """Compute the digest of a file's content, as hex."""
    return file_digest(file, _ALGORITHMS[algorithm])


@dataclass(frozen=True)
class FileDigests:
    """Digests of some files.

    Attributes:
        by_name: digest of each file, as hex, by the file's name.
        algorithm: name of the algorithm that computed the digests.
    """

    by_name: Mapping[str, str]
    algorithm: str = _DEFAULT

    @classmethod
    def compute(cls, files: Iterable[Path], algorithm: str = _DEFAULT) -> Self:
        """Compute the digests of some files, by their names without folders."""
        return cls({file.name: content_digest(file, algorithm) for file in files}, algorithm)

    @classmethod
    def within(cls, folder: Path, names: Iterable[str]) -> Self:
        """Compute the digests of files in a folder, by their paths relative to it."""
        return cls({name: content_digest(folder / name) for name in names})

    @classmethod
    def read(cls, record: Mapping[str, object]) -> Self:
        """Read the digests stored in a record under their algorithm's name; empty if the record has none.

        Raises:
            TypeError: the entry does not hold digests.
        """
        algorithm = next((name for name in _ALGORITHMS if name in record), _DEFAULT)
        by_name = record.get(algorithm, {})
        if not isinstance(by_name, dict) or not all(isinstance(digest, str) for digest in by_name.values()):
            raise TypeError(f"{algorithm} maps file names to digests, got {by_name!r:.40}")
        return cls(by_name, algorithm)

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Return the entry for a record, in the form that `read` reads."""
        return {self.algorithm: dict(self.by_name)}

    def changed_files(self, folder: Path) -> list[str]:
        """List the files that a folder lacks, or whose content in the folder has another digest."""
        return [name for name, digest in self.by_name.items() if not _has_digest(folder / name, digest, self.algorithm)]

    @property
    def digest_set(self) -> frozenset[str]:
        """The digests without names: equal for the same files under other names."""
        return frozenset(self.by_name.values())


def _has_digest(file: Path, digest: str, algorithm: str) -> bool:
    return file.is_file() and content_digest(file, algorithm) == digest
