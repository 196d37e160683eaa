"""Training sequences of prose: windows in an order that the seed shuffles."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffquant.errors import UsageError

# Parts of a text that are encoded side by side.
_TOGETHER = 32


class Prose:
    """Batches that depend on the seed and the step alone; no window is read twice before all were.

    Args:
        text: English prose; its characters are encoded once.
        context: tokens that the tokenizer says a model sees.
        vocabulary: number of tokens of the byte-level BPE that is trained on the text's beginning.
        sample: number of characters that the BPE is trained on.
    """

    def __init__(self, text: str, context: int, vocabulary: int, sample: int) -> None:
        self.tokenizer: PreTrainedTokenizerFast = bpe_tokenizer(text[:sample], vocabulary, context)
        self._ids = encoded(text, self.tokenizer)

    def batch(self, seed: int, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids [rows, length + 1], <s> first, and equal weights [rows, length]."""
        return shuffled_windows(self._ids, self.tokenizer.bos_token_id, seed, step, rows, length)

    def describe(self) -> dict[str, int]:
        return {"vocabulary": len(self.tokenizer), "tokens": len(self._ids)}


def shuffled_windows(
    ids: np.ndarray, first: int, seed: int, step: int, rows: int, length: int
) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length + 1] of windows of a text behind the token `first`, and equal weights [rows, length].

    Which windows depends on the seed and the step alone; none is read twice before all were.

    Raises:
        UsageError: the text is shorter than a window.
    """
    windows = len(ids) // length
    if not windows:
        raise UsageError(f"the text has {len(ids)} tokens, fewer than a window of {length}")
    taken = range(step * rows, (step + 1) * rows)
    order = {turn: np.random.default_rng((seed, turn)).permutation(windows) for turn in {t // windows for t in taken}}
    starts = [int(order[number // windows][number % windows]) * length for number in taken]
    rest = np.stack([ids[start : start + length] for start in starts]).astype(np.int64)
    windowed = torch.from_numpy(np.hstack([np.full((rows, 1), first), rest]))
    return windowed, torch.full((rows, length), 1 / (rows * length))


def encoded(text: str, tokenizer: Any, kind: type = np.uint16) -> np.ndarray:
    """Token ids of a text as numbers of a kind."""
    cut, encode = list(_parts(text)), tokenizer.backend_tokenizer.encode_batch
    batches = (cut[first : first + _TOGETHER] for first in range(0, len(cut), _TOGETHER))
    return np.concatenate([np.array(part.ids, kind) for b in batches for part in encode(b, add_special_tokens=False)])


def _parts(text: str) -> Iterator[str]:
    """Parts of a text, cut between paragraphs: an encoder holds far more than it returns."""
    cuts = [0]
    while cuts[-1] < len(text):
        end = text.find("\n\n", cuts[-1] + (1 << 20))
        cuts.append(len(text) if end < 0 else end)
    return (text[a:b] for a, b in pairwise(cuts))


def bpe_tokenizer(text: str, vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Tokenizer of a byte-level BPE, so that any text encodes; <s> before a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text.split("\n\n"), trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", model_max_length=context)
