"""SambaY, the architecture of Phi-4-mini-flash, in vLLM: Mamba's states, windowed, full and cross attention."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, softplus
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFunc,
    MambaStateCopyFuncCalculator,
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_scan_fn, selective_state_update
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMambaPrefixCaching
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from diffquant.family.mask import Mask
from diffquant.family.norm import pair_norm
from diffquant.model.reading import Reading
from diffquant.model.sambay.architecture import FusedAttentionBlock, MambaBlock
from diffquant.model.sambay.layers import KeysValues, Mamba, SambaYAttention, selective_scan
from diffquant.model.sambay.modeling import SambaYModel
from diffquant.quantization.modeling_diffquant import PlainHeads
from diffquant.serving.vllm.attention import NO_ROTATION
from diffquant.serving.vllm.config import architecture_of, plain_spec
from diffquant.serving.vllm.decoder import ServedDecoder


class ServedMamba(Mamba, MambaBase):
    """Mamba whose convolution inputs and states are cached by vLLM and updated by vLLM's kernels.

    On CPUs diffquant computes the scan. There vLLM has no scan kernel for prompts, and its kernel for decoding supports
    only one decay for all states of a channel, as in Mamba-2.
    """

    def __init__(self, block: MambaBlock) -> None:
        super().__init__(block)
        self.block = block

    def attach_cache(self, name: str) -> None:
        """Register this layer with vLLM as `name`, so that vLLM allocates a cache of its inputs and states."""
        self.prefix = name
        self.kv_cache = (torch.empty(0), torch.empty(0))
        vllm_config = get_current_vllm_config()
        self.dtypes = state_dtypes(vllm_config)
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return state_shapes(self.block)

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        return self.dtypes

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.MAMBA1

    def _scan(self, u: Tensor, reading: Reading, states: Any) -> Tensor:  # noqa: ARG002
        """Run the scan over the tokens u [1, T, E] of all requests, those that decode first."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # While vLLM measures how much memory a batch takes there are no requests.
            return u
        found: Mamba1AttentionMetadata = metadata[self.prefix]
        y = torch.zeros_like(u[0])
        decoded, read = found.num_decode_tokens, found.num_prefill_tokens
        if decoded:
            y[:decoded] = self._decode(u[0, :decoded], found)
        if read:
            y[decoded : decoded + read] = self._read(u[0, decoded : decoded + read], found)
        return y[None]

    def _decode(self, u: Tensor, found: Mamba1AttentionMetadata) -> Tensor:
        """Compute the outputs [N, E] of one new token u [N, E] of each request."""
        newest, states = self._caches
        places = found.state_indices_tensor_d
        u = causal_conv1d_update(u, newest, *self._convolution, "silu", conv_state_indices=places)
        step, b, c = self._couplings(u)
        if current_platform.is_cpu():
            rows = places[:, 0].long()
            y, states[rows] = self._scan_plainly([x[:, None] for x in (u, step, b, c)], states[rows])
            return y[:, 0]
        y, bias = torch.empty_like(u), self.dt_proj.bias.float()
        settings = {"dt_softplus": True, "state_batch_indices": places, "dst_state_batch_indices": places}
        selective_state_update(states, u, step, self._decay, b, c, self.D, bias, out=y, **settings)
        return y

    def _read(self, u: Tensor, found: Mamba1AttentionMetadata) -> Tensor:
        """Compute the outputs [T, E] of the tokens u [T, E] of prompts."""
        newest, states = self._caches
        shared = {
            "query_start_loc": found.query_start_loc_p,
            "cache_indices": found.state_indices_tensor_p,
            "has_initial_state": found.has_initial_states_p,
        }
        u = causal_conv1d_fn(u.mT, *self._convolution, newest, activation="silu", metadata=found, **shared).mT
        step, b, c = self._couplings(u)
        if current_platform.is_cpu():
            return self._read_plainly((u, step, b, c), found)
        chunks = {"cu_chunk_seqlen": found.cu_chunk_seqlen_p, "last_chunk_indices": found.last_chunk_indices_p}
        step, bias = step.mT.contiguous(), self.dt_proj.bias.float()
        y: Tensor = selective_scan_fn(
            u.mT, states, step, self._decay, b.mT, c.mT, self.D, None, bias, True, **shared, **chunks
        )
        return y.mT

    def _read_plainly(self, inputs: Sequence[Tensor], found: Mamba1AttentionMetadata) -> Tensor:
        """Run the scan over each prompt's inputs [T, ...], where a later part of a prompt continues from its state."""
        _, states = self._caches
        read = []
        starts, places = found.query_start_loc_p.tolist(), found.state_indices_tensor_p.tolist()
        for number, (place, continues) in enumerate(zip(places, found.has_initial_states_p.tolist(), strict=True)):
            before = states[place, None] if continues else torch.zeros_like(states[:1])
            parts = [x[None, starts[number] : starts[number + 1]] for x in inputs]
            y, states[place, None] = self._scan_plainly(parts, before)
            read.append(y[0])
        return torch.cat(read)

    def _scan_plainly(self, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Run diffquant's scan over u, Δ before its bias, B and C, in float32; return outputs [B, T, E] and states."""
        u, step, b, c = (x.float() for x in inputs)
        step = softplus(step + self.dt_proj.bias.float())
        y, state = selective_scan(u, step, self._decay, b, c, self.D, state)
        return y.to(inputs[0].dtype), state

    def _couplings(self, u: Tensor) -> Sequence[Tensor]:
        """Compute Δ before its bias [T, E], and B and C [T, N], of the convolution's outputs u [T, E]."""
        low, into, out_of = self.x_proj(u).split(self.sizes, -1)
        return linear(low, self.dt_proj.weight), into, out_of

    @property
    def _decay(self) -> Tensor:
        return -self.A_log.exp()

    @property
    def _convolution(self) -> tuple[Tensor, Tensor | None]:
        return self.conv1d.weight.squeeze(1), self.conv1d.bias

    @property
    def _caches(self) -> tuple[Tensor, Tensor]:
        """The newest inputs [slots, E, W - 1] and the states [slots, E, N] of all requests."""
        newest, states = self.kv_cache
        return newest if is_conv_state_dim_first() else newest.mT, states


class ServedSambaYAttention(SambaYAttention):
    """Attention on vLLM's paged cache, which computes both maps of a pair as heads of plain attention.

    Attributes:
        shared: name of the layer whose keys and values cross attention reads, or None if the layer has its own.
    """

    def __init__(self, block: FusedAttentionBlock, shared: str) -> None:
        super().__init__(block)
        self.plain = PlainHeads(plain_spec(block.spec))
        self.shared = None if self.has_own_keys else shared

    def attach_cache(self, name: str) -> None:
        """Create vLLM's attention layer. It registers with vLLM as `name`.attn, so that vLLM allocates its cache.

        Cross attention uses the cache of the layer `shared` instead.
        """
        vllm_config, heads = get_current_vllm_config(), self.plain
        kv_heads = heads.kv_pairs * heads.cuts
        self.attn = Attention(
            kv_heads * heads.group,
            heads.width,
            self.inner_cross_attn.scale,
            num_kv_heads=kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            per_layer_sliding_window=self.window,
            prefix=f"{name}.attn",
            kv_sharing_target_layer_name=self.shared,
        )

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        reading: Reading,  # noqa: ARG002
        shared: KeysValues | None,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        """Compute the output [1, T, D] for the tokens x [1, T, D] of all requests; the second result is always None.

        `reading` and `shared` are ignored, since vLLM has the masks and the cache.
        """
        q, *own = self.Wqkv(x).split(self.heights, -1)
        inputs = [self.plain.queries(q, NO_ROTATION)]
        if own:
            inputs += [self.plain.keys(own[0], NO_ROTATION), self.plain.values(own[1])]
        k, v = [heads[0].transpose(0, 1).flatten(1) for heads in inputs[1:]] or (None, None)
        heads = self.attn(inputs[0][0].transpose(0, 1).flatten(1), k, v)
        signal, noise = cast(tuple[Tensor, Tensor], self.plain.outputs(heads[None]))
        pairs = self.inner_cross_attn
        difference = (signal.float() - pairs.scalar_lam() * noise.float()).to(x.dtype)
        return self.out_proj(pair_norm(difference, pairs.pair_norm_settings()).flatten(-2)), None


class SambaYForCausalLM(ServedDecoder, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """A SambaY model in vLLM, on one rank."""

    decoder_class = SambaYModel

    def replace_cached_parts(self, architecture: Any) -> dict[str, Any]:
        mixers: dict[str, Any] = {}
        middle = architecture.num_hidden_layers // 2 + 1
        for layer, blocks in zip(self.model.layers, architecture.layers, strict=True):
            block, name = blocks["attn"], f"model.layers.{layer.layer}.attn"
            if isinstance(block, MambaBlock):
                layer.attn = mixers[name] = ServedMamba(block)
            elif isinstance(block, FusedAttentionBlock):
                layer.attn = mixers[name] = ServedSambaYAttention(block, f"model.layers.{middle}.attn.attn")
        return mixers

    def layer_arguments(self, positions: Tensor, x: Tensor) -> Sequence[tuple[Any, ...]]:  # noqa: ARG002
        return [(Reading(Mask(), Mask(), 0, None),)] * len(self.model.layers)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return state_shapes(architecture_of(vllm_config.model_config.hf_config).layers[0]["attn"])

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, MambaStateCopyFunc]:
        functions: tuple[MambaStateCopyFunc, MambaStateCopyFunc] = MambaStateCopyFuncCalculator.mamba1_state_copy_func()
        return functions


def state_shapes(block: MambaBlock) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a Mamba layer's newest convolution inputs and of its state in vLLM's cache, per request."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = MambaStateShapeCalculator.mamba1_state_shape(
        1, block.inner, block.states, block.kernel_size
    )
    return shapes


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of Mamba's newest convolution inputs and of its states, which are float32 as in diffquant."""
    return vllm_config.model_config.dtype, torch.float32
