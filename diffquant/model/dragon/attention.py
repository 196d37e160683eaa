"""The attention of Dragon's layers V: tensor products, a shift by one token, norms, a soft cap, and a gate."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.attention import PairAttention, as_written, without_padding
from diffquant.model.dragon.blocks import GATE_BIAS, TensorProductBlock
from diffquant.model.dragon.cache import MixedLayer, before
from diffquant.model.packing import Packing
from diffquant.model.positions import count_positions
from diffquant.numbers.absmax import compute_dtype
from diffquant.numbers.rotation import rotated


class CenteredNorm(nn.Module):
    """An RMSNorm whose factor is 1 + weight, stored under the name that checkpoints have for it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(compute_dtype(x))
        return rms_norm(wide, wide.shape[-1:], 1 + self.norm.weight.to(wide.dtype), self.norm.eps).to(x.dtype)


class TensorProductMixer(PairAttention):
    """The attention itself, with the parameters that checkpoints have below `mixer`."""

    def __init__(self, block: TensorProductBlock) -> None:
        super().__init__(block.spec, block.layer)
        self.block = block
        for name, parameter in block.mixer_parameters().items():
            child = name.removesuffix(".weight")
            if len(parameter.shape) == 2:
                self.add_module(child, nn.Linear(parameter.shape[1], parameter.shape[0], bias=False))
        self.q_norm = CenteredNorm(block.spec.head_dim, block.eps)
        self.k_norm = CenteredNorm(block.spec.head_dim, block.eps)
        self.softmax_scaler = nn.Parameter(torch.ones(block.spec.query_heads))
        # Not 1/√d, as its authors have it (complete parametrization).
        self.scale = 1 / block.spec.head_dim

    def forward(self, h: Tensor, mask: Mask, past: int, cache: MixedLayer | None) -> Tensor:
        """Attention [B, T, h·dv] of the layer's input h [B, T, D].

        Args:
            mask: mask over cached and new tokens; its window is the block's.
            past: number of tokens that were read before, padding included.
            cache: layer of a cache to read and extend; None to keep nothing.
        """
        if mask.seen is not None:
            raise UsageError("each token is mixed with the one before: pass an attention_mask [batch, tokens]")
        length = h.shape[1]
        valid = None if mask.keys is None else mask.keys[:, -length:]
        packing = Packing.of(valid)
        q = self.queries(h, count_positions(mask.keys, past, length, h.device))
        k, v = self.keys_values(h, packing, cache)
        if self.key_rotation is not None:
            q, k = rotated(q, self.key_rotation), rotated(k, self.key_rotation)
        if self.value_rotation is not None:
            v = rotated(v, self.value_rotation)
        held = length + (0 if cache is None else cache.get_seq_length())
        near = Mask(None if mask.keys is None else mask.keys[:, -held:], self.block.window)
        if cache is not None:
            k, v = cache.update(without_padding(k, near), v, needed=near.needed_keys(held))
        return self.rotated_back(self.attend(q, k, v, self.lam(h), near))

    def queries(self, h: Tensor, positions: Tensor) -> Tensor:
        """Queries [B, query heads, T, d], normed and times the logarithm of their place, signal heads first."""
        q = self.q_norm(self.layout.queries(self.get_submodule("c_q")(h)))
        places = positions + 1 if self.block.reach is None else (positions + 1).clamp(max=self.block.reach)
        scaler = self.layout.queries(self.softmax_scaler.repeat_interleave(self.spec.head_dim)[None])[..., 0, 0]
        factors = scaler[:, None] * places.to(compute_dtype(q)).log()[:, None]
        scaled: Tensor = q * factors[..., None]
        return scaled.to(q.dtype)

    def keys_values(self, h: Tensor, packing: Packing | None, cache: MixedLayer | None) -> tuple[Tensor, Tensor]:
        """Normed keys and values [B, h_kv, T, d], each mixed with those of the token before."""
        raw = [self._product(h, of) for of in "kv"]
        newest = None if cache is None else cache.newest
        mixed = []
        for of, x, last in zip("kv", raw, newest[:2] if newest is not None else (None, None), strict=True):
            share = self._shares(h, of, packing, None if newest is None else newest[2])
            mixed.append((share * before(x, last, packing) + (1 - share) * x).to(h.dtype).transpose(1, 2))
        if cache is not None:
            cache.keep_newest(raw[0], raw[1], packing)
        return self.k_norm(mixed[0]), mixed[1]

    def lam(self, h: Tensor) -> Tensor:
        """λ [B, h, T, 1] in float32 at least, the same for the signal heads of a group."""
        gates = self._sigmoids(h, "lambda_proj").transpose(1, 2)
        return gates.repeat_interleave(self.spec.signals_per_noise, 1).unsqueeze(-1)

    def _product(self, h: Tensor, of: str) -> Tensor:
        """The mean over ranks of A·B, [B, T, h_kv, d]."""
        rank = self.block.rank
        a = self.get_submodule(f"W_A_{of}")(h).unflatten(-1, (self.block.groups, rank))
        b = self.get_submodule(f"W_B_{of}")(h).unflatten(-1, (rank, self.spec.head_dim))
        product: Tensor = a @ b / rank
        return product

    def _shares(self, h: Tensor, of: str, packing: Packing | None, any_read: Tensor | None) -> Tensor:
        """Share of the token before in each token's keys, or values, [B, T, h_kv, 1]; 0 where there is none."""
        share = self._sigmoids(h, f"shift_proj_{of}")
        packed = share if packing is None else packing.pack(share)
        has_one = torch.zeros(len(h), dtype=torch.bool, device=h.device) if any_read is None else any_read
        first = packed[:, :1].masked_fill(~has_one[:, None, None], 0.0)
        packed = torch.cat([first, packed[:, 1:]], 1)
        return (packed if packing is None else packing.unpack(packed)).unsqueeze(-1)

    def _sigmoids(self, h: Tensor, name: str) -> Tensor:
        wide = compute_dtype(h)
        with as_written(h):
            return linear(h.to(wide), self.get_parameter(f"{name}.weight").to(wide)).sigmoid()


class TensorProductAttention(nn.Module):
    """Attention of a layer, its gate and its output projection."""

    def __init__(self, block: TensorProductBlock) -> None:
        super().__init__()
        inner = block.spec.pairs * block.spec.value_dim
        self.mixer = TensorProductMixer(block)
        self.gate_proj = nn.Linear(block.width, inner, bias=False)
        self.mixer_proj = nn.Linear(inner, block.width, bias=False)

    def forward(self, h: Tensor, mask: Mask, past: int = 0, cache: MixedLayer | None = None) -> Tensor:
        """Output [B, T, D] for the layer's input h [B, T, D]; other arguments as `TensorProductMixer` has them.

        Raises:
            UsageError: it is in float16, or the mask says which keys each query sees.
        """
        if h.dtype == torch.float16:
            raise UsageError("the activations of Dragon models overflow float16; run them in bfloat16 or float32")
        y = self.mixer(h, mask, past, cache) * silu(self.gate_proj(h) + GATE_BIAS)
        out: Tensor = self.mixer_proj(y)
        return out
