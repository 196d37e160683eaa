"""Keys and values of random calls scattered over shuffled pages, as a server's block tables name them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
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
