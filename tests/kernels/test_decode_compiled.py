"""What the shipped decode configurations use of a GPU, read from their machine code."""

from functools import partial

import torch

from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.decode import TILES, decode
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import random_call
from tests.support.offline import SHARED_LIMIT, compiled

# Generation, width, recipe, capability, and how many instructions a thread may spend on an element of K
# or V, all of attention included.
CASES = {
    "v1-d64-int4-sm_90": ("v1", 64, Recipe.of(k="4:c64", v=4, residual=64), 90, 4.7),
    "v1-d128-int4-sm_80": ("v1", 128, Recipe.of(kv=4), 80, 4.7),
    "v2-d64-int4-sm_90": ("v2", 64, Recipe.of(k="4:c64", v=4), 90, 5.6),
    "v1-d128-int8-sm_90": ("v1", 128, Recipe.of(k="8:c64", v=8), 90, 4.9),
    "v2-d64-int8-sm_80": ("v2", 64, Recipe.of(kv=8), 80, 5.7),
    "v2-d128-int6-sm_80": ("v2", 128, Recipe.of(kv=6), 80, 6.6),
    "v1-d128-16-sm_90": ("v1", 128, Recipe.of(), 90, 2.3),
}
APPENDED = ("v1-d64-int4-sm_90", "v2-d128-int6-sm_80")


def both(generation, k):
    return torch.cat(k, 1) if generation == "v1" else k[0]


def launches():
    for name, (generation, width, recipe, capability, _) in CASES.items():
        q, k, v, lam = random_call(generation, 1, 1, width=width, dtype=torch.bfloat16, pairs=8, kv_pairs=2)
        store = KVStore(recipe, both(generation, k), v, 4096)
        yield name, capability, partial(decode, q, store, lam, scale=0.125)
        if name in APPENDED:
            yield f"append-{name}", capability, partial(append, store, both(generation, k), v)


# One test, so that workers side by side do not each compile all of it.
def test_shipped_configurations_fit_and_unpack_cheaply():
    binaries = compiled(__file__)
    for name, (generation, width, _, capability, most) in CASES.items():
        share, combine = binaries[name]
        assert (share.kernel, combine.kernel) == ("decode_share", "decode_combine"), name
        assert share.shared <= SHARED_LIMIT[capability], name
        assert not share.spills_in_a_main_loop(), name
        assert combine.stack == 0, name
        assert not share.overwritten, name
        packed = max(share.main_loops, key=lambda loop: sum(loop.values()))
        assert packed["HMMA"], name
        # No code is converted by itself.
        assert "I2F" not in packed, name
        values = 2 * width if generation == "v1" else width
        tile = TILES[f"decode/sm_{capability}/{values}"]
        elements = tile.keys * (values + (2 * width if generation == "v1" else width))
        assert sum(packed.values()) * 32 * tile.warps / elements <= most, name
    for name in APPENDED:
        (kernel,) = binaries[f"append-{name}"]
        assert kernel.stack == 0, name
        assert kernel.shared <= SHARED_LIMIT[kernel.capability], name
