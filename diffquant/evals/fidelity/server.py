"""A model behind an OpenAI-compatible server that tells the log-probabilities of a prompt's tokens, as vLLM's does."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import DiffQuantError, UsageError
from diffquant.evals.fidelity.distributions import Likeliest
from diffquant.evals.fidelity.sides import Side
from diffquant.support.plain_data import JsonObject

# Long enough for a prompt on a processor.
_SECONDS = 600


class Server(Side):
    """A served model, known by its likeliest tokens.

    It is asked with the key in VLLM_API_KEY, which `serve` asks for, where that is set.

    Args:
        address: URL of the server, with or without /v1.
        k: number of the likeliest tokens that are asked for at each position.
    """

    def __init__(self, address: str, k: int) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")
        self._k = k

    @property
    def name(self) -> str:
        return f"{self._model} at {self.address}"

    def about(self) -> JsonObject:
        return {"kind": "server", "address": self.address, "model": self._model, "top_k": self._k}

    @property
    def longest(self) -> int | None:
        # A token is always generated, and has to have room behind the chunk.
        length = self._served.get("max_model_len")
        return None if length is None else int(length) - 1

    def tokens(self, text: str) -> list[int]:
        answer = self._post("/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": True})
        tokens: list[int] = answer["tokens"]
        return tokens

    @cached_property
    def first_token(self) -> int | None:
        first = self.tokens("a")[0]
        return first if self.tokens("b")[0] == first else None

    def predict(self, number: int, ids: Tensor, first: int) -> Likeliest:  # noqa: ARG002
        request = {"prompt": ids.tolist(), "max_tokens": 1, "temperature": 0, "prompt_logprobs": self._k}
        choice = self._post("/v1/completions", {"model": self._model, **request})["choices"][0]
        by_token = choice.get("prompt_logprobs")
        if by_token is None:
            raise DiffQuantError(
                f"{self.address} answers without prompt_logprobs: only servers that tell them, such as vLLM's, can be "
                "compared"
            )
        return _likeliest(by_token[first + 1 :], self._k)

    @property
    def _model(self) -> str:
        return str(self._served["id"])

    @cached_property
    def _served(self) -> dict[str, Any]:
        served: dict[str, Any] = self._request("/v1/models", None)["data"][0]
        return served

    def _post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        return self._request(path, json.dumps(body).encode())

    def _request(self, path: str, body: bytes | None) -> dict[str, Any]:
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.address + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                read: dict[str, Any] = json.load(answer)
                return read
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise DiffQuantError(f"{self.address}{path} refuses with {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UsageError(f"{self.address}{path} does not answer: {reason}; is the server running?") from error


def _likeliest(positions: Sequence[Mapping[str, Mapping[str, float]]], k: int) -> Likeliest:
    """Parse a server's answer at P positions; it includes the prompt's own token even if that is unlikely."""
    width = max(map(len, positions))
    ids = torch.zeros(len(positions), width, dtype=torch.int64)
    logs = torch.full((len(positions), width), -torch.inf)
    for position, known in enumerate(positions):
        ranked = sorted(((entry["logprob"], int(token)) for token, entry in known.items()), reverse=True)
        logs[position, : len(ranked)] = torch.tensor([log for log, _ in ranked])
        ids[position, : len(ranked)] = torch.tensor([token for _, token in ranked])
    return Likeliest(ids, logs, k)
