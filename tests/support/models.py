"""Small random models: transformers' own, and ours built from them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from diffquant.model.adapters import adapter_for
from diffquant.model.causal import CausalModel

SIZES: dict[str, Any] = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 8, "max_position_embeddings": 128, "initializer_range": 0.2}


def random_diffllama(seed: int = 0, **changes: Any) -> DiffLlamaForCausalLM:
    """A stock DiffLlama of random weights; `changes` are fields of its config that differ from `SIZES`."""
    return _random(DiffLlamaForCausalLM, DiffLlamaConfig(**(SIZES | changes)), seed)


def random_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A stock Llama of random weights; `changes` are fields of its config that differ from `SIZES`."""
    return _random(LlamaForCausalLM, LlamaConfig(**(SIZES | changes)), seed)


def ours(oracle: PreTrainedModel) -> CausalModel:
    """DiffTransformer with a stock model's weights."""
    model: CausalModel = adapter_for(oracle.config.to_dict()).architecture.new_model()
    model.eval()
    model.load_state_dict(oracle.state_dict())
    return model


def random_ids(batch: int = 2, length: int = 37, seed: int = 0) -> Tensor:
    """Token ids of a model of `SIZES`, [B, T]."""
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def _random(model_class: type[Any], config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    oracle = model_class(config).eval()
    for name, parameter in oracle.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return oracle
