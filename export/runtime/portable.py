"""The config.json of a portable folder, by which transformers.js and optimum find the model's inputs."""

from typing import Any

from diffquant.export.graph.plan import ExportPlan, key_width
from diffquant.model.blocks import Block, TokenRows
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.text.special_tokens import SpecialTokens


def portable_config(plan: ExportPlan, tokens: SpecialTokens) -> dict[str, Any]:
    """The model as a decoder with a KV cache that such readers know.

    They look a model's type up in a list, and learn by it that keys and values of a layer are inputs of their own. The
    type's equations are none of their business, since the graph computes the model. A Llama's inputs are named as ours
    are, and its sizes here are those of the cache: a row of keys is as wide as both maps' keys. Those of a hybrid with
    Mamba's states are named by the types of its layers.
    """
    config, spec, architecture = plan.config, plan.spec, plan.source.architecture
    kind: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if isinstance(architecture, SambaYArchitecture):
        types = [_layer_type(blocks["attn"]) for blocks in architecture.layers]
        kind = {
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": types,
        }
    return {
        **kind,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": spec.query_heads,
        "num_key_value_heads": spec.kv_pairs,
        "head_dim": key_width(spec),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
        "transformers.js_config": {"dtype": "fp32", "use_external_data_format": {"model.onnx": 1}},
    }


def _layer_type(mixer: Block) -> str:
    """The type by which readers look for a layer's states, for its keys and values, or for neither."""
    if mixer.stored is None:
        return "dense"
    return "attention" if isinstance(mixer.stored, TokenRows) else "mamba"
