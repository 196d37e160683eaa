"""Text out of an exported folder, token by token, with what it took."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffquant.checkpoint.load import load_tokenizer
from diffquant.checkpoint.reader import read_json
from diffquant.errors import UsageError
from diffquant.export.session import InPlace, OnnxModel

_PREFILL_CHUNK = 512


@dataclass
class Speed:
    """What a run took; filled in as it goes.

    Attributes:
        prompt_tokens, new_tokens: counts.
        prompt_seconds: until the first new token.
        decode_seconds: for the further ones.
        cache_bytes: of the KV cache.
        peak_bytes: of the process, the model included.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0
    peak_bytes: int = 0

    def __str__(self) -> str:
        decoded = max(self.new_tokens - 1, 0)
        return (
            f"{self.prompt_tokens} prompt tokens in {self.prompt_seconds:.2f} s "
            f"({self.prompt_tokens / max(self.prompt_seconds, 1e-9):.1f} tokens/s), {self.new_tokens} new ones, "
            f"{decoded / max(self.decode_seconds, 1e-9):.1f} tokens/s; KV cache {self.cache_bytes / 1e6:.1f} MB, "
            f"process peak {self.peak_bytes / 1e6:.0f} MB"
        )


class Generator:
    """An exported folder ready to continue prompts.

    Attributes:
        speed: of the last run.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        """Open a folder.

        Raises:
            CheckpointError: it is damaged, has no cache, or no tokenizer.
        """
        self._take(OnnxModel(Path(folder), threads), load_tokenizer(folder))

    @classmethod
    def of(cls, model: OnnxModel, tokenizer: Any) -> "Generator":
        """A generator on a model that is open already."""
        generator = cls.__new__(cls)
        generator._take(model, tokenizer)
        return generator

    def _take(self, model: OnnxModel, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        config = read_json(model.folder / "config.json")
        end = config.get("eos_token_id")
        self._ends = set(end) if isinstance(end, list) else {end}
        self._context: int = config.get("max_position_embeddings", 2048)
        self.speed = Speed()

    def stream(
        self, prompt: str, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0, chat: bool = False
    ) -> Iterator[str]:
        """Continue a prompt.

        Args:
            temperature: 0 decodes greedily.
            chat: wrap the prompt in the tokenizer's chat template, as a user's message.

        Yields:
            Decoded pieces of the continuation as they come.

        Raises:
            UsageError: the prompt is empty, longer than the model's context, or there is no chat template.
        """
        ids = encode(self.tokenizer, prompt, chat)
        if len(ids) >= self._context:
            raise UsageError(f"the prompt has {len(ids)} tokens; the model's context ends at {self._context}")
        pick = _greedy if temperature == 0 else _sampler(temperature, seed)
        shown = ""
        tokens: list[int] = []
        for token in self.tokens(ids, min(max_new_tokens, self._context - len(ids)), pick):
            tokens.append(token)
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            # A character of several tokens is decoded as a replacement until it is whole.
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text

    def tokens(
        self, ids: list[int], max_new_tokens: int, pick: "Callable[[np.ndarray], int] | None" = None
    ) -> Iterator[int]:
        """Continue token ids, greedily by default, until a token that ends the text."""
        pick = pick or _greedy
        started = time.perf_counter()
        state = InPlace(self.model, 1, len(ids) + max_new_tokens)
        logits = np.empty(0)
        for first in range(0, len(ids), _PREFILL_CHUNK):
            logits = state.step(np.array([ids[first : first + _PREFILL_CHUNK]]))[0, -1]
        self.speed = Speed(len(ids), 0, time.perf_counter() - started, cache_bytes=state.nbytes)
        for count in range(max_new_tokens):
            token = pick(logits)
            if token in self._ends:
                return
            self.speed.new_tokens += 1
            self.speed.peak_bytes = peak_bytes()
            yield token
            if count + 1 < max_new_tokens:
                before = time.perf_counter()
                logits = state.step(np.array([[token]]))[0, -1]
                self.speed.decode_seconds += time.perf_counter() - before


def encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt.

    Raises:
        UsageError: it is empty, or the tokenizer has no chat template.
    """
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("the tokenizer has no chat template; leave out --chat")
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _greedy(logits: np.ndarray) -> int:
    return int(logits.argmax())


def _sampler(temperature: float, seed: int) -> Callable[[np.ndarray], int]:
    rng = np.random.default_rng(seed)

    def pick(logits: np.ndarray) -> int:
        # The maximum of logits plus Gumbel noise is a sample of their softmax.
        return int((logits.astype(np.float64) / temperature + rng.gumbel(size=logits.shape)).argmax())

    return pick
