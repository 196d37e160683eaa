"""What a model has to answer, and how far an engine's answers are from it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import diffquant
from diffquant.recipe.numbers.formats import format_named

# Logits of random models are some tens, and sums run in another order.
CLOSE = 5e-4
Answer = dict[str, Any]


@contextmanager
def truncated_cache() -> Iterator[None]:
    """Let diffquant's caches of e4m3 drop what lies beyond a level, as vLLM's kernel for processors does."""
    number_format = format_named("e4m3")
    nearest = number_format.encode

    def codes(x: Tensor, scale: Tensor) -> Tensor:
        found = nearest(x, scale)
        is_beyond = number_format.levels_of(found, torch.float32).abs() > (x / scale).abs()
        return found - found.sign() * is_beyond

    with patch.object(number_format, "encode", codes):
        yield


def expected(
    folder: Path,
    prompts: list[list[int]],
    dtype: str = "float32",
    new: int = 8,
    activations: str | int = 16,
    kv: str | int = 16,
) -> list[Answer]:
    """What `diffquant.load` answers, one prompt at a time; by default without the recipe's cache."""
    model = diffquant.load(folder, {"kv": kv, "activations": activations}, dtype=dtype)
    answers = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            asked = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
            logprobs = (
                model(tokens).logits.float().log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()
            )
            start = len(prompt) - 1
            answers.append(
                {"tokens": tokens[0, len(prompt) :].tolist(), "prompt": logprobs[:start], "logprobs": logprobs[start:]}
            )
    return answers


def record(where: str, source: str, bits: str, furthest: float | None, is_same: bool | None, **of: str) -> None:
    """Note what was found in the file that DIFFQUANT_SERVING_RECORD names, for bench/results/serving.json.

    `of` has the cache, the activations or the refusal, where there is one.
    """
    if place := os.environ.get("DIFFQUANT_SERVING_RECORD"):
        found = {"where": where, "source": source, "bits": bits, "furthest": furthest, "tokens equal": is_same} | of
        with Path(place).open("a") as file:
            file.write(json.dumps(found) + "\n")


def check(
    where: str,
    source: str,
    bits: str,
    rounds: list[list[Answer]] | str,
    wanted: list[Answer],
    close: float = CLOSE,
    **of: str,
) -> None:
    """Check that each round of an engine's answers is the model's own: log-probabilities, and which tokens come."""
    # A text is the error that the engine ended with.
    assert not isinstance(rounds, str), rounds
    pairs = [pair for answers in rounds for pair in zip(answers, wanted, strict=True)]
    furthest = max(
        abs(a - b)
        for answer, want in pairs
        for name in ("prompt", "logprobs")
        if answer[name] is not None
        for a, b in zip(answer[name], want[name], strict=True)
    )
    is_same = all(answer["tokens"] == want["tokens"] for answer, want in pairs)
    record(where, source, bits, furthest, is_same, **of)
    assert furthest < close
    assert is_same


def check_low_bits(folder: Path, rounds: list[list[Answer]] | str, text: list[int]) -> None:
    """Check that an engine in bfloat16 is as near to float32 as our own bfloat16 is, in means over a text."""
    assert not isinstance(rounds, str), rounds
    exact, ours = (expected(folder, [text], dtype)[0]["prompt"] for dtype in ("float32", "bfloat16"))
    theirs = rounds[0][0]["prompt"]
    errors = [mean(abs(a - b) for a, b in zip(each, exact, strict=True)) for each in (theirs, ours)]
    assert errors[0] < 1.5 * errors[1]
