"""Cells of decoding from pages and from latents, which the contest's peers do not read."""

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diffquant.benchmarks.contest import PeerComparison
from diffquant.benchmarks.measuring import make_timer, run_in_turns
from diffquant.benchmarks.workloads import Workload, find_model, make_differential_call
from diffquant.recipe import Recipe

PAGES, LATENTS = "16-bit pages", "{}-bit latents"
CONTIGUOUS = "DIFF, fused, 16-bit cache"
_TURNS = 3
# Total size of the stores that a timed call goes through, so that none is still in a cache the next time.
_COLD_BYTES = 1 << 28
# Motif-3's signal heads and noise heads, and the widths of a latent and of turned channels.
_SIGNALS, _NOISES, _LATENT, _TURNED = 64, 16, 512, 64


@torch.inference_mode()
def paged_cells(context: int, batch: int) -> list[dict[str, Any]]:
    """Cells of one token of the 3B model as V1 over pages of 16 tokens in no order, and over a cache without pages."""
    from diffquant.kernels.cache.paged import PAGE, decode_paged

    model = find_model("3B")
    work = Workload(model, 1, context, batch, "float16")
    contiguous = PeerComparison("decode", "cuda", _TURNS, (CONTIGUOUS,), graph=True).run([work])
    call = make_differential_call(work, "cuda")
    pages = batch * context // PAGE
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")

    def paged(x: Tensor) -> Tensor:
        rows = torch.empty(pages, PAGE, x.shape[1], x.shape[3], dtype=x.dtype, device="cuda")
        rows[table.flatten().long()] = x.transpose(1, 2).reshape(pages, PAGE, *rows.shape[2:])
        return rows

    k, v = [paged(x) for x in call.k], paged(call.v)
    size = batch * context * model.kv_pairs * (2 * model.width + model.value_width) * 2
    named = [cell.to_dict() for cell in contiguous if cell.path == CONTIGUOUS]
    attend = partial(decode_paged, call.q, k, v, table, lengths, call.lam, scale=call.scale)
    return [*named, *_timed({PAGES: attend}, {PAGES: size}, work.name)]


@torch.inference_mode()
def latent_cells(context: int, batch: int) -> list[dict[str, Any]]:
    """Cells of one token of Motif-3's heads over latents, by copies of a store in turn, none of which is in a cache."""
    from diffquant.kernels.cache.append import append
    from diffquant.kernels.cache.kv_store import KVStore
    from diffquant.kernels.cache.latent import decode_latent

    def normal(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(batch, heads, length, width, device="cuda").half()

    q = [normal(heads, 1, _LATENT + _TURNED) for heads in (_SIGNALS, _NOISES)]
    turned, latents = normal(1, context, _TURNED), normal(1, context, _LATENT)
    lam, scale = torch.tensor(0.5, device="cuda"), (_LATENT + _TURNED) ** -0.5
    calls: dict[str, Callable[[], object]] = {}
    bytes_of, copies = {}, {}
    for bits in (16, 8, 6, 4):
        path, stores = LATENTS.format(bits), list[KVStore]()
        while not stores or len(stores) < ceil(_COLD_BYTES / stores[0].nbytes):
            stores.append(KVStore(Recipe.of(kv=bits) if bits < 16 else Recipe.of(), turned, latents, context))
            append(stores[-1], turned, latents)
        calls[path] = lambda stores=stores: [decode_latent(q, x, lam, scale=scale) for x in stores]  # type: ignore[misc]
        bytes_of[path], copies[path] = stores[0].nbytes, len(stores)
    return _timed(calls, bytes_of, f"Motif-3, 1 of {context} tokens, batch {batch}, float16", copies)


def _timed(
    calls: Mapping[str, Callable[[], object]],
    bytes_of: Mapping[str, float],
    workload: str,
    copies: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    times = run_in_turns({path: make_timer(call, "cuda", graph=True) for path, call in calls.items()}, _TURNS)
    cells = []
    for path, turns in times.items():
        values = [turn / (copies[path] if copies else 1) for turn in turns]
        cell = {"path": path, "workload": workload, "bytes": bytes_of[path]}
        cells.append(cell | {"median": median(values), "values": values})
    return cells
