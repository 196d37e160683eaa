"""The file of log-probabilities that llama.cpp's `llama-perplexity --kl-divergence-base FILE` writes and reads.

A text in chunks of n tokens; of each chunk the distributions behind its second half are stored, V numbers of 16 bits
at a position with a scale and an offset of their own. Log-probabilities that are more than 16 nats below the largest
are stored as if they were 16 below.

Source: tools/perplexity/perplexity.cpp of llama.cpp.
"""

import os
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffquant.errors import CheckpointError, UsageError
from diffquant.evals.fidelity.distributions import Whole
from diffquant.evals.fidelity.sides import Side
from diffquant.support.files import check_plain
from diffquant.support.plain_data import JsonObject

MAGIC = b"_logits_"
_HEAD = struct.Struct("<8siii")
# The largest difference of logits that the file can hold.
_RANGE = 16.0
_LEVELS = 65535


@dataclass(frozen=True)
class BaseFile(Side):
    """A model known by an opened file of its log-probabilities.

    Attributes:
        context: number of tokens n of a chunk.
        vocabulary: number of tokens V that have a log-probability.
        chunks: number of chunks.
    """

    path: Path
    context: int
    vocabulary: int
    chunks: int

    @classmethod
    def open(cls, path: Path) -> "BaseFile":
        """Open a file and check its size.

        Raises:
            CheckpointError: it is no such file, or cut short.
        """
        check_plain(path)
        with path.open("rb") as stream:
            head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise CheckpointError(f"{path} is not a file that llama-perplexity --kl-divergence-base writes")
        _, context, vocabulary, chunks = _HEAD.unpack(head)
        if context < 4 or vocabulary < 2 or chunks < 1:
            raise CheckpointError(f"{path} states a context of {context}, {vocabulary} tokens and {chunks} chunks")
        opened = cls(path, context, vocabulary, chunks)
        size, expected = path.stat().st_size, opened._start(chunks)
        if size < expected:
            raise CheckpointError(
                f"{path} has {size} bytes of the {expected} that its header promises: it was cut short"
            )
        return opened

    @property
    def name(self) -> str:
        return str(self.path)

    def about(self) -> JsonObject:
        return {"kind": "llama.cpp base file", "path": self.name}

    @cached_property
    def fixed_chunks(self) -> Tensor:
        count = self.chunks * self.context
        stored = np.fromfile(self.path, "<i4", count, offset=_HEAD.size)
        return torch.from_numpy(stored.astype(np.int64)).view(self.chunks, self.context)

    def tokens(self, text: str) -> list[int]:  # noqa: ARG002
        raise CheckpointError(f"{self.name} holds log-probabilities and no tokenizer")

    @property
    def first_token(self) -> None:
        return None

    def predict(self, number: int, ids: Tensor, first: int) -> Whole:  # noqa: ARG002
        rows, width = scored(self.context), _row_width(self.vocabulary)
        stored = np.fromfile(self.path, "<u2", rows * width, offset=self._start(number)).reshape(rows, width)
        scale, least = np.ascontiguousarray(stored[:, :4]).view("<f4").T.copy()
        codes = torch.from_numpy(stored[:, 4 : 4 + self.vocabulary].astype(np.float32))
        return Whole(codes * torch.from_numpy(scale)[:, None] + torch.from_numpy(least)[:, None], is_stored=True)

    def _start(self, chunk: int) -> int:
        """Byte at which a chunk's distributions begin."""
        head = _HEAD.size + 4 * self.chunks * self.context
        return head + chunk * scored(self.context) * _row_width(self.vocabulary) * 2


def scored(context: int) -> int:
    """Number of positions of a chunk whose distributions count: those behind its second half but for the last."""
    return context - 1 - context // 2


def write_base(path: Path, tokens: Tensor, predictions: Iterator[Whole]) -> None:
    """Write a text's tokens [chunks, n] and the distributions of each chunk, whole or not at all.

    Raises:
        UsageError: the file cannot be written.
    """
    with _appears_whole(path) as write:
        for number, chunk in enumerate(predictions):
            if number == 0:
                write(_HEAD.pack(MAGIC, tokens.shape[1], chunk.logs.shape[1], len(tokens)))
                write(tokens.to(torch.int32).numpy().astype("<i4").tobytes())
            write(_encoded(chunk.logs))


def _encoded(logs: Tensor) -> bytes:
    """Log-probabilities [P, V] as the file stores them."""
    count, vocabulary = logs.shape
    largest = logs.amax(-1, keepdim=True)
    least = torch.maximum(logs.amin(-1, keepdim=True), largest - _RANGE)
    scale = (largest - least) / _LEVELS
    codes = ((logs - least) / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(0, _LEVELS)
    rows = np.zeros((count, _row_width(vocabulary)), "<u2")
    rows[:, :4] = torch.cat([scale, least], 1).numpy().astype("<f4").view("<u2")
    rows[:, 4 : 4 + vocabulary] = codes.numpy()
    return rows.tobytes()


def _row_width(vocabulary: int) -> int:
    """Numbers of 16 bits at a position: two floats, then an even number of codes."""
    return 2 * ((vocabulary + 1) // 2) + 4


@contextmanager
def _appears_whole(path: Path) -> Iterator[Callable[[bytes], object]]:
    """Open a file for writing that gets its name only when it is complete; yields its write function."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("xb") as stream:
            yield stream.write
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another file") from error
    finally:
        temporary.unlink(missing_ok=True)
