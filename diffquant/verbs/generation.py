"""Text generation, piece by piece."""

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from diffquant.checkpoints.texts import check_prompt, encode_chat, iterate_text_pieces, to_logit_divisor, tokens_left
from diffquant.model.causal import CausalModel

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
    ids = encode_chat(tokenizer, prompt) if chat else tokenizer(prompt)["input_ids"]
    config = model.config
    room = tokens_left(ids, config.vocab_size, config.max_position_embeddings, tokenizer)
    inputs = torch.tensor([ids], device=model.device)
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    made = _TokenQueue()
    # By default, transformers draws only from the 50 likeliest tokens.
    drawn = {"do_sample": True, "temperature": to_logit_divisor(temperature), "top_k": 0}
    sampling = drawn if temperature else {"do_sample": False}
    failures: list[BaseException] = []
    abandoned = Event()

    def is_abandoned(input_ids: torch.Tensor, _scores: torch.Tensor, **_options: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), abandoned.is_set(), device=input_ids.device)

    def run() -> None:
        try:
            model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
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
        # An end token need not be a special one, which the tokenizer would leave out.
        said = (token for token in iter(made.tokens.get, None) if token not in ends)
        yield from iterate_text_pieces(said, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
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
