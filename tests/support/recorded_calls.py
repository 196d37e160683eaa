"""The calls of one attention, as backends get them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from diffquant.attention import backend_for
from diffquant.attention.registry import Backend
from diffquant.family.call import AttentionCall
from diffquant.model import attention as modules
from diffquant.model.attention import PairAttention


@contextmanager
def record_calls(attention: PairAttention) -> Iterator[list[AttentionCall]]:
    """Record the calls that an attention makes inside this context, in order."""
    calls: list[AttentionCall] = []

    def choose(call: AttentionCall, name: str) -> Backend:
        if call.meter is attention.meter:
            calls.append(call)
        return backend_for(call, name)

    with patch.object(modules, "backend_for", choose):
        yield calls
