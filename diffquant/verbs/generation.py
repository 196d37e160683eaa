"""Text generation, piece by piece."""

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from diffquant.checkpoints.texts import check_prompt, iterate_text_pieces, to_divisor, tokens_left
from diffquant.errors import UsageError
from diffquant.model.causal import CausalModel
from diffquant.support.names import option_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stream(
    model: CausalModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.0,
    chat: bool = False,
) -> Iterator[str]:
    """Generate the continuation of a prompt, piece by piece.

    Args:
        max_new_tokens: maximum number of tokens to generate; fewer if the model's context is full.
        temperature: sampling temperature; 0 decodes greedily.
        chat: whether to wrap the prompt in the tokenizer's chat template as a user's message.

    Yields:
        Decoded pieces of the continuation.

    Raises:
        UsageError: the prompt is empty, not text, or fills the model's context; the tokenizer does not match the model;
            or its chat template is missing or fails.
    """
    check_prompt(prompt)
    inputs = {name: ids.to(model.device) for name, ids in _model_inputs(tokenizer, prompt, chat).items()}
    ids = inputs["input_ids"][0].tolist()
    config = model.config
    room = tokens_left(ids, config.vocab_size, config.max_position_embeddings, tokenizer)
    made = _TokenQueue()
    # transformers would draw among the 50 likeliest tokens alone.
    drawn = {"do_sample": True, "temperature": to_divisor(temperature), "top_k": 0}
    sampling = drawn if temperature else {"do_sample": False}
    failures: list[BaseException] = []
    abandoned = Event()

    def is_abandoned(input_ids: torch.Tensor, _scores: torch.Tensor, **_options: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), abandoned.is_set(), device=input_ids.device)

    def run() -> None:
        try:
            model.generate(
                **inputs,
                **sampling,
                max_new_tokens=min(max_new_tokens, room),
                streamer=made,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([is_abandoned]),
            )
        except BaseException as failure:
            failures.append(failure)
            made.end()

    worker = Thread(target=run)
    worker.start()
    try:
        yield from iterate_text_pieces(
            iter(made.tokens.get, None), lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        )
    finally:
        # Interpreters that end while torch computes in a thread abort.
        abandoned.set()
        worker.join()
    if failures:
        raise failures[0]


class _TokenQueue(BaseStreamer):
    """A queue of generated tokens, which ends with None."""

    def __init__(self) -> None:
        self.tokens: SimpleQueue[int | None] = SimpleQueue()
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        for token in () if self._is_prompt else value.tolist():
            self.tokens.put(token)
        self._is_prompt = False

    def end(self) -> None:
        self.tokens.put(None)


def _model_inputs(tokenizer: "PreTrainedTokenizerBase", prompt: str, chat: bool) -> dict[str, torch.Tensor]:
    if not chat:
        encoded = tokenizer(prompt, return_tensors="pt")
    elif getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt}]
        try:
            encoded = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # a template is a program, and may fail in any way
            raise UsageError(f"{option_name('chat')}: the tokenizer's chat template fails: {error}") from error
    else:
        raise UsageError(f"{option_name('chat')}: the checkpoint's tokenizer has no chat template")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
