"""The paths that decode from latents, of Motif-3's sizes, and the aims they are held to."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from diffquant.bench.gpu.compiling import Launch
from diffquant.bench.gpu.estimate import Path, Work
from diffquant.bench.gpu.groups import Aim
from diffquant.bench.gpu.hopper import RAMP_SECONDS, Card
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.latent import TILES, decode_latent
from diffquant.recipe import Recipe

# Signal heads, noise heads and KV heads; widths of a latent, of turned channels, and of a head's keys and values.
_SIGNALS, _NOISES, _HEADS = 64, 16, 16
_LATENT, _TURNED, _KEYS, _VALUES = 512, 64, 192, 128
_CONTEXT, _BATCH = 16384, 8
_LATENTS = "decode, {}-bit latents".format
_EXPANDED = "keys and values of 16 bits of all heads, read once"
_READ_ONCE = "{}-bit latents, read once".format
_BITS = (16, 8, 4)

AIMS = (
    # Latents are a ninth of the bytes.
    *(("latents", Aim(_LATENTS(bits), _EXPANDED, 3.0)) for bits in _BITS),
    *(("latents", Aim(_LATENTS(bits), _READ_ONCE(bits), 0.8)) for bits in _BITS),
)


def paths() -> list[Path]:
    """Paths of the aims."""
    return [Path(_LATENTS(bits), _call(bits), partial(_work, bits)) for bits in _BITS]


def rivals(card: Card) -> dict[str, float]:
    """Seconds that a card takes to read a step's bytes, of latents or of what they are expanded to, by name."""

    def reading(values: int, bits: int) -> float:
        return _BATCH * _CONTEXT * values * bits / 8 / card.bytes_a_second + RAMP_SECONDS

    latents = {_READ_ONCE(bits): reading(_LATENT + _TURNED, bits) for bits in _BITS}
    return latents | {_EXPANDED: reading(_HEADS * (_KEYS + _VALUES), 16)}


def _call(bits: int) -> Callable[[], Tensor]:
    """Decoding over one sequence's store, which stands for all of them: nothing is read when it is compiled."""

    def many(x: Tensor) -> Tensor:
        return x.expand(_BATCH, *x.shape[1:])

    def launch() -> Tensor:
        like = torch.zeros(1, 1, 1, _LATENT + _TURNED, dtype=torch.float16)
        store = KVStore(Recipe.of(kv=bits), like[..., :_TURNED], like[..., :_LATENT], _CONTEXT)
        store.replace_tensors(many)
        q = [like.expand(_BATCH, heads, 1, -1).contiguous() for heads in (_SIGNALS, _NOISES)]
        return decode_latent(q, store, torch.tensor(0.5), scale=1.0)

    return launch


def _work(bits: int, launch: Launch) -> Work:
    """Work of a launch: steps of all tiles of rows, and the bytes of latents, which tiles side by side read once."""
    if launch.binary.kernel != "latent_share":
        return Work()
    tile = TILES[f"latent/sm_90/{bits}"]
    tiles = -(-(_SIGNALS + _NOISES) // tile.rows)
    steps = _BATCH * tiles * _CONTEXT / (tile.tokens * tile.warps)
    return Work(steps, _BATCH * _CONTEXT * (_LATENT + _TURNED) * bits / 8, launch.programs)
