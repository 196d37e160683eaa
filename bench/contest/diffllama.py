"""transformers' DiffLlama as a peer: its attention module, with projections that give tensors made beforehand."""

import torch
from torch import Tensor, nn

from diffquant.bench.contest.workloads import HeldCall, Workload, differential, held_by
from diffquant.family.call import AttentionCall
from diffquant.family.norm import PairNorm

_EPS = 1e-5


class _Projected(nn.Module):
    """Stands in a projection's place: gives the tensor made beforehand, or its input where there is none."""

    def __init__(self, rows: Tensor | None = None) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return x if self.rows is None else self.rows


def make_call(implementation: str, work: Workload, device: str) -> AttentionCall:
    """A V1 call whose λ and norm are those of DiffLlama's first layer."""
    call = differential(work, device)
    if work.model.shares_keys:
        return call
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    model = work.model
    config = DiffLlamaConfig(
        hidden_size=2 * model.pairs * model.width,
        num_attention_heads=2 * model.pairs,
        num_key_value_heads=2 * model.kv_pairs,
        head_dim=model.width,
        rms_norm_eps=_EPS,
        attn_implementation=implementation,
    )
    module = DiffLlamaAttention(config, layer_idx=0).to(device, work.torch_dtype).eval()
    halves = torch.cat(tuple(call.v.chunk(2, -1)), 1)
    module.q_proj, module.k_proj, module.v_proj = (
        _Projected(_rows(heads)) for heads in (torch.cat(tuple(call.q), 1), torch.cat(tuple(call.k), 1), halves)
    )
    module.o_proj = _Projected()
    for name in ("lambda_q1", "lambda_q2"):
        getattr(module, name).data.zero_()  # both exponentials are 1, and λ is λ_init
    mask = None
    if implementation == "eager" and work.queries > 1:
        seen = call.mask.dense(work.queries, work.keys, call.v.device)
        mask = torch.zeros(1, 1, work.queries, work.keys, dtype=work.torch_dtype, device=device)
        mask = mask if seen is None else mask.masked_fill_(~seen, torch.finfo(work.torch_dtype).min)
    ones = torch.ones(1, 1, model.width, dtype=work.torch_dtype, device=device)
    hidden = torch.empty(work.batch, work.queries, 1, device=device)
    rotary = (ones, torch.zeros_like(ones))
    lam = torch.tensor(float(module.lambda_init), device=device)
    post = PairNorm(_EPS, factor=1 - float(module.lambda_init))

    def run() -> Tensor:
        rows: Tensor = module(hidden, position_embeddings=rotary, attention_mask=mask)[0]
        return torch.unflatten(rows, -1, (model.pairs, -1)).transpose(1, 2)

    return HeldCall(call.q, call.k, call.v, lam, scale=call.scale, mask=call.mask, post=post, held=run)


def attention(call: AttentionCall) -> Tensor:
    """Output of the module [B, h, T, dv], its norm included."""
    output: Tensor = held_by(call)()
    return output


def missing(call: AttentionCall) -> str | None:
    """The reason why DiffLlama cannot run a call, or None if it can."""
    return None if isinstance(call, HeldCall) else "transformers knows no DIFF V2"


def _rows(heads: Tensor) -> Tensor:
    """[B, H, T, d] -> [B, T, H·d]."""
    return heads.transpose(1, 2).flatten(2)
