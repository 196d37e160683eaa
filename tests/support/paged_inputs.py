"""Keys and values of random calls scattered over shuffled pages, as a server's block tables name them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels.cache.packed_pages import PagedStore
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import expected

PAGE = 16


@dataclass
class Paged:
    """A call over pages: what `decode_paged` takes after q, and what a sequence's tokens are gathered from.

    Attributes:
        k, v: [pages, 16, heads, width], NaN where no token is.
        table: int32 [B, M], whose entries behind a sequence's last page name no page.
        lengths: int32 [B].
    """

    k: list[Tensor]
    v: Tensor
    table: Tensor
    lengths: Tensor

    def gathered(self, x: Tensor, sequence: int) -> Tensor:
        """A sequence's tokens [1, heads, length, width]."""
        length = int(self.lengths[sequence])
        pages = self.table[sequence, : -(-length // PAGE)].long()
        return x[pages].flatten(0, 1)[:length].transpose(0, 1)[None]


def paged(k: Sequence[Tensor], v: Tensor, lengths: Sequence[int], *, fused: bool = False, spare: int = 3) -> Paged:
    """The first tokens of [B, H, S, w] in pages that stand in no order; `fused` has both maps' keys in one head."""
    heads, width = k[0].shape[1], k[0].shape[3]
    device = v.device
    table, total = shuffled_table(lengths, device, spare)

    def room(wide: int) -> Tensor:
        return torch.full((total, PAGE, heads, wide), torch.nan, dtype=v.dtype, device=device)

    shared = k[0] is k[-1]
    both = room(2 * width) if fused else None
    keys = [room(width) for _ in k[: 1 if shared else 2]] if both is None else list(both.split(width, -1))
    keys = keys * len(k) if shared else keys
    values = room(v.shape[3])
    for sequence, length in enumerate(lengths):
        for number in range(-(-length // PAGE)):
            page = int(table[sequence, number])
            tokens = slice(number * PAGE, min(number * PAGE + PAGE, length))
            for pool, x in (*zip(keys, k, strict=True), (values, v)):
                pool[page, : tokens.stop - tokens.start] = x[sequence, :, tokens].transpose(0, 1)
    return Paged(keys, values, table, torch.tensor(lengths, dtype=torch.int32, device=device))


def expected_paged(
    q: Sequence[Tensor],
    pages: Paged,
    lam: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    post: PairNorm | None = None,
) -> Tensor:
    """Output [B, h, T, dv] of `naive` in float64, sequence by sequence; 0 for queries that have no token."""
    outs = []
    for sequence in range(q[0].shape[0]):
        k = [pages.gathered(x, sequence) for x in pages.k]
        v = pages.gathered(pages.v, sequence)
        own = [x[sequence : sequence + 1] for x in q]
        factor = lam[sequence : sequence + 1] if lam is not None and lam.ndim else lam
        if not v.shape[2]:
            outs.append(torch.zeros(*own[0].shape[:3], v.shape[3], dtype=torch.float64, device=v.device))
            continue
        outs.append(expected(own, k, v, factor, scale=scale, mask=Mask(window=window), post=post))
    return torch.cat(outs)


def shuffled_table(lengths: Sequence[int], device: torch.device | str, spare: int = 3) -> tuple[Tensor, int]:
    """A table int32 [B, M] of pages in no order, entries behind a sequence's last page naming none; and the pages.

    It is columns of a wider one, as a server has it for the longest of all sequences.
    """
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    # An entry that is read although no token is behind it would be far outside of the cache.
    columns = max(counts) + 1
    table = torch.full((len(lengths), columns + 2), 2**30, dtype=torch.int32)
    for row, pages in zip(table, order.split([*counts, spare])[:-1], strict=True):
        row[: len(pages)] = pages
    # Rows without a sequence name a first page.
    table[:, 0] = torch.where(table[:, 0] == 2**30, 0, table[:, 0])
    return table.to(device)[:, :columns], len(order)


def poisoned_store(
    recipe: Recipe, k: Tensor, v: Tensor, pages: int, sequences: int
) -> tuple[PagedStore, Tensor | None]:
    """Pages and rings that hold NaN and the largest codes until something is stored, and each sequence's ring."""
    waits = bool(recipe.residual or recipe.k.sharing.tokens > 1)
    store = PagedStore(recipe, k, v, pages, places=sequences + 1 if waits else 0)
    for side in (store.keys, store.values):
        side.codes.fill_(-1)
        side.top.fill_(-1)
        side.scales.fill_(torch.nan)
        side.recent.fill_(torch.nan)
    places = torch.arange(sequences, 0, -1, dtype=torch.int32, device=v.device)
    return store, places if waits else None


def fill(
    store: PagedStore,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Sequence[int],
    chunks: Sequence[int],
    places: Tensor | None = None,
) -> None:
    """Append the first tokens of [B, H, S, w], `chunks` at a time and then the rest."""
    done = 0
    most = max(lengths)
    for chunk in (*chunks, most):
        stop = min(done + chunk, most)
        if stop == done:
            break
        # Sequences that have ended take no more: each is appended to by itself.
        for sequence, length in enumerate(lengths):
            end = min(stop, length)
            if end > done:
                own = slice(sequence, sequence + 1)
                total = torch.tensor([end], dtype=torch.int32, device=v.device)
                ring = None if places is None else places[own]
                store.append(k[own, :, done:end], v[own, :, done:end], table[own], total, ring)
        done = stop


def expected_of_packed(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    read: Sequence[tuple[Tensor, Tensor]],
    lam: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    post: PairNorm | None = None,
) -> Tensor:
    """Output [B, h, T, dv] of `naive` in float64 over what pages read back; `k` says how many maps' keys there are."""
    outs = []
    for sequence, (keys, v) in enumerate(read):
        own = [x[sequence : sequence + 1] for x in q]
        factor = lam[sequence : sequence + 1] if lam is not None and lam.ndim else lam
        if not v.shape[2]:
            outs.append(torch.zeros(*own[0].shape[:3], v.shape[3], dtype=torch.float64, device=v.device))
            continue
        maps = [keys] * len(k) if k[0] is k[-1] else list(keys.chunk(2, 1))
        outs.append(expected(own, maps, v, factor, scale=scale, mask=Mask(window=window), post=post))
    return torch.cat(outs)
