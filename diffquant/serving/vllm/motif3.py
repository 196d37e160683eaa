"""Motif-3 in vLLM: layers that see all tokens cache latents (MLA), windowed ones the keys and values of their heads."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.attention import apply_rotary_embedding, project_sigmoids
from diffquant.model.motif3.attention import LatentAttention, Rotary
from diffquant.model.motif3.modeling import Motif3Model
from diffquant.model.reading import Reading
from diffquant.serving.vllm.decoder import ServedDecoder


class ServedLatentAttention(LatentAttention):
    """Grouped differential attention that passes signal and noise heads to vLLM as heads of plain attention.

    Heads are in the order of the checkpoint.
    """

    def attach_cache(self, name: str) -> None:
        """Create vLLM's attention layer. It registers with vLLM as `name`.attn, so that vLLM allocates its cache.

        The cache holds latents, or keys and values if the layer has a window.
        """
        spec, block, vllm_config = self.spec, self.block, get_current_vllm_config()
        shared: dict[str, Any] = {
            "cache_config": vllm_config.cache_config,
            "quant_config": vllm_config.quant_config,
            "prefix": f"{name}.attn",
        }
        if block.window is None:
            self.attn = MLAAttention(
                spec.query_heads,
                self.scale,
                block.unrotated_width,
                block.rope,
                spec.value_dim,
                block.query_latent,
                block.latent,
                _HeadsOfQueries(self),
                **shared,
            )
        else:
            self.attn = _WindowedAttention(
                spec.query_heads,
                spec.head_dim,
                self.scale,
                num_kv_heads=spec.kv_pairs,
                per_layer_sliding_window=block.window,
                **shared,
            )
            self.attn.latent = block.latent + block.rope

    def forward(self, x: Tensor, rotary: Rotary, reading: Reading) -> Tensor:  # noqa: ARG002
        """Compute the output [1, T, D] for the tokens x [1, T, D] of all requests.

        `rotary` is cos and sin of their positions. `reading` is ignored, since vLLM has the masks and the cache.
        """
        spec = self.spec
        query_latent, latent, rotated_keys = self.compute_latents(x, rotary)
        q = self.wq_b(query_latent).unflatten(-1, (spec.query_heads, -1)).transpose(1, 2)
        q = self.change_rotated(q, lambda x: apply_rotary_embedding(x, rotary, spec.rope))[0].transpose(0, 1)
        if self.block.window is None:
            shape = torch.Size((len(q), spec.query_heads * spec.value_dim))
            heads = self.attn(q, latent[0, 0], rotated_keys[0].transpose(0, 1), output_shape=shape)
        else:
            k, v = self.expand_latents(rotated_keys, latent)
            # vLLM's heads of keys and values have one width.
            k, v = (pad(part[0].transpose(0, 1), (0, spec.head_dim - part.shape[-1])).flatten(1) for part in (k, v))
            heads = self.attn(q.flatten(1), k, v)
        groups = heads.view(len(q), -1, spec.signals_per_noise + 1, heads.shape[-1] // spec.query_heads)
        signal, noise = groups[..., : spec.value_dim].float().split([spec.signals_per_noise, 1], -2)
        lam = project_sigmoids(x, self.lambda_proj)[0].transpose(0, 1).reshape(*signal.shape[:-1], 1)
        y = (signal - lam * noise).to(x.dtype).flatten(1)[None]
        out: Tensor = self.wo(y * self.wq_b_gate(query_latent).sigmoid())
        return out


class _WindowedAttention(Attention):
    """Attention whose pages are as large as several of latents, since vLLM has one pool of pages for both.

    Attributes:
        latent: number of elements that a layer of latents caches of a token.
    """

    latent: int

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = super().get_kv_cache_spec(vllm_config)
        page = vllm_config.cache_config.block_size * self.latent * self.kv_cache_torch_dtype.itemsize
        return replace(spec, page_size_padded=ceil(spec.page_size_bytes / page) * page)


class _HeadsOfQueries(nn.Module):
    """The projection from latents to keys and values, with those of a KV pair repeated for each of its query heads."""

    quant_method = None

    def __init__(self, attention: LatentAttention) -> None:
        super().__init__()
        # As an attribute of this module it would be part of itself.
        self._of = [attention]

    def forward(self, latent: Tensor) -> tuple[Tensor, None]:
        spec = self._of[0].spec
        heads = self._of[0].wkv_b(latent).unflatten(-1, (spec.kv_pairs, -1))
        return heads.repeat_interleave(spec.query_heads // spec.kv_pairs, -2).flatten(-2), None

    @property
    def weight(self) -> Tensor:
        """The weight [heads of queries · width, latent], packed or not."""
        block = self._of[0].block
        like = self._of[0].kv_norm.weight
        weight: Tensor = self(torch.eye(block.latent, dtype=like.dtype, device=like.device))[0].mT.contiguous()
        return weight


class Motif3ForCausalLM(ServedDecoder):
    """Motif-3 in vLLM, on one rank.

    Raises:
        UsageError: on a CPU, chunked prefill or prefix caching is enabled. vLLM has no CPU kernel that continues a
            prompt over cached latents.
    """

    decoder_class = Motif3Model
    model: Motif3Model

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        in_parts = vllm_config.scheduler_config.enable_chunked_prefill or vllm_config.cache_config.enable_prefix_caching
        if in_parts and current_platform.is_cpu():
            raise UsageError(
                "on a CPU vLLM reads a prompt of Motif-3 at once: pass --no-enable-chunked-prefill and "
                "--no-enable-prefix-caching"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def replace_cached_parts(self, architecture: Any) -> dict[str, Any]:
        mixers: dict[str, Any] = {}
        for layer, blocks in zip(self.model.layers, architecture.layers, strict=True):
            layer.self_attn = ServedLatentAttention(blocks["self_attn"])
            mixers[f"model.layers.{layer.layer}.self_attn"] = layer.self_attn
        return mixers

    def layer_arguments(self, positions: Tensor, x: Tensor) -> Sequence[tuple[Any, ...]]:
        nothing = Reading(Mask(), Mask(), 0, None)
        return [(rotary, nothing) for rotary in self.model.layer_rotary_tables(positions, x)]
