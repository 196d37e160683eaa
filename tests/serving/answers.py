"""What a model has to answer, and how far an engine's answers are from it."""

from pathlib import Path
from typing import Any

import torch

import diffquant

# Logits of random models are some tens, and sums run in another order.
CLOSE = 5e-4
Answer = dict[str, Any]


def expected(folder: Path, prompts: list[list[int]], dtype: str = "float32", new: int = 8) -> list[Answer]:
    """What `diffquant.load` answers without the recipe's cache, one prompt at a time."""
    model = diffquant.load(folder, {"kv": 16}, dtype=dtype)
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


def furthest(answers: list[Answer], wanted: list[Answer]) -> tuple[float, bool]:
    """The largest difference of a token's log-probability, and whether all greedy tokens are the same."""
    assert not isinstance(answers, str), answers
    pairs = list(zip(answers, wanted, strict=True))
    differences = [
        abs(a - b)
        for answer, want in pairs
        for name in ("prompt", "logprobs")
        if answer[name] is not None
        for a, b in zip(answer[name], want[name], strict=True)
    ]
    return max(differences), [answer["tokens"] for answer in answers] == [want["tokens"] for want in wanted]
