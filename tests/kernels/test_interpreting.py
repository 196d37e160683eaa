"""Triton's interpreter gives the same bits without what it does for nothing."""

from dataclasses import replace

import torch
import triton.language as tl
from triton.runtime import interpreter

from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.decode import decode
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import random_call


def decoded():
    q, k, v, lam = random_call("v2", 1, 20)
    store = KVStore(Recipe.of(kv=6), k[0], v, 20)
    append(store, k[0], v)
    return [decode(q, store, lam, scale=0.125), *store.read()]


def test_bits_are_those_of_the_interpreter_as_it_ships(monkeypatch):
    quick = decoded()
    # What the launches replaced is there again.
    assert tl.core.is_builtin(tl.load)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=True))
    monkeypatch.setattr(interpreter, "GridExecutor", interpreter.GridExecutor.__base__)
    assert all(torch.equal(x, y) for x, y in zip(quick, decoded(), strict=True))
