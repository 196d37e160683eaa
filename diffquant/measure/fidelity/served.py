"""A model behind a server with vLLM's API as one of the two that are compared."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from http.client import HTTPException
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import DiffQuantError, UsageError
from diffquant.measure.fidelity.models import ComparedModel, Distributions, count_scored_positions
from diffquant.support.plain_data import JsonObject

# Long enough for the prefill of a chunk on a CPU.
_SECONDS = 600
# A rounded probability may exceed 1.
_LARGEST_LOG = 1e-3


class ServedModel(ComparedModel):
    """A model behind a server, which returns only the top-k tokens.

    Requests carry the key in VLLM_API_KEY if that is set; servers that `serve` starts require the same key.

    Args:
        address: URL of the server, with or without /v1.
        k: number of top tokens requested at each position.
    """

    def __init__(self, address: str, k: int) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")
        self._k = k

    @property
    def name(self) -> str:
        return f"{self._model} at {self.address}"

    def describe_model(self) -> JsonObject:
        return {"kind": "server", "address": self.address, "model": self._model, "top_k": self._k}

    @property
    def max_chunk_length(self) -> int | None:
        # The server always generates at least one token, for which the context needs space after the chunk.
        length = self._served["max_model_len"]
        return None if length is None else length - 1

    def tokens(self, text: str) -> list[int]:
        request = {"model": self._model, "prompt": text, "add_special_tokens": True}
        with self._ask("/tokenize", request) as answer:
            return [int(token) for token in answer["tokens"]]

    @cached_property
    def prepended_bos_id(self) -> int | None:
        first = self.tokens("a")[:1]
        return first[0] if first and self.tokens("b")[:1] == first else None

    def predict(self, chunk_index: int, ids: Tensor) -> Distributions:  # noqa: ARG002
        request = {"model": self._model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0}
        with self._ask("/v1/completions", request | {"prompt_logprobs": self._k}) as answer:
            by_token = answer["choices"][0].get("prompt_logprobs")
            if by_token is None:
                raise DiffQuantError(
                    f"{self.address} does not return prompt_logprobs; use a server that does, such as vLLM"
                )
            if len(by_token) != len(ids):
                raise ValueError(f"prompt_logprobs of {len(by_token)} tokens for a prompt of {len(ids)}")
            return _parse_likeliest(by_token[-count_scored_positions(len(ids)) :], self._k)

    @property
    def _model(self) -> str:
        return str(self._served["id"])

    @cached_property
    def _served(self) -> dict[str, Any]:
        with self._ask("/v1/models") as answer:
            served = dict(answer["data"][0])
            length = served.get("max_model_len")
            return {"id": served["id"], "max_model_len": None if length is None else int(length)}

    def _request(self, path: str, body: Mapping[str, object] | None) -> dict[str, Any]:
        """Get a path of the server, or post a body to it, and return the answer."""
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(self.address + path, data, headers)
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                read: dict[str, Any] = json.load(answer)
                return read
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise DiffQuantError(f"{self.address}{path} returned error {error.code}: {said}") from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise UsageError(f"{self.address}{path} does not answer: {reason}; is the server running?") from error

    @contextmanager
    def _ask(self, path: str, body: Mapping[str, object] | None = None) -> Iterator[dict[str, Any]]:
        """Yield what `_request` returns; raise DiffQuantError if it turns out not to have the form of vLLM's answer."""
        try:
            yield self._request(path, body)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise DiffQuantError(
                f"{self.address}{path} has no answer of vLLM's form ({type(error).__name__}: {error}); "
                "give the URL of a server with vLLM's API"
            ) from error


def _parse_likeliest(positions: Sequence[Mapping[str, Mapping[str, float]]], k: int) -> Distributions:
    """Parse a server's answer at P positions; it includes the prompt's own token even if that is unlikely.

    Raises:
        ValueError: a position has fewer than k tokens, or a number that is no token id or log-probability.
    """
    width, fewest = max(map(len, positions)), min(map(len, positions))
    if fewest < k:
        raise ValueError(f"{fewest} of the {k} likeliest tokens")
    ids = torch.zeros(len(positions), width, dtype=torch.int64)
    logs = torch.full((len(positions), width), -torch.inf)
    for position, known in enumerate(positions):
        ranked = sorted(((entry["logprob"], int(token)) for token, entry in known.items()), reverse=True)
        logs[position, : len(ranked)] = torch.tensor([log for log, _ in ranked])
        ids[position, : len(ranked)] = torch.tensor([token for _, token in ranked])
    if not (logs <= _LARGEST_LOG).all() or (ids < 0).any():
        raise ValueError("log-probabilities that are NaN or above 0, or token ids below 0")
    return Distributions(logs, ids, k)
