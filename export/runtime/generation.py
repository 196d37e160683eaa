"""Text generation with an exported folder, token by token, with measurements of time and memory."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from diffquant.checkpoints.side_files import TOKENIZER_CONFIG, read_json
from diffquant.checkpoints.texts import (
    check_prompt,
    encode_chat,
    iterate_text_pieces,
    read_special_tokens,
    to_logit_divisor,
    tokens_left,
)
from diffquant.errors import CheckpointError, NonFiniteError
from diffquant.measure import can_share_prefixes
from diffquant.onnx.manifest import check_unchanged, read_manifest
from diffquant.onnx.runtime.session import InPlaceDecoder, OnnxModel
from diffquant.support.names import option_name

_PREFILL_CHUNK = 512


@dataclass
class Speed:
    """Time and memory of a run, updated while it runs.

    Attributes:
        prompt_tokens: number of tokens in the prompt.
        new_tokens: number of generated tokens.
        prompt_seconds: time for the prompt (prefill).
        decode_seconds: time for all new tokens except the first.
        cache_bytes: size of the KV cache.
        peak_bytes: peak resident set size of the process, the model included.
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
    """Generates text with an exported folder, without importing torch.

    Attributes:
        model: opened model.
        text: the folder's tokenizer.
        speed: time and memory of the last run.
    """

    def __init__(self, folder: Path, threads: int = 0, model: OnnxModel | None = None, device: str = "auto") -> None:
        """Open a folder, and check that its files are unchanged since export.

        Args:
            threads: number of ONNX Runtime's threads; 0 uses all cores.
            model: an opened model of the folder, whose files are then not checked again.
            device: "auto", "cpu", "cuda" or "cuda:N".

        Raises:
            CheckpointError: the folder is damaged, has changed since export, or has no cache or no tokenizer.
            MissingDependencyError: ONNX Runtime cannot use the device.
        """
        folder = Path(folder)
        manifest, config = read_manifest(folder), read_json(folder / "config.json")
        if model is None:
            check_unchanged(folder, manifest)
        self.model = model or OnnxModel(folder, threads, device=device)
        self.model.require_cache()
        self.text = FolderTokenizer(folder)
        self._ends = read_special_tokens(folder, config).ends
        self._context = read_context_length(folder)
        # If logit scales span tokens, results depend on the number of tokens per call, so the prompt is not split.
        self._chunk = _PREFILL_CHUNK if can_share_prefixes(manifest.options.recipe) else self._context
        self.speed = Speed()

    def stream(
        self, prompt: str, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0, chat: bool = False
    ) -> Iterator[str]:
        """Continue a prompt, and yield the new text piece by piece.

        Args:
            temperature: 0 decodes greedily.
            chat: wrap the prompt in the tokenizer's chat template, as a user's message.

        Yields:
            Pieces of the continuation's text as they are decoded.

        Raises:
            UsageError: the prompt is empty, not text, or longer than the model's context, or there is no chat template.
        """
        check_prompt(prompt)
        ids = self.text.encode_chat(prompt) if chat else self.text.encode(prompt)
        pick = _greedy if temperature == 0 else _sampler(temperature, seed)
        yield from iterate_text_pieces(self.generate_tokens(ids, max_new_tokens, pick), self.text.decode)

    def generate_tokens(
        self, ids: list[int], max_new_tokens: int, choose_token: Callable[[np.ndarray], int] | None = None
    ) -> Iterator[int]:
        """Generate tokens after a prompt, and yield each token's id.

        Generation stops after `max_new_tokens`, at an end token, which is not yielded, or at the end of the model's
        context.

        Args:
            ids: token ids of the prompt.
            choose_token: function that chooses a token id from logits [vocabulary]; by default the largest logit's.

        Raises:
            UsageError: there are no ids, they fill the model's context, or one is not in the vocabulary.
            NonFiniteError: logits are infinite or NaN.
        """
        room = min(max_new_tokens, tokens_left(ids, self.model.vocabulary, self._context, self.text))
        choose_token = choose_token or _greedy
        started = time.perf_counter()
        state = InPlaceDecoder(self.model, 1, len(ids) + room)
        logits = np.empty(0)
        for first in range(0, len(ids), self._chunk):
            logits = state.step(np.array([ids[first : first + self._chunk]]))[0, -1]
        self.speed = Speed(len(ids), 0, time.perf_counter() - started, cache_bytes=state.nbytes)
        for count in range(room):
            token = choose_token(self._finite(logits))
            if token in self._ends:
                return
            self.speed.new_tokens += 1
            self.speed.peak_bytes = peak_bytes()
            yield token
            if count + 1 < room:
                before = time.perf_counter()
                logits = state.step(np.array([[token]]))[0, -1]
                self.speed.decode_seconds += time.perf_counter() - before

    def _finite(self, logits: np.ndarray) -> np.ndarray:
        if np.isfinite(logits.max()):
            return logits
        advice = (
            f"export it with {option_name('dtype', 'float32')}" if logits.dtype == np.float16 else "export it again"
        )
        raise NonFiniteError(
            f"{self.model.folder} computes NaN or infinity in {logits.dtype}, and no token can be chosen: {advice}; "
            "`diffquant verify` shows in which layer that begins"
        )


