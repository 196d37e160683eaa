"""The training text as tokens: what is trained on, and what is held out of it to choose a rate by."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffquant.errors import UsageError
from diffquant.support.files import write_atomically
from research.train.prose import bpe_tokenizer, encoded, shuffled_windows

VOCABULARY, SAMPLE, CONTEXT = 2048, 4_000_000, 512
WINDOW = 256
# Windows that are held out, one at the end of each of as many equal stretches of the text.
HELD_OUT = 512


class TrainingText:
    """Batches of a text that depend on the seed and the step alone.

    Attributes:
        tokenizer: byte-level BPE of the text's beginning.
        held_out: token ids [512, 257] that are never trained on, <s> first.
        digest: SHA-256 of the text.
    """

    def __init__(self, text: str, cache: Path) -> None:
        """Encode a text, or read the tokens that `cache` keeps of it.

        Raises:
            UsageError: the text is too short to hold anything out of it.
        """
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.characters = len(text)
        folder = cache / f"text-{self.digest[:16]}"
        if not (folder / "tokens.bin").exists():
            folder.mkdir(parents=True, exist_ok=True)
            tokenizer = bpe_tokenizer(text[:SAMPLE], VOCABULARY, CONTEXT)
            tokenizer.save_pretrained(folder)
            write_atomically(folder / "tokens.bin", encoded(text, tokenizer).tobytes())
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        ids = np.fromfile(folder / "tokens.bin", np.uint16)
        stretch = len(ids) // HELD_OUT
        if stretch < 4 * WINDOW:
            raise UsageError(
                f"the text has {len(ids):,} tokens; give one of {4 * WINDOW * HELD_OUT:,} at least (better 33 million, "
                "so that no window is read twice)"
            )
        stretches = ids[: HELD_OUT * stretch].reshape(HELD_OUT, stretch)
        self._ids = stretches[:, :-WINDOW].reshape(-1)
        first = torch.full((HELD_OUT, 1), self.tokenizer.bos_token_id)
        self.held_out = torch.cat([first, torch.from_numpy(stretches[:, -WINDOW:].astype(np.int64))], 1)

    def batch(self, seed: int, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids [rows, length + 1], <s> first, and equal weights [rows, length]."""
        ids, weights = shuffled_windows(self._ids, self.tokenizer.bos_token_id, seed, step, rows, length)
        return ids, weights

    def describe(self) -> dict[str, Any]:
        """The text, for a run's record."""
        return {
            "sha256": self.digest,
            "characters": self.characters,
            "training_tokens": len(self._ids),
            "held_out_tokens": HELD_OUT * WINDOW,
        }


class WithoutFirst:
    """Batches of a text whose windows have no <s>, and so one token less."""

    def __init__(self, text: TrainingText) -> None:
        self.tokenizer = text.tokenizer
        self._text = text

    def batch(self, seed: int, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids [rows, length] and equal weights [rows, length - 1]."""
        ids, weights = self._text.batch(seed, step, rows, length)
        return ids[:, 1:], weights[:, 1:] * (length / (length - 1))

    def describe(self) -> dict[str, Any]:
        """The text, for a run's record."""
        return self._text.describe()
