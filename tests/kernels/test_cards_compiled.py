"""Every kind of card takes the launches: its shared memory, its longest grid axes, its driver's demands.

The launches end in a driver that runs nothing and refuses what CUDA's would refuse (`tests.support.absent_device`).
"""

from functools import partial

import pytest
import torch

from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.support.kernel_inputs import on_call, random_call
from tests.support.offline import compiled
from tests.support.thorough import thorough

pytestmark = thorough

DECODING = (80, 86, 89, 90, 100, 120)
# Beside those that test_decode_compiled has.
CODES = (89, 100, 120)
KIB_99 = 101_376
# More than the second and third axis of a grid may have.
MANY = 65_600


def both(generation, k):
    return torch.cat(k, 1) if generation == "v1" else k[0]


def launches():
    from diffquant.kernels.attention.prefill import prefill
    from diffquant.kernels.attention.prefill_int8 import prefill_int8
    from diffquant.kernels.attention.prefill_simulated import prefill_simulated
    from diffquant.kernels.cache.append import append
    from diffquant.kernels.cache.decode import decode
    from diffquant.kernels.cache.kv_store import KVStore

    q, k, v, lam = random_call("v1", 1, 1, width=128, dtype=torch.bfloat16, pairs=8, kv_pairs=2)
    for capability in DECODING:
        store = KVStore(Recipe.of(), both("v1", k), v, 4096)
        yield f"decode sm_{capability}", capability, partial(decode, q, store, lam, scale=0.125)
    for capability in CODES:
        store = KVStore(Recipe.of(kv=4), both("v1", k), v, 4096)
        yield f"decode 4 bits, sm_{capability}", capability, partial(decode, q, store, lam, scale=0.125)
    q, k, v, lam = random_call("v1", 256, 256, width=128, dtype=torch.bfloat16)
    for capability in (100, 120):
        yield f"prefill sm_{capability}", capability, partial(on_call(prefill), q, k, v, lam, scale=0.125)
    call = partial(on_call(prefill_int8), q, k, v, lam, scale=0.125, pv="fp8")
    yield "fp8 sm_89", 89, call

    q, k, v, lam = (
        [x.expand(MANY, -1, -1, -1) for x in part] if isinstance(part, list) else part
        for part in random_call("v2", 2, 2, pairs=1)
    )
    v, lam = v.expand(MANY, -1, -1, -1), lam.expand(MANY, -1, -1, -1)
    yield "many heads, int8", 90, partial(on_call(prefill_int8), q, k, v, lam, scale=0.125)
    simulated = partial(on_call(prefill_simulated), q, k, v, lam, scale=0.125, scheme=Scheme.parse("8:row"))
    yield "many heads, simulated", 90, simulated
    store = KVStore(Recipe.of(kv=4, residual=1), k[0][:1], v[:1], 128)
    # Nothing reads it: its memory need not be there.
    store.replace_tensors(lambda x: x.expand(MANY, *x.shape[1:]))
    yield "many heads, append", 90, partial(append, store, k[0], v)
    yield "many heads, decode", 90, partial(decode, q, store, lam, scale=0.125)


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__)


@pytest.mark.parametrize("name", [*(f"decode sm_{c}" for c in DECODING), *(f"decode 4 bits, sm_{c}" for c in CODES)])
def test_decoding_keeps_codes_and_states_out_of_shared_memory_on_every_card(binaries, name):
    share, _ = binaries[name]
    # What the warps' sums meet in.
    assert share.shared <= 16_384
    assert share.stack == 0
    (loop,) = share.main_loops
    assert not {"BAR", "LDS", "STS", "LDGSTS"} & loop.keys()


@pytest.mark.parametrize(
    ("name", "most"), [("prefill sm_100", 232_448), ("prefill sm_120", KIB_99), ("fp8 sm_89", KIB_99)]
)
def test_newer_cards_take_amperes_configurations(binaries, name, most):
    for binary in binaries[name]:
        assert binary.shared <= most
        # sm_120 reads up to 8 spilled registers a step of some 700 instructions; nothing is spilled anew.
        assert all(loop.get("LDL", 0) <= 8 and not loop.get("STL", 0) for loop in binary.main_loops)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("int8", ["_statistics", "_quantize", "attend_int8"]),
        ("simulated", ["compute_logit_extremes", "attend_rounded"]),
        ("append", ["append_tokens"]),
        ("decode", ["decode_key_split", "decode_combine"]),
    ],
)
def test_more_heads_than_a_grids_second_axis_has_are_launched(binaries, name, kernels):
    assert [binary.kernel for binary in binaries[f"many heads, {name}"]] == kernels