class FolderTokenizer:
    """A folder's tokenizer, loaded from tokenizer.json, or by transformers if there is no such file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fast: Tokenizer | None = None
        self._slow: Any = None
        file = folder / "tokenizer.json"
        if file.is_file():
            try:
                self._fast = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises bare Exception
                raise CheckpointError(f"cannot read {file}: {error}") from error
            # The file may contain truncation and padding settings from fine-tuning.
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.add_special_tokens(_read_roles(folder))
        else:
            self._slow = self._through_transformers()

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt."""
        return list(self._fast.encode(prompt).ids if self._fast else self._slow(prompt)["input_ids"])

    def encode_chat(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt as a user's message in the tokenizer's chat template.

        Raises:
            UsageError: the tokenizer's chat template is missing or fails.
        """
        self._slow = self._slow or self._through_transformers()
        return encode_chat(self._slow, prompt)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        decode = self._fast.decode if self._fast else self._slow.decode
        return str(decode(ids, skip_special_tokens=True))

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return the text of a token id in the vocabulary, or None if there is no such token."""
        return self._fast.id_to_token(token) if self._fast else self._slow.convert_ids_to_tokens(token)

    def _through_transformers(self) -> Any:
        from diffquant.checkpoints.tokenizer import load_tokenizer

        return load_tokenizer(self._folder)


def _read_roles(folder: Path) -> list[str]:
    """Return the texts of tokens with a role, such as eos_token, which transformers always takes as special."""
    file = folder / TOKENIZER_CONFIG
    named = [token for key, token in read_json(file).items() if key.endswith("_token")] if file.is_file() else []
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    return [text for text in texts if isinstance(text, str)]


def read_context_length(folder: Path) -> int:
    """Return an exported model's context length in tokens, from its config.json, or 2048 if it has none.

    Raises:
        CheckpointError: the context length is not an integer.
    """
    length = read_json(folder / "config.json").get("max_position_embeddings", 2048)
    if type(length) is not int:
        raise CheckpointError(f"{folder / 'config.json'}: max_position_embeddings is {length!r}, not a number")
    return length


def peak_bytes() -> int:
    """Return the peak resident set size of this process so far, in bytes."""
    try:
        import resource
    except ImportError:
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _greedy(logits: np.ndarray) -> int:
    return int(logits.argmax())


def _sampler(temperature: float, seed: int) -> Callable[[np.ndarray], int]:
    rng = np.random.default_rng(seed)

    def pick(logits: np.ndarray) -> int:
        # The argmax of logits plus Gumbel noise is a sample from their softmax.
        return int((logits.astype(np.float64) / to_logit_divisor(temperature) + rng.gumbel(size=logits.shape)).argmax())

    return pick
