"""The Hopper kernels as Triton 3.6.0 compiles them, which goes with torch 2.10 and 2.11: `make test-triton` fetches it.

It is the Triton for which `unpacked_product_refusal` keeps one kernel away from Hopper.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from diffquant.recipe import Recipe
from diffquant.scheme import Scheme
from tests.support.kernel_inputs import on_call, random_call
from tests.support.offline import SHARED_LIMIT, compiled

TRITON = Path(__file__).parents[2] / "build/triton-3.6.0"
ATTENTION = [
    "prefill v1",
    "prefill v2",
    "int8",
    "fp8",
    "simulated",
    *(f"specialized {case}" for case in ("v1 64", "v1 128", "v2 64", "v2 128")),
    *(f"fp8 specialized {case}" for case in ("plain 64", "v1 128", "v2 64", "v2 128")),
    *(f"simulated specialized {case}" for case in ("v1 128", "v2 128")),
    "decode 4",
    "decode 16",
    "append",
]

pytestmark = pytest.mark.skipif(
    not (TRITON / "triton").is_dir(), reason="needs Triton 3.6.0 beside the other: make test-triton fetches it"
)


def zeros(bits, rows):
    from diffquant.kernels.linear.repack import repack
    from diffquant.numbers.packing import packed_words

    words = torch.zeros(rows, packed_words(3072, bits), dtype=torch.int32)
    return repack(words, torch.ones(rows, 3072 // 128, dtype=torch.float16), bits, 3072)


def launches():
    from diffquant.kernels.attention.prefill import prefill
    from diffquant.kernels.attention.prefill_int8 import prefill_int8
    from diffquant.kernels.attention.prefill_simulated import prefill_simulated
    from diffquant.kernels.attention.prefill_specialized import prefill_specialized
    from diffquant.kernels.cache.append import append
    from diffquant.kernels.cache.decode import decode
    from diffquant.kernels.cache.kv_store import KVStore
    from diffquant.kernels.linear.expand import launch_expand
    from diffquant.kernels.linear.gemm import launch_gemm
    from diffquant.kernels.linear.linear import launch

    q, k, v, lam = random_call("v1", 256, 256, width=128, dtype=torch.bfloat16)
    v1 = q, k, v, lam
    yield "prefill v1", 90, partial(on_call(prefill), *v1, scale=0.125)
    v2 = random_call("v2", 256, 256, width=128, dtype=torch.bfloat16)
    yield "prefill v2", 90, partial(on_call(prefill), *v2, scale=0.125)
    yield "int8", 90, partial(on_call(prefill_int8), *v1, scale=0.125, pv="fp16")
    yield "fp8", 90, partial(on_call(prefill_int8), *v1, scale=0.125, pv="fp8")
    simulated = partial(on_call(prefill_simulated), *v1, scale=0.125, scheme=Scheme.parse("8:row:shift"))
    yield "simulated", 90, simulated
    for name in ATTENTION:
        if "specialized " in name:
            kind, _, case = name.rpartition("specialized ")
            generation, width = case.split()
            call = random_call(generation, 256, 256, width=int(width), dtype=torch.bfloat16)
            rounded = partial(on_call(prefill_simulated), scheme=Scheme.parse("8:row:shift"), specialized=True)
            plain = partial(on_call(prefill_specialized), bits=8 if kind == "fp8 " else 16)
            yield name, 90, partial(rounded if kind == "simulated " else plain, *call, scale=0.125)
    one = [x[:, :, :1] for x in q]
    for bits in (4, 16):
        store = KVStore(Recipe.of(kv=bits), torch.cat(k, 1), v, 4096)
        yield f"decode {bits}", 90, partial(decode, one, store, lam, scale=0.125)
    store = KVStore(Recipe.of(k="4:c64", v=4, residual=64), torch.cat(k, 1), v, 4096)
    yield "append", 90, partial(append, store, torch.cat(k, 1), v)
    for bits in (4, 8):
        x = torch.zeros(64, 3072, dtype=torch.float16)
        yield f"gemm {bits}", 90, partial(launch_gemm, x, zeros(bits, 1024), None)
        yield f"gemv {bits}", 90, partial(launch, x[:1], zeros(bits, 64), None)
    yield "expand", 90, partial(launch_expand, zeros(4, 64), torch.float16)


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__, TRITON)


@pytest.mark.parametrize("name", [*ATTENTION, "gemv 4", "gemv 8", "expand"])
def test_no_product_loses_its_operands(binaries, name):
    for binary in binaries[name]:
        assert binary.overwritten == []
        assert binary.shared <= SHARED_LIMIT[90]
        assert not binary.spills_in_a_main_loop()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_one_that_does_is_the_one_that_is_refused(binaries, bits):
    """Were it compiled rightly, the refusal could go; were the check blind, it would see nothing here either."""
    assert binaries[f"gemm {bits}"][0].overwritten
