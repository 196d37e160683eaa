"""Text out of a model, piece by piece."""

from collections.abc import Iterator
from threading import Thread
from typing import Any

import torch
from transformers import TextIteratorStreamer

from diffquant.errors import UsageError
from diffquant.model.modeling import DiffTransformer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str | None) -> torch.dtype | None:
    """A torch dtype by name; None stays None.

    Raises:
        UsageError: the name is not known.
    """
    if name is None:
        return None
    if name not in _DTYPES:
        raise UsageError(f"unknown dtype {name!r}; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def stream(
    model: DiffTransformer,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.0,
    chat: bool = False,
) -> Iterator[str]:
    """Continue a prompt.

    Args:
        temperature: 0 decodes greedily.
        chat: wrap the prompt in the tokenizer's chat template, as a user's message.

    Yields:
        Decoded pieces of the continuation as they come.

    Raises:
        UsageError: the prompt is empty, or the tokenizer has no chat template.
    """
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    inputs = {name: ids.to(model.device) for name, ids in _encode(tokenizer, prompt, chat).items()}
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    failures: list[BaseException] = []

    def run() -> None:
        try:
            model.generate(**inputs, **sampling, max_new_tokens=max_new_tokens, streamer=pieces, pad_token_id=0)
        except BaseException as failure:
            failures.append(failure)
            pieces.end()

    worker = Thread(target=run, daemon=True)
    worker.start()
    yield from pieces
    worker.join()
    if failures:
        raise failures[0]


def _encode(tokenizer: Any, prompt: str, chat: bool) -> dict[str, torch.Tensor]:
    if not chat:
        encoded = tokenizer(prompt, return_tensors="pt")
    elif getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        raise UsageError("--chat: the checkpoint's tokenizer has no chat template")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
