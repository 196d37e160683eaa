"""The file of log-probabilities that llama.cpp's `llama-perplexity --kl-divergence-base FILE` writes and reads.

The text is cut into chunks of n tokens. The file stores the next-token distributions at the positions of each chunk's
second half: a float32 scale, a float32 offset and V codes of 16 bits per position. Log-probabilities more than 16 nats
below the largest are stored as 16 nats below it.

Source: tools/perplexity/perplexity.cpp of llama.cpp.
"""

import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diffquant.errors import CheckpointError, UsageError
from diffquant.measure.fidelity.models import ComparedModel, Distributions, count_scored_positions
from diffquant.support.files import check_regular_file, replace_atomically
from diffquant.support.plain_data import JsonObject

MAGIC = b"_logits_"
_HEAD = struct.Struct("<8siii")
# Largest difference, in nats, of the log-probabilities that the file can store for one position.
_RANGE = 16.0
_LEVELS = 65535


class BaseFile(ComparedModel):
    """A model that is given only as a file of its log-probabilities.

    Attributes:
        context: number n of tokens in a chunk.
        vocabulary: number V of tokens in the vocabulary.
        chunks: number of chunks.
    """

    context: int
    vocabulary: int
    chunks: int

    def __init__(self, path: Path) -> None:
        """Open a file and check its size.

        Raises:
            CheckpointError: the file has another format, a damaged header, or is truncated.
        """
        check_regular_file(path)
        with path.open("rb") as stream:
            head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            raise CheckpointError(f"{path} is not a file that llama-perplexity --kl-divergence-base writes")
        self.path = path
        _, self.context, self.vocabulary, self.chunks = _HEAD.unpack(head)
        if self.context < 4 or self.vocabulary < 2 or self.chunks < 1:
            raise CheckpointError(
                f"{path} is damaged: its header states a context of {self.context}, a vocabulary of "
                f"{self.vocabulary} and {self.chunks} chunks; at least 4, 2 and 1 are needed; write the file again"
            )
        size, expected = path.stat().st_size, self._start(self.chunks)
        if size < expected:
            raise CheckpointError(
                f"{path} is truncated: it has {size} bytes instead of the {expected} in its header; write it again"
            )

    @property
    def name(self) -> str:
        return str(self.path)

    def describe_model(self) -> JsonObject:
        return {"kind": "llama.cpp base file", "path": self.name}

    @cached_property
    def fixed_chunks(self) -> Tensor:
        count = self.chunks * self.context
        stored = np.fromfile(self.path, "<i4", count, offset=_HEAD.size)
        return torch.from_numpy(stored.astype(np.int64)).view(self.chunks, self.context)

    def tokens(self, text: str) -> list[int]:  # noqa: ARG002
        raise CheckpointError(f"{self.name} contains log-probabilities, but no tokenizer")

    @property
    def prepended_bos_id(self) -> None:
        return None

    def predict(self, chunk_index: int, ids: Tensor) -> Distributions:  # noqa: ARG002
        rows, width = count_scored_positions(self.context), _row_width(self.vocabulary)
        stored = np.fromfile(self.path, "<u2", rows * width, offset=self._start(chunk_index)).reshape(rows, width)
        scale, least = np.ascontiguousarray(stored[:, :4]).view("<f4").T.copy()
        codes = torch.from_numpy(stored[:, 4 : 4 + self.vocabulary].astype(np.float32))
        return Distributions(
            codes * torch.from_numpy(scale)[:, None] + torch.from_numpy(least)[:, None], is_stored=True
        )

    def _start(self, chunk: int) -> int:
        """Return the byte at which a chunk's distributions begin."""
        head = _HEAD.size + 4 * self.chunks * self.context
        return head + chunk * count_scored_positions(self.context) * _row_width(self.vocabulary) * 2


def write_base(path: Path, tokens: Tensor, predictions: Iterator[Distributions]) -> None:
    """Write a file of log-probabilities, atomically.

    Args:
        tokens: token ids [chunks, n] of the text.
        predictions: distributions of each chunk over the whole vocabulary, at its scored positions.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with replace_atomically(path) as temporary, temporary.open("wb") as stream:
            for number, chunk in enumerate(predictions):
                if number == 0:
                    stream.write(_HEAD.pack(MAGIC, tokens.shape[1], chunk.logs.shape[1], len(tokens)))
                    stream.write(tokens.to(torch.int32).numpy().astype("<i4").tobytes())
                stream.write(_encode(chunk.logs))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another file") from error


def _encode(logs: Tensor) -> bytes:
    """Encode log-probabilities [P, V] as the file stores them."""
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
    """Count the 16-bit numbers stored for a position: four for two float32, then an even number of codes."""
    return 2 * ((vocabulary + 1) // 2) + 4
