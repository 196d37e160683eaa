"""The layers of a SambaY decoder: Mamba, windowed, full and cross attention, gated memory units."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import LayerNorm
from torch.nn.functional import conv1d, silu, softplus

from diffquant.errors import UsageError
from diffquant.model.activations import find_activation
from diffquant.model.attention import PairAttention, clear_padded_keys
from diffquant.model.decoder import DecoderLayer
from diffquant.model.linears import add_linears, compute_projection
from diffquant.model.reading import Reading
from diffquant.model.sambay.architecture import FusedAttentionBlock, FusedMLPBlock, GatedMemoryBlock, MambaBlock
from diffquant.model.windowed_cache import RecurrentLayer
from diffquant.recipe.numbers.absmax import computing_dtype

# Tokens per chunk of the scan, so that its memory does not grow with the sequence.
_BLOCK_TOKENS = 64


def selective_scan(
    u: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute Mamba's recurrence h ← exp(Δ·A)∘h + Δ·B·u with output y = C·h + D∘u, token by token.

    Args:
        u: inputs [B, T, E].
        step: Δ [B, T, E], positive, or 0 for tokens that must not change the state.
        a: A [E, N], negative.
        b, c: B and C [B, T, N].
        d: D [E].
        state: h [B, E, N] before the first token.

    Returns:
        y [B, T, E] and h [B, E, N] after the last token, in the common dtype of the arguments.
    """
    if not u.shape[1]:
        return u, state
    read: list[Tensor] = []
    parts = (x.split(_BLOCK_TOKENS, 1) for x in (u, step, b, c))
    for inputs, steps, into, out_of in zip(*parts, strict=True):
        decay = torch.exp(steps[..., None] * a)
        fed = (steps * inputs)[..., None] * into[:, :, None, :]
        states = []
        for token in range(inputs.shape[1]):
            state = decay[:, token] * state + fed[:, token]
            states.append(state)
        read.append(torch.einsum("bten,btn->bte", torch.stack(states, 1), out_of))
    return torch.cat(read, 1) + d * u, state


def causal_convolution(u: Tensor, weight: Tensor, bias: Tensor | None, earlier: Tensor) -> Tensor:
    """Convolve each channel over each token and the W - 1 tokens before it; W is the convolution's width.

    Args:
        u: [B, T, E].
        weight: [E, 1, W]; the last one applies to the newest token.
        bias: [E], or None.
        earlier: inputs before the first token, [B, W - 1, E].

    Returns:
        [B, T, E].
    """
    if not u.shape[1]:
        return u
    inputs = torch.cat([earlier, u], 1).mT
    return conv1d(inputs, weight, bias, groups=len(weight)).mT


def newest_conv_inputs(u: Tensor, counts: Tensor | None, earlier: Tensor) -> Tensor:
    """Return the newest W - 1 inputs, which a convolution of width W needs for later tokens.

    Args:
        u: inputs [B, T, E].
        counts: number of valid tokens at the start of each sequence, [B], or None if all are valid.
        earlier: inputs before the first token, [B, W - 1, E].

    Returns:
        [B, W - 1, E].
    """
    inputs, kept = torch.cat([earlier, u], 1), earlier.shape[1]
    if counts is None:
        return inputs[:, inputs.shape[1] - kept :]
    places = counts[:, None] + torch.arange(kept, device=u.device)
    return inputs.take_along_dim(places[..., None], 1)


