"""The reference of a model over latents, whose stages pass on all residual streams, one behind another."""

from typing import cast

import numpy as np
import torch
from torch import Tensor

from diffquant.export.verification.caches import GrowingCache
from diffquant.export.verification.reference import Reference
from diffquant.family.mask import Mask
from diffquant.model.motif3.modeling import Motif3Layer, Motif3Model
from diffquant.model.reading import Reading
from diffquant.model.windowed_cache import WindowsCache


class LatentReference(Reference):
    """The torch twin of an exported Motif-3."""

    def _embedded(self, ids: Tensor) -> Tensor:
        return self._decoder.start(super()._embedded(ids)).flatten(-2)

    def _final_norm(self, x: Tensor) -> Tensor:
        return super()._final_norm(self._streams(x).mean(-2))

    def _layer_output(self, number: int, x: Tensor, cached: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        layer, past = cast(Motif3Layer, self.model.model.layers[number]), self._reading.past
        cache = GrowingCache(self._cache, past, cached)
        masks = Mask(None), Mask(None, self._decoder.architecture.seen)
        reading = Reading(*masks, 0, cast(WindowsCache, cache))
        first, parts = past.length if past else cached[0].shape[2] if cached else 0, []
        for chunk in x.split(list(self._reading.calls) or x.shape[1], 1):
            positions = torch.arange(first, first + chunk.shape[1])[None]
            tables = self._decoder.tables(positions, chunk)[number]
            parts.append(layer(self._streams(chunk), tables, reading).flatten(-2))
            first += chunk.shape[1]
        return torch.cat(parts, 1), cache.held

    def rows_of_a_cache(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # A latent is a key and a value, which is filled up with nothing.
        architecture = self._decoder.architecture
        share = architecture.kv_lora_rank / (architecture.kv_lora_rank + architecture.qk_rope_head_dim)
        end = round(keys.shape[-1] * share)
        nothing = 0x88 if keys.dtype == np.uint8 else 0
        return keys, np.concatenate([keys[..., :end], np.full_like(values[..., end:], nothing)], -1)

    @property
    def _decoder(self) -> Motif3Model:
        return cast(Motif3Model, self.model.model)

    def _streams(self, x: Tensor) -> Tensor:
        streams: Tensor = x.unflatten(-1, (self._decoder.architecture.mhc_expansion_rate, -1))
        return streams
