"""diffquant's own decoders in vLLM: vLLM has the caches, attention and packed Linears; the rest is plain torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader

from diffquant.checkpoints.compressed_config import read_schemes
from diffquant.checkpoints.compressed_tensors import PACKED, SCALE, SHAPE, unpack_weight
from diffquant.checkpoints.dequantized import DequantizedCheckpoint
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.errors import UsageError
from diffquant.model.decoder import Decoder
from diffquant.serving.vllm.config import architecture_of, warn_of_ignored_schemes

# Linears whose weights are read directly.
_READ = ".dt_proj"


class ServedDecoder(nn.Module, ABC):
    """A causal language model that runs one of diffquant's decoders in vLLM, on one rank and without compilation.

    Subclasses replace the modules that have a cache. The replacements have a method `attach_cache`, which registers
    them with vLLM.

    Raises:
        UsageError: vLLM is configured with several ranks or with compilation.
    """

    decoder_class: ClassVar[type[Decoder]]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # noqa: ARG002  part of the interface
        super().__init__()
        config = vllm_config.model_config.hf_config
        _require_plain(vllm_config)
        architecture = architecture_of(config)
        with torch.device("meta"):
            self.model = self.decoder_class(architecture.config)
            mixers = self.replace_cached_parts(architecture)
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        for name, mixer in mixers.items():
            mixer.attach_cache(name)
        _use_packed_linears(self, vllm_config.quant_config)
        wide = {name for name, parameter in architecture.parameters.items() if parameter.is_float32}
        _allocate(self, wide, vllm_config.model_config.dtype)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if architecture.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.stated, self.folder = config.diff_source, Path(vllm_config.model_config.model)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        warn_of_ignored_schemes(vllm_config)

    @abstractmethod
    def replace_cached_parts(self, architecture: Any) -> dict[str, Any]:
        """Replace the decoder's modules that have a cache; return the replacements by their names in the model."""

    @abstractmethod
    def layer_arguments(self, positions: Tensor, x: Tensor) -> Sequence[tuple[Any, ...]]:
        """Return the arguments that each layer's forward takes after the state.

        Args:
            positions: positions [1, T] of the tokens of all requests.
            x: embeddings [1, T, D] of these tokens.
        """

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,  # noqa: ARG002  part of the interface
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states [T, D] after the final norm, for the tokens [T] of all requests at positions [T]."""
        x = (self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds)[None]
        state = self.model.initial_state(x)
        for layer, arguments in zip(self.model.layers, self.layer_arguments(positions[None], x), strict=True):
            state = layer(state, *arguments)
        return self.model.normalize(self.model.hidden_states(state))[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # Layers for multi-token prediction are not run.
        loader = AutoWeightsLoader(self, ignore_unexpected_prefixes=["model.mtp_layers."])
        checkpoint = open_checkpoint(self.folder)
        if isinstance(checkpoint, DequantizedCheckpoint):
            # vLLM does not support the layout, such as the NVFP4 of Motif-3's release.
            weights = ((name, checkpoint.read(name)) for name in checkpoint.tensors)
        loaded: set[str] = loader.load_weights(self._unpack(weights))
        return loaded

    def _unpack(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield a checkpoint's tensors in the dtype they are kept in, unpacked where no layer of vLLM's holds them."""
        dtypes = {name: parameter.dtype for name, parameter in self.named_parameters()}
        found: dict[str, dict[str, Tensor]] = {}
        for name, x in weights:
            module, _, suffix = name.rpartition(".")
            plain = next((each for each in (module, f"{module}.weight") if each in dtypes), None)
            if plain is None or f".{suffix}" not in (PACKED, SCALE, SHAPE):
                # vLLM would also convert them, but with a warning for each.
                yield name, x.to(dtypes.get(name, x.dtype))
                continue
            parts = found.setdefault(module, {})
            parts[f".{suffix}"] = x
            if len(parts) == 3:
                scheme = read_schemes(self.stated, [module])[module]
                weight = unpack_weight(parts[PACKED], parts[SCALE], parts[SHAPE], scheme)
                yield plain, weight.to(dtypes[plain])
                del found[module]


def _require_plain(vllm_config: VllmConfig) -> None:
    kind, parallel = vllm_config.model_config.hf_config.model_type, vllm_config.parallel_config
    if parallel.world_size > 1:
        raise UsageError(f"{kind} is served on one rank: leave out --tensor-parallel-size and --pipeline-parallel-size")
    if not vllm_config.model_config.enforce_eager:
        raise UsageError(f"{kind} is served without compilation: pass --enforce-eager")


def _use_packed_linears(model: nn.Module, quant_config: QuantizationConfig | None) -> None:
    """Replace Linears whose weights are packed in the checkpoint by vLLM's."""
    if quant_config is None:
        return
    for name, child in list(model.named_modules()):
        if type(child) is not nn.Linear or name.endswith(_READ):
            continue
        served = ReplicatedLinear(
            child.in_features,
            child.out_features,
            child.bias is not None,
            quant_config=quant_config,
            prefix=name,
            return_bias=False,
        )
        if not isinstance(served.quant_method, UnquantizedLinearMethod):
            model.set_submodule(name, served)


def _allocate(model: nn.Module, wide: set[str], dtype: torch.dtype) -> None:
    """Allocate parameters that have no storage yet, in float32 if named in `wide`, else in `dtype`."""
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            place, _, leaf = name.rpartition(".")
            data = torch.empty(parameter.shape, dtype=torch.float32 if name in wide else dtype)
            setattr(model.get_submodule(place), leaf, nn.Parameter(data, requires_grad=False))
