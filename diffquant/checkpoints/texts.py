"""Texts and prompts that models read, their special tokens, and decoding of generated tokens. No torch here."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant import data
from diffquant.checkpoints.side_files import POINTER, is_lfs_pointer, read_json
from diffquant.errors import CheckpointError, UsageError
from diffquant.support.files import read_text
from diffquant.support.names import option_name


def load_text(path: Path | None = None, characters: int | None = None) -> str:
    """Read the first `characters` of a UTF-8 file, or of the bundled text; all of them by default.

    Raises:
        UsageError: the file cannot be read or holds no text.
    """
    if path is None:
        return data.books_text()[:characters]
    try:
        text = read_text(path, "utf-8-sig")[:characters]
    except OSError as error:
        raise UsageError(f"cannot read text from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text ({error}); convert it, for example with iconv") from error
    if is_lfs_pointer(text[:100].encode()):
        raise UsageError(f"{path} {POINTER}")
    if not text.strip():
        raise UsageError(f"{path} is empty; give a file with text")
    return text


def text_digest(text: str) -> str:
    """Return 16 hex digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_COLDEST = 1e-30


def check_prompt(prompt: str) -> None:
    """Check that a prompt is text.

    Raises:
        UsageError: it is empty, or contains surrogates, which Python makes of command-line bytes that are not UTF-8.
    """
    if not prompt.strip():
        raise UsageError("the prompt is empty; give some text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not UTF-8 text from character {error.start} on; convert it first") from error


def to_logit_divisor(temperature: float) -> float:
    """Return the number to divide logits by before sampling: the temperature, but at least 1e-30.

    Below 1e-30, dividing by the temperature would overflow. At 1e-30, sampling selects the top-1 token even if two
    float32 logits are as close as possible.
    """
    return max(float(temperature), _COLDEST)


def check_tokens(ids: Sequence[int], vocabulary: int, tokenizer: Any) -> None:
    """Check that token ids are in a model's vocabulary; everything that encodes text calls this.

    Args:
        vocabulary: number of rows of the model's embedding.
        tokenizer: tokenizer that returned the ids.

    Raises:
        UsageError: an id is not in the vocabulary.
    """
    if ids and min(ids) < 0:
        raise UsageError(f"{min(ids)} is no token id; the model has ids from 0 to {vocabulary - 1}")
    if ids and (token := max(ids)) >= vocabulary:
        spelling = tokenizer.convert_ids_to_tokens(token)
        raise UsageError(
            f"the tokenizer encodes the text with token {token} ({spelling!r}), but the model's embedding has "
            f"{vocabulary} rows: give the model its own tokenizer, or resize its embedding"
        )


def tokens_left(ids: Sequence[int], vocabulary: int, context: int, tokenizer: Any) -> int:
    """Return the number of tokens that fit into a context after a prompt.

    Args:
        ids: token ids of the prompt.
        vocabulary: number of rows of the model's embedding.
        context: length of the model's context in tokens.
        tokenizer: tokenizer that returned the ids.

    Raises:
        UsageError: no token fits, or the prompt has no tokens or one that is not in the vocabulary.
    """
    if not ids:
        raise UsageError("the prompt has no tokens: the vocabulary has none of its characters; use another prompt")
    check_tokens(ids, vocabulary, tokenizer)
    if len(ids) >= context:
        raise UsageError(f"the prompt has {len(ids)} tokens; the model's context ends at {context}; shorten it")
    return context - len(ids)


def encode_chat(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of a prompt as a user's message in the tokenizer's chat template.

    Raises:
        UsageError: the chat template is missing or fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{option_name('chat')}: the model's tokenizer has no chat template")
    message = [{"role": "user", "content": prompt}]
    try:
        encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # a template is a program, and may fail in any way
        raise UsageError(f"{option_name('chat')}: the tokenizer's chat template fails: {error}") from error
    return list(encoded["input_ids"])


def iterate_text_pieces(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Yield the text of tokens as they arrive; the pieces together are the text of all of them.

    Args:
        decode: function from tokens to their text; the text may lack the leading space of the first token.
    """
    # The latest tokens, beginning with one that has text and was yielded, and how many of them were yielded.
    window: list[int] = []
    known = 0
    for token in tokens:
        window.append(token)
        text = decode(window)
        # A character of several tokens is decoded as U+FFFD until its last token arrives.
        if text.endswith("\ufffd"):
            continue
        yield text[len(decode(window[:known])) :]
        if decode(window[known:]):
            del window[:known]
        known = len(window)
    if rest := decode(window)[len(decode(window[:known])) :]:
        yield rest


_FILE = "generation_config.json"


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that begin, end and pad a text.

    Attributes:
        bos: token that begins a text, or None if there is none.
        ends: tokens that end a text: generation stops at the first of them.
        pad: token that pads the shorter texts of a batch, or None if there is none.
    """

    bos: int | None
    ends: tuple[int, ...]
    pad: int | None

    @property
    def eos(self) -> int | list[int] | None:
        """`ends` in the form of eos_token_id in transformers' configurations."""
        return list(self.ends) if len(self.ends) > 1 else next(iter(self.ends), None)


def read_special_tokens(path: Path, config: Mapping[str, Any]) -> SpecialTokens:
    """Read the special tokens that transformers' `generate` uses.

    They come from generation_config.json if there is one, otherwise from config.json. Other settings in that file, for
    sampling or penalties, are ignored: text is decoded greedily unless the caller asks for sampling.

    Args:
        path: folder of a checkpoint or an export, or a .gguf file.
        config: content of its config.json.

    Raises:
        CheckpointError: the file cannot be read, or an entry is not a token id.
    """
    file = path / _FILE
    origin, entries = (file, read_json(file)) if file.is_file() else (path / "config.json", config)
    bos, eos, pad = (entries.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    wrong = [f"eos_token_id is {eos!r}"] if not all(type(token) is int for token in ends) else []
    wrong += [
        f"{name}_token_id is {token!r}"
        for name, token in (("bos", bos), ("pad", pad))
        if token is not None and type(token) is not int
    ]
    if wrong:
        raise CheckpointError(f"{origin}: {', '.join(wrong)}, which is not a token id")
    return SpecialTokens(bos, tuple(ends), pad)
