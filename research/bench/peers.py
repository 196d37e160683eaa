"""Further implementations for the bench beside those of `diffquant bench`. Importing this file registers them.

Attention: transformers' DiffLlama and compiled FlexAttention. Linear layers: bitsandbytes and torchao.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from diffquant.benchmarks import contest
from diffquant.benchmarks.linears import PATHS, Layers, choose_group
from diffquant.benchmarks.peers import PEERS, Peer, only_cuda
from diffquant.benchmarks.workloads import CallWithState, Workload, get_prepared_object, make_differential_call
from diffquant.family.call import AttentionCall
from diffquant.family.norm import PairNorm

# Epsilon of DiffLlama's norm, and of the same norm in the call for `naive`.
_EPS = 1e-5


def _flex(call: AttentionCall) -> Tensor:
    """Compute attention by compiled FlexAttention, with a call per map; it supports a dv that differs from d."""
    mask = _causal_block(call.query_count, call.v.shape[2], str(call.v.device))
    outputs: list[Tensor] = [
        _compiled_flex()(q, k, call.v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        for q, k in zip(call.q, call.k, strict=True)
    ]
    return outputs[0] if call.lam is None else outputs[0] - call.lam.to(outputs[0].dtype) * outputs[1]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def _causal_block(queries: int, keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        lambda _batch, _head, i, j: j <= i + (keys - queries), None, None, queries, keys, device=device
    )


class _Projected(nn.Module):
    """Replaces a projection: returns a given tensor, or its input if there is none."""

    def __init__(self, rows: Tensor | None = None) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return x if self.rows is None else self.rows


def _diffllama_call(implementation: str, work: Workload, device: str) -> AttentionCall:
    """Make a V1 call with the λ and norm of DiffLlama's first layer."""
    call = make_differential_call(work, device)
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

    return CallWithState(call.q, call.k, call.v, lam, scale=call.scale, mask=call.mask, post=post, state=run)


def _diffllama(call: AttentionCall) -> Tensor:
    """Run the call's DiffLlama module; return its output [B, h, T, dv] after the norm."""
    output: Tensor = get_prepared_object(call)()
    return output


def _diffllama_missing(call: AttentionCall) -> str | None:
    """Return why DiffLlama cannot run a call, or None if it can."""
    return None if isinstance(call, CallWithState) else "transformers does not have DIFF V2"


def _rows(heads: Tensor) -> Tensor:
    """Concatenate heads: [B, H, T, d] -> [B, T, H·d]."""
    return heads.transpose(1, 2).flatten(2)


def _bitsandbytes(weights: list[Tensor]) -> Layers:
    import bitsandbytes as bnb

    layers = []
    for weight in weights:
        layer = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, compute_dtype=weight.dtype)
        layer.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
        layers.append(layer.to(weight.device))
    first = layers[0].weight
    stored = bnb.functional.dequantize_4bit(first.data, first.quant_state)
    # A state dict has all that a checkpoint stores: codes, scales, the codebook.
    nbytes = sum(tensor.nbytes for tensor in layers[0].state_dict().values())
    return lambda x, i: layers[i](x), nbytes, stored


def _torchao(weights: list[Tensor]) -> Layers:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    layers = []
    for weight in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(layer, Int4WeightOnlyConfig(group_size=choose_group(weight.shape[1])))
        layers.append(layer)
    first: Any = layers[0].weight
    return lambda x, i: layers[i](x), _bytes_within(first), first.dequantize()


def _bytes_within(tensor: Any) -> int:
    """Return the bytes of a tensor subclass's inner tensors: codes, scales and zero points."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes_within(getattr(tensor, name)) for name in names)


PEERS["FlashDiffAttn_1, FlexAttention"] = Peer(_flex, missing=only_cuda)
PEERS |= {
    f"transformers' DiffLlama, {how}": Peer(_diffllama, partial(_diffllama_call, how), missing=_diffllama_missing)
    for how in ("eager", "sdpa")
}
PATHS |= {"bitsandbytes, NF4": (_bitsandbytes, 4), "torchao, int4": (_torchao, 4)}
# So that processes that measure peak memory know these peers too.
contest.PRELOADED += (__name__, "transformers.models.diffllama.modeling_diffllama")
