"""The file genai_config.json, which onnxruntime-genai needs to run an exported folder as it is."""

from typing import Any

from diffquant.export.graph.plan import ExportPlan, key_width
from diffquant.export.runtime.device import RuntimeDevice
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.text.special_tokens import SpecialTokens

FILE = "genai_config.json"


def genai_config(plan: ExportPlan, tokens: SpecialTokens) -> dict[str, Any]:
    """The model as onnxruntime-genai's "decoder": names, sizes, special tokens, and where it runs."""
    config, spec = plan.config, plan.spec
    device = RuntimeDevice.parse(plan.options.genai_device)
    context = config.max_position_embeddings
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": _providers(device)},
        "filename": plan.options.layout.model,
        "head_size": key_width(spec),
        "hidden_size": config.hidden_size,
        "num_attention_heads": spec.query_heads,
        "num_key_value_heads": spec.kv_pairs,
        "num_hidden_layers": config.num_hidden_layers,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    if isinstance(plan.source.architecture, SambaYArchitecture):
        decoder["inputs"] |= {"past_conv_names": "past_conv.%d", "past_recurrent_names": "past_ssm.%d"}
        decoder["outputs"] |= {"present_conv_names": "present_conv.%d", "present_recurrent_names": "present_ssm.%d"}
    model: dict[str, Any] = {
        "type": "decoder",
        "vocab_size": config.vocab_size,
        "context_length": context,
        "bos_token_id": 0 if tokens.bos is None else tokens.bos,
        # Without a special token only its length stops generation; numbers outside of the vocabulary are refused.
        "eos_token_id": tokens.ends,
        "pad_token_id": (*tokens.ends, 0)[0] if tokens.pad is None else tokens.pad,
        "decoder": decoder,
    }
    search = {
        "do_sample": False,
        "max_length": context,
        "min_length": 0,
        "num_beams": 1,
        "past_present_share_buffer": True,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 1.0,
    }
    return {"model": model, "search": search}


def _providers(device: RuntimeDevice) -> list[dict[str, dict[str, str]]]:
    """Providers by the names that onnxruntime-genai has for them; what they do not run falls to the processor."""
    return [{device.kind: device.cuda_options}] if device.kind == "cuda" else []
