"""Training sequences of a text in the tokens of any tokenizer, which a file keeps."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from diffquant.checkpoints.tokens import prefix_token
from diffquant.errors import UsageError
from diffquant.support.files import write_atomically
from research.train.prose import encoded, shuffled_windows

TOKENS = "tokens.bin"
# More characters than a token has on average, in any text.
_LONGEST_TOKEN = 64


class TokenWindows:
    """Batches that depend on the seed and the step alone; no window is read twice before all were.

    Args:
        folder: folder that keeps the tokens, of this text and tokenizer alone, so that encoding happens once.
        text: text to read.
        tokenizer: tokenizer of the model that reads the text.
    """

    def __init__(self, folder: Path, text: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._first = prefix_token(tokenizer)
        kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
        if not (folder / TOKENS).exists():
            write_atomically(folder / TOKENS, encoded(text, tokenizer, kind).tobytes())
        self._ids = np.memmap(folder / TOKENS, kind, "r")

    def batch(self, seed: int, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids [rows, length + 1] and equal weights [rows, length]."""
        return shuffled_windows(self._ids, self._first, seed, step, rows, length)

    def describe(self) -> dict[str, int]:
        return {"vocabulary": len(self.tokenizer), "tokens": len(self._ids)}


def check_length(text: str, tokenizer: Any, tokens: int) -> None:
    """Check that a text has at least `tokens` tokens.

    Raises:
        UsageError: the text has fewer.
    """
    count = len(tokenizer.encode(text[: _LONGEST_TOKEN * tokens], add_special_tokens=False))
    if count < tokens:
        raise UsageError(f"the text has {count} tokens to train on, fewer than a window of {tokens}; give more text")
