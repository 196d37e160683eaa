"""Small random models, ours built from another library's."""

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diffquant.model.adapters import adapter_for
from diffquant.model.modeling import DiffTransformer

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def random_diffllama(seed=0, **changes):
    return _random(DiffLlamaForCausalLM, DiffLlamaConfig(**(SIZES | changes)), seed)


def random_llama(seed=0, **changes):
    return _random(LlamaForCausalLM, LlamaConfig(**(SIZES | changes)), seed)


def ours(oracle):
    """The same model as a DiffTransformer."""
    adapter = adapter_for(oracle.config.to_dict())
    model = DiffTransformer(adapter.config).eval()
    model.load_state_dict(oracle.state_dict())
    return model


def random_ids(batch=2, length=37, seed=0):
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def _random(kind, config, seed):
    torch.manual_seed(seed)
    oracle = kind(config).eval()
    for name, parameter in oracle.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return oracle