class Mamba(nn.Module):
    """Mamba-1: a causal convolution, then a recurrence whose Δ, B and C depend on the token.

    Source: arXiv 2312.00752, section 3.
    """

    in_proj: nn.Linear
    x_proj: nn.Linear
    dt_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, block: MambaBlock) -> None:
        super().__init__()
        self.sizes, self.kept = [block.rank, block.states, block.states], block.cached_shapes
        add_linears(self, block)
        self.conv1d = nn.Conv1d(block.inner, block.inner, block.kernel_size, groups=block.inner)
        states = torch.arange(1, block.states + 1, dtype=torch.float32)
        self.A_log = nn.Parameter(states.log().repeat(block.inner, 1))
        self.D = nn.Parameter(torch.ones(block.inner))

    def forward(self, x: Tensor, reading: Reading, states: RecurrentLayer | None) -> tuple[Tensor, Tensor]:
        """Compute the output [B, T, D] for x [B, T, D], and the scan's output before its gate [B, T, E].

        Args:
            states: cached states to continue from and to update, or None to start from an empty state without a cache.
        """
        u, gate = self.in_proj(x).chunk(2, -1)
        memory = reading.restore_padding(self._scan(reading.move_padding_last(u), reading, states))
        return self.out_proj(memory * silu(gate)), memory

    def _scan(self, u: Tensor, reading: Reading, states: RecurrentLayer | None) -> Tensor:
        """Run the scan over packed u [B, T, E] in at least float32; return its output [B, T, E] in u's dtype."""
        wide = computing_dtype(u)
        earlier, state = self._start(u, wide) if states is None or states.is_empty else states.read()
        inputs = silu(causal_convolution(u, self.conv1d.weight, self.conv1d.bias, earlier))
        low, into, out_of = self.x_proj(inputs).split(self.sizes, -1)
        # The bias is added in the wider dtype: softplus yields small steps, which float16 and bfloat16 would round.
        step = softplus(compute_projection(low, self.dt_proj, low.dtype).to(wide) + self.dt_proj.bias.to(wide))
        wide_inputs, couplings = inputs.to(wide), (into.to(wide), out_of.to(wide), self.D.to(wide))
        decay = -self.A_log.to(wide).exp()
        y, state = selective_scan(wide_inputs, reading.zero_steps_at_padding(step), decay, *couplings, state)
        if states is not None:
            states.write(newest_conv_inputs(u, reading.valid_counts, earlier), state)
        return y.to(u.dtype)

    def _start(self, u: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the convolution's earlier inputs and the state at the start of a sequence: zeros."""
        inputs, state = self.kept
        return u.new_zeros(len(u), *inputs), u.new_zeros(len(u), *state, dtype=wide)


class GatedMemory(nn.Module):
    """A gated memory unit: out_proj(memory · silu(in_proj(x))). The memory is the last Mamba layer's scan output."""

    in_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, block: GatedMemoryBlock) -> None:
        super().__init__()
        add_linears(self, block)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Compute the output [B, T, D] for an input x [B, T, D] and the memory [B, T, E]."""
        out: Tensor = self.out_proj(memory * silu(self.in_proj(x)))
        return out


KeysValues = tuple[Tensor, Tensor]


class SambaYAttention(nn.Module):
    """Attention of a layer, with its projections in one weight with a bias.

    Attributes:
        inner_cross_attn: λ, maps and pair norm, named as in checkpoints.
        window: number of newest keys that a query sees, or None if there is no window.
        has_own_keys: whether the layer computes and caches keys and values, unlike cross attention.
    """

    Wqkv: nn.Linear
    out_proj: nn.Linear

    def __init__(self, block: FusedAttentionBlock) -> None:
        super().__init__()
        self.layer, self.window, self.has_own_keys = block.layer, block.window, block.cached_shapes is not None
        self.layout, self.heights = block.spec.layout, block.row_counts
        self.inner_cross_attn = PairAttention(block.spec, block.layer)
        add_linears(self, block)

    def forward(self, x: Tensor, reading: Reading, shared: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Compute the output [B, T, D] for x [B, T, D]; also return the keys and values that were used.

        Args:
            shared: keys and values of an earlier layer, used by cross attention only.
        """
        q, k, v = self.project(x, shared)
        mask = reading.mask(self.window)
        if self.has_own_keys and reading.cache is not None:
            k, v = reading.cache.update(clear_padded_keys(k, mask), v, self.layer, needed=reading.needed)
        y = self.inner_cross_attn.attend(q, k, v, self.inner_cross_attn.scalar_lam(), mask)
        return self.out_proj(y), (k, v)

    def project(self, x: Tensor, shared: KeysValues | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of x, [B, heads, T, width] each; cross attention uses `shared` K and V."""
        if not self.has_own_keys:
            if shared is None:
                raise UsageError(f"layer {self.layer} reads keys and values that no earlier layer left")
            return self.layout.view_queries(self.Wqkv(x)), *shared
        q, k, v = self.Wqkv(x).split(self.heights, -1)
        return self.layout.view_queries(q), self.layout.view_keys(k), self.layout.view_values(v)


@dataclass(frozen=True)
class LayerState:
    """The state passed between layers.

    Attributes:
        x: residual stream [B, T, D], in at least float32.
        memory: scan output of the last Mamba layer so far, [B, T, E], or None before the first one.
        shared: keys and values used by the last attention layer, for cross attention.
    """

    x: Tensor
    memory: Tensor | None = None
    shared: KeysValues | None = None


class SambaYMLP(nn.Module):
    """A gated MLP with gate and up projection in one weight, the gate first."""

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(self, block: FusedMLPBlock) -> None:
        super().__init__()
        add_linears(self, block)
        self.activate = find_activation(block.activation)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(value * self.activate(gate))
        return out


class SambaYLayer(DecoderLayer):
    """A token mixer and a gated MLP, each applied to the normed residual stream and added to it.

    The residual stream is in float32 even if the parameters are in float16 or bfloat16. The reference implementation
    has it in float32 from the first Mamba layer on.
    """

    attn: nn.Module
    mlp: nn.Module
    input_layernorm: LayerNorm
    post_attention_layernorm: LayerNorm

    def forward(self, flow: LayerState, reading: Reading) -> LayerState:
        mixed, flow = self._mix(self.normalize_mixer_input(flow.x), flow, reading)
        x = flow.x + mixed
        x = x + self.mlp(layer_norm(self.post_attention_layernorm, x))
        return replace(flow, x=x)

    def normalize_mixer_input(self, x: Tensor) -> Tensor:
        """Apply the norm before the token mixer; the result [B, T, D] has the parameters' dtype."""
        return layer_norm(self.input_layernorm, x)

    def project(self, state: LayerState, *_: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        if not isinstance(self.attn, SambaYAttention):
            return None
        return self.attn.project(self.normalize_mixer_input(state.x), state.shared)

    @property
    def window(self) -> int | None:  # type: ignore[override]
        return self.attn.window if isinstance(self.attn, SambaYAttention) else None

    def _mix(self, x: Tensor, flow: LayerState, reading: Reading) -> tuple[Tensor, LayerState]:
        """Compute the mixer's output [B, T, D] and update the flow's memory or shared keys and values."""
        if isinstance(self.attn, Mamba):
            states = None if reading.cache is None else reading.cache.recurrent_layer(self.layer)
            mixed, memory = self.attn(x, reading, states)
            return mixed, replace(flow, memory=memory)
        if isinstance(self.attn, GatedMemory):
            return self.attn(x, flow.memory), flow
        mixed, shared = self.attn(x, reading, flow.shared)
        return mixed, replace(flow, shared=shared)


def layer_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    """Apply LayerNorm to the residual stream [B, T, D], cast to the dtype of the norm's weight."""
    out: Tensor = norm(x.to(norm.weight.dtype))
    return out
