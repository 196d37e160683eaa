"""What the shipped configurations of decoding from latents use of a GPU, read from their machine code."""

from functools import partial

import torch

from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.latent import TILES, decode_latent
from diffquant.recipe import Recipe
from tests.support.latent_inputs import LATENT, ROTATED, SCALE, random_latents
from tests.support.offline import SHARED_LIMIT, compiled
from tests.support.thorough import thorough

# Recipe, capability, and how many instructions a thread may spend on a stored element, for 32 rows of queries.
CASES = {
    "16-sm_90": (Recipe.of(), 90, 6.0),
    "8-sm_90": (Recipe.of(kv=8), 90, 7.5),
    "6-sm_90": (Recipe.of(kv=6), 90, 16.0),
    "4-sm_90": (Recipe.of(kv=4), 90, 7.0),
    "16-sm_80": (Recipe.of(), 80, 9.0),
    "8-sm_80": (Recipe.of(kv=8), 80, 14.0),
    "4-sm_80": (Recipe.of(kv=4), 80, 14.0),
    # Where 99 KiB do not hold the queries twice, 16 rows take the place of 32.
    "4-c64-sm_86": (Recipe.of(k="4:c64", v=4, residual=64), 86, 14.0),
}
APPENDED = ("4-sm_90", "4-c64-sm_86")


def launches():
    q, turned, latents, lam = random_latents(1, 1, pairs=64, noises=16, dtype=torch.bfloat16)
    for name, (recipe, capability, _) in CASES.items():
        store = KVStore(recipe, turned, latents, 4096)
        yield name, capability, partial(decode_latent, q, store, lam, scale=SCALE)
        if name in APPENDED:
            yield f"append-{name}", capability, partial(append, store, turned, latents)


# One test, so that workers side by side do not each compile all of it.
@thorough
def test_shipped_configurations_hold_their_sums_in_registers():
    binaries = compiled(__file__)
    for name, (recipe, capability, most) in CASES.items():
        share, combine = binaries[name]
        assert (share.kernel, combine.kernel) == ("latent_key_split", "decode_combine"), name
        assert not share.spills_in_a_main_loop(), (name, share.main_loops)
        assert combine.stack == 0, name
        assert not share.overwritten, name
        table = 90 if capability == 90 else 80
        assert share.shared <= SHARED_LIMIT[table], (name, share.shared)
        tile = TILES[f"latent/sm_{table}/{recipe.v.bits}"]
        loop = share.main_loops[0]
        assert loop["HMMA"], name
        elements = tile["tokens"] * (LATENT + ROTATED) / 32
        assert sum(loop.values()) / elements <= most, (name, sum(loop.values()) / elements)
    for name in APPENDED:
        (kernel,) = binaries[f"append-{name}"]
        assert kernel.stack == 0, name
        assert kernel.shared <= SHARED_LIMIT[80], name
