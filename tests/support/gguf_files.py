"""A Llama checkpoint folder as a GGUF file."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

_ADDERS: dict[type, Callable[[GGUFWriter, str, Any], None]] = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}


def write_gguf(
    path: Path,
    folder: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """A Llama checkpoint folder with its matrices in one quantization type, and more metadata and tensors.

    gguf packs few types; those of the others are random bytes, small enough for finite scales.
    """
    sizes = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(sizes["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(sizes["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    # Two merges: transformers before 5.20 reads a list of one as what is in it.
    merged = ["\u0100\u0101", "\u0102\u0103"]
    writer.add_token_list([chr(0x100 + i) for i in range(sizes["vocab_size"] - 2)] + merged)
    writer.add_token_types([1] * sizes["vocab_size"])
    writer.add_token_merges([" ".join(pair) for pair in merged])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        data = tensor.numpy()
        for part, heads in ((".q_proj.", sizes["num_attention_heads"]), (".k_proj.", sizes["num_key_value_heads"])):
            data = _llama_cpp_rows(data, heads) if part in name else data
        theirs = name
        for ours, part in reversed(_NAMES.items()):
            theirs = theirs.replace(ours, part)
        if data.ndim == 1:
            writer.add_tensor(theirs, data)
        else:
            writer.add_tensor(theirs, _packed(np.ascontiguousarray(data), kind), raw_dtype=kind)
    for theirs, data in (tensors or {}).items():
        writer.add_tensor(theirs, np.asarray(data, np.float32))
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        _ADDERS[type(value)](writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama_cpp_rows(weight: Any, heads: int) -> Any:
    """llama.cpp keeps the rows of Q and K for interleaved rotation."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _packed(data: Any, kind: GGMLQuantizationType) -> Any:
    try:
        return quants.quantize(data, kind)
    except NotImplementedError:
        block, nbytes = GGML_QUANT_SIZES[kind]
        return np.random.default_rng(0).integers(0, 120, (len(data), data.shape[1] // block * nbytes), np.uint8)
