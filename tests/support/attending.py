"""Attention of a call by the backend that serves it."""

from torch import Tensor

from diffquant.attention import backend_for
from diffquant.family.call import AttentionCall


def attend(call: AttentionCall, backend: str = "auto") -> Tensor:
    return backend_for(call, backend).compute(call)
