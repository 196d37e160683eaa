"""What the shipped decode configurations use of a GPU, read from their machine code."""

from functools import partial

import torch

from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.decode import decode
from diffquant.kernels.cache.decode_split import TILES
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.paged import TILES as PAGED_TILES
from diffquant.kernels.cache.paged import decode_paged
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import random_call
from tests.support.offline import SHARED_LIMIT, compiled
from tests.support.paged_inputs import paged
from tests.support.thorough import thorough

# Generation, width, recipe, capability, and how many instructions a thread may spend on an element of K
# or V, all of attention included.
CASES = {
    "v1-d64-int4-sm_90": ("v1", 64, Recipe.of(k="4:c64", v=4, residual=64), 90, 2.8),
    "v1-d128-int4-sm_90": ("v1", 128, Recipe.of(k="4:c64", v=4), 90, 2.5),
    "v1-d128-int4-sm_80": ("v1", 128, Recipe.of(kv=4), 80, 2.0),
    "v2-d64-int4-sm_90": ("v2", 64, Recipe.of(k="4:c64", v=4), 90, 3.7),
    "v1-d128-int8-sm_90": ("v1", 128, Recipe.of(k="8:c64", v=8), 90, 3.5),
    "v2-d64-int8-sm_80": ("v2", 64, Recipe.of(kv=8), 80, 3.3),
    "v2-d128-int6-sm_80": ("v2", 128, Recipe.of(kv=6), 80, 4.1),
    "v1-d128-16-sm_90": ("v1", 128, Recipe.of(), 90, 1.1),
}
# From pages it takes one more for two elements of V, whose tokens have to become neighbours, and those of addresses.
PAGED = {
    "paged-v1-d128-sm_90": ("v1", 128, 90, 1.8),
    "paged-v2-d64-sm_90": ("v2", 64, 90, 3.2),
    "paged-v1-d64-sm_80": ("v1", 64, 80, 2.5),
}
APPENDED = ("v1-d64-int4-sm_90", "v2-d128-int6-sm_80")
REGISTERS = 65_536
# Of barriers, and of loads and stores that do not go to global memory.
NOT_IN_THE_LOOP = ("BAR", "LDS", "STS", "LDSM", "STSM", "LDGSTS", "LDL", "STL", "I2F")


def both(generation, k):
    return torch.cat(k, 1) if generation == "v1" else k[0]


def launches():
    for name, (generation, width, recipe, capability, _) in CASES.items():
        q, k, v, lam = random_call(generation, 1, 1, width=width, dtype=torch.bfloat16, pairs=8, kv_pairs=2)
        store = KVStore(recipe, both(generation, k), v, 4096)
        yield name, capability, partial(decode, q, store, lam, scale=0.125)
        if name in APPENDED:
            yield f"append-{name}", capability, partial(append, store, both(generation, k), v)
    for name, (generation, width, capability, _) in PAGED.items():
        q, k, v, lam = random_call(generation, 1, 1, width=width, dtype=torch.bfloat16, pairs=8, kv_pairs=2)
        pages = paged(k, v, [1])
        table = torch.zeros(1, 256, dtype=torch.int32)
        yield name, capability, partial(decode_paged, q, pages.k, pages.v, table, pages.lengths, lam, scale=0.125)


def values_of(generation, width):
    return 2 * width if generation == "v1" else width


def assert_cheap(launched, name, kernel, generation, width, tile, most):
    """A loop of products without barriers or shared memory, of at most so many instructions an element of K or V."""
    share, combine = launched
    assert (share.kernel, combine.kernel) == (kernel, "decode_combine"), name
    assert share.stack == combine.stack == 0, name
    assert not share.overwritten, name
    assert REGISTERS // (-(-share.registers // 8) * 8 * 32 * tile["warps"]) >= tile["blocks"], name
    assert share.shared * tile["blocks"] <= SHARED_LIMIT[80], name
    loop = share.main_loops[0]
    assert loop["HMMA"], name
    assert not [each for each in NOT_IN_THE_LOOP if loop.get(each)], name
    elements = tile["tokens"] * (values_of(generation, width) + (2 * width if generation == "v1" else width)) / 32
    assert sum(loop.values()) / elements <= most, (name, sum(loop.values()) / elements)


# One test, so that workers side by side do not each compile all of it.
@thorough
def test_shipped_configurations_unpack_cheaply_and_without_barriers():
    binaries = compiled(__file__)
    for name, (generation, width, recipe, capability, most) in CASES.items():
        tile = TILES[f"decode/sm_{capability}/{values_of(generation, width)}/{recipe.k.bits}"]
        assert_cheap(binaries[name], name, "decode_key_split", generation, width, tile, most)
    for name, (generation, width, capability, most) in PAGED.items():
        tile = PAGED_TILES[f"paged/sm_{capability}/{values_of(generation, width)}"]
        assert_cheap(binaries[name], name, "paged_key_split", generation, width, tile, most)
    for name in APPENDED:
        (kernel,) = binaries[f"append-{name}"]
        assert kernel.stack == 0, name
        assert kernel.shared <= SHARED_LIMIT[kernel.capability], name
