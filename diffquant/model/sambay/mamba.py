"""SambaY's mixers other than attention: Mamba-1, and the gated memory of the last Mamba layer."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus

from diffquant.model.linears import add_linears
from diffquant.model.packing import Packing
from diffquant.model.sambay.blocks import GatedMemoryBlock, MambaBlock
from diffquant.model.sambay.cache import RecurrentLayer
from diffquant.model.sambay.scan import causal_convolution, last_inputs, selective_scan
from diffquant.numbers.absmax import compute_dtype


class Mamba(nn.Module):
    """Mamba-1: a causal convolution, and a recurrence whose step sizes and couplings depend on the token.

    Source: arXiv 2312.00752, section 3.
    """

    in_proj: nn.Linear
    x_proj: nn.Linear
    dt_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, block: MambaBlock) -> None:
        super().__init__()
        self.sizes, self.kept = [block.rank, block.states, block.states], block.stored
        add_linears(self, block)
        self.conv1d = nn.Conv1d(block.inner, block.inner, block.seen, groups=block.inner)
        states = torch.arange(1, block.states + 1, dtype=torch.float32)
        self.A_log = nn.Parameter(states.log().repeat(block.inner, 1))
        self.D = nn.Parameter(torch.ones(block.inner))

    def forward(self, x: Tensor, packing: Packing | None, states: RecurrentLayer | None) -> tuple[Tensor, Tensor]:
        """Output [B, T, D] for an input x [B, T, D], and the scan's output before its gate [B, T, E].

        Args:
            packing: layout of the padding; None if there is no padding.
            states: states to continue from and to update; None to start anew and keep nothing.
        """
        u, gate = self.in_proj(x).chunk(2, -1)
        y = self._scan(u if packing is None else packing.pack(u), packing, states)
        memory = y if packing is None else packing.unpack(y)
        return self.out_proj(memory * silu(gate)), memory

    def _scan(self, u: Tensor, packing: Packing | None, states: RecurrentLayer | None) -> Tensor:
        """The scan's output [B, T, E] in u's dtype, computed in float32 at least, of packed u [B, T, E]."""
        wide = compute_dtype(u)
        earlier, state = self._start(u, wide) if states is None or states.is_empty else states.read()
        counts = None if packing is None else packing.counts
        inputs = silu(causal_convolution(u, self.conv1d.weight, self.conv1d.bias, earlier))
        low, into, out_of = self.x_proj(inputs).split(self.sizes, -1)
        # The bias is not rounded with the product: softplus of it is small, and exact where half types are not.
        step = softplus(linear(low, self.dt_proj.weight).to(wide) + self.dt_proj.bias.to(wide))
        if packing is not None:
            step = packing.silenced(step)
        y, state = selective_scan(
            inputs.to(wide), step, -self.A_log.to(wide).exp(), into.to(wide), out_of.to(wide), self.D.to(wide), state
        )
        if states is not None:
            states.write(last_inputs(u, counts, earlier), state)
        return y.to(u.dtype)

    def _start(self, u: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """The initial state of a sequence: no earlier inputs, and an empty state."""
        inputs, state = self.kept
        return u.new_zeros(len(u), *inputs), u.new_zeros(len(u), *state, dtype=wide)


class GatedMemory(nn.Module):
    """A gate on the memory that the last Mamba layer left: out_proj(memory · silu(in_proj(x))), token by token."""

    in_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, block: GatedMemoryBlock) -> None:
        super().__init__()
        add_linears(self, block)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Output [B, T, D] for an input x [B, T, D] and the memory [B, T, E]."""
        out: Tensor = self.out_proj(memory * silu(self.in_proj(x)))
        return out
