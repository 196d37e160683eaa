"""An exported folder's descriptions: model card, record, genai_config.json, web.json, and config.json."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.side_files import format_front_matter, read_json
from diffquant.checkpoints.texts import SpecialTokens
from diffquant.errors import CheckpointError
from diffquant.model.config import DiffTransformerConfig
from diffquant.onnx.graph.matrix import container_bits
from diffquant.onnx.graph.plan import ExportPlan, cached_key_width
from diffquant.onnx.graph.streaming import StreamedTensor
from diffquant.onnx.manifest import write_manifest
from diffquant.onnx.runtime.device import RuntimeDevice
from diffquant.quantization.descriptions import FAMILY
from diffquant.quantization.engine_folder import remove_code_files
from diffquant.quantization.foreign_code import describe_removed_code, remove_code_entries
from diffquant.reports.tables import stored_bits_per_weight
from diffquant.support.digests import FileDigests
from diffquant.support.files import write_atomically
from diffquant.support.terminal import markdown_code, markdown_text

_CARD = """{head}
# {title}, for ONNX Runtime

Exported from {name} ({model_type}) by diffquant.

| part | precision |
|---|---|
| weights | {weights} |
| KV cache | {cache} |
| attention logits | {logits} |
| embedding and head | {embed} |
| activations | {dtype} |

`diffquant run FOLDER --prompt TEXT` continues a prompt. ONNX Runtime also opens {model} without diffquant{why}.
diffquant.json records what it was made from.
"""

_FUNCTION = "diffquant's\noperator is stored with a function body of standard operators"


def exported_card(plan: ExportPlan) -> str:
    """Return the text of an exported folder's model card: its checkpoint, its precisions, and what runs it."""
    checkpoint, options = plan.source.checkpoint, plan.options
    tags = ["diffquant", "onnxruntime", *([FAMILY] if plan.source.spec.maps > 1 else [])]
    is_rounded = plan.source.packed or options.weights.quantizes or options.embed_bits < 16
    return _CARD.format(
        head=format_front_matter("onnx", tags, checkpoint.front_matter, "quantized" if is_rounded else None),
        title=markdown_text(checkpoint.name),
        name=markdown_code(checkpoint.name),
        model_type=markdown_text(str(checkpoint.config.get("model_type"))),
        weights="as the checkpoint stores them" if plan.source.packed else options.weights,
        cache=f"{options.kv_bits} bits" if options.cache else "none",
        logits=options.logits,
        embed=f"{options.embed_bits} bits",
        dtype=options.dtype,
        model=options.layout.model,
        why="" if options.portable else f": {_FUNCTION}",
    )


GENAI_FILE = "genai_config.json"


def genai_config(plan: ExportPlan, tokens: SpecialTokens) -> dict[str, Any]:
    """Return the content of genai_config.json, from which onnxruntime-genai loads the model.

    It has the names of inputs and outputs, sizes, special tokens, the device, and settings for greedy decoding.
    """
    config, spec = plan.config, plan.spec
    device = RuntimeDevice.parse(plan.options.genai_device)
    context = config.max_position_embeddings
    # Nodes that a provider does not support run on the CPU.
    providers = [{device.kind: device.cuda_options}] if device.kind == "cuda" else []
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": providers},
        "filename": plan.options.layout.model,
        "head_size": cached_key_width(spec),
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
    if plan.source.architecture.has_recurrent_states:
        decoder["inputs"] |= {"past_conv_names": "past_conv.%d", "past_recurrent_names": "past_ssm.%d"}
        decoder["outputs"] |= {"present_conv_names": "present_conv.%d", "present_recurrent_names": "present_ssm.%d"}
    model: dict[str, Any] = {
        "type": "decoder",
        "vocab_size": config.vocab_size,
        "context_length": context,
        "bos_token_id": 0 if tokens.bos is None else tokens.bos,
        # genai refuses ids outside the vocabulary, which no model generates.
        "eos_token_id": [token for token in tokens.ends if token in range(config.vocab_size)],
        "pad_token_id": _genai_padding(tokens, config.vocab_size),
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


def _genai_padding(tokens: SpecialTokens, vocabulary_size: int) -> int:
    """Return the token with which onnxruntime-genai pads.

    If no token ends a text, genai ends it at this token. So it is one that the model hardly generates: the one that
    begins texts, or else the last one.
    """
    chosen = (tokens.pad, *tokens.ends, tokens.bos, vocabulary_size - 1)
    return next(token for token in chosen if token is not None and token in range(vocabulary_size))


WEB_FILE = "web.json"


def web_description(config: DiffTransformerConfig, tokens: SpecialTokens) -> dict[str, Any]:
    """Return the content of web.json: the model's sizes, named as in docs/differential-attention-op.md."""
    spec = config.diff_spec
    return {
        "generation": spec.attention_name,
        "layers": config.num_hidden_layers,
        "num_pairs": spec.pairs,
        "num_kv_pairs": spec.kv_pairs,
        "signals_per_noise": spec.signals_per_noise,
        "head_dim": spec.head_dim,
        "shares_keys": spec.shared_k,
        "scale": spec.scale,
        "context": config.max_position_embeddings,
        "ends": tokens.ends,
    }


def portable_config(plan: ExportPlan, tokens: SpecialTokens) -> dict[str, Any]:
    """Return the content of a portable folder's config.json.

    transformers.js and optimum use the model type only to find the names of the cache inputs. So the model is described
    as a Llama, whose cache inputs have the same names. Head counts and widths are those of the cache, where a V1 key
    row has the keys of both maps. A model with Mamba states is described as a GraniteMoeHybrid, with a type for each
    layer.
    """
    config, spec, architecture = plan.config, plan.spec, plan.source.architecture
    kind: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if architecture.has_recurrent_states:
        # A layer's type decides whether its inputs are states, keys and values, or nothing.
        mixers = [next(iter(blocks.values())) for blocks in architecture.layers]
        types = [
            "attention" if layer in architecture.cached_shapes else "mamba" if mixer.cached_shapes else "dense"
            for layer, mixer in enumerate(mixers)
        ]
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
        "head_dim": cached_key_width(spec),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
        "transformers.js_config": {"dtype": "fp32", "use_external_data_format": {"model.onnx": 1}},
    }


def write_descriptions(plan: ExportPlan, streamed: Sequence[StreamedTensor], folder: Path) -> tuple[str, ...]:
    """Write config.json, genai_config.json, web.json, the model card and diffquant.json into an exported folder.

    genai_config.json is written only with a cache, and web.json only with the option `web`.

    Args:
        streamed: tensors of the data file.

    Returns:
        Sentences on the checkpoint's custom code, which is not copied; empty if it has none.
    """
    checkpoint, tokens = plan.source.checkpoint, plan.source.special_tokens
    config, left_out = remove_code_entries(folder, checkpoint.config)
    config.pop("diff_model", None)
    left_out += remove_code_files(folder)
    if plan.options.portable:
        config = portable_config(plan, tokens)
    # A checkpoint may omit it and rely on its family's default.
    config |= {"max_position_embeddings": plan.config.max_position_embeddings}
    descriptions = {"config.json": config}
    if plan.options.cache:
        descriptions[GENAI_FILE] = genai_config(plan, tokens)
    if plan.options.web:
        descriptions[WEB_FILE] = web_description(plan.config, tokens)
    for name, description in descriptions.items():
        write_atomically(folder / name, json.dumps(description, indent=2) + "\n")
    write_atomically(folder / "README.md", exported_card(plan))
    write_manifest(
        folder, plan.options, plan.oldest_runtime, _source_record(checkpoint), _tensor_records(plan, streamed)
    )
    return describe_removed_code(left_out, folder)


def _source_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return diffquant.json's entry about the checkpoint."""
    return {
        "name": checkpoint.name,
        "model_type": checkpoint.config.get("model_type"),
        "bytes": checkpoint.stored_nbytes,
        **FileDigests.compute(checkpoint.weight_files()).to_dict(),
        "origin": _origin_digests(checkpoint).to_dict(),
    }


def _origin_digests(checkpoint: Checkpoint) -> FileDigests:
    """Return digests of the files that `quantize` made a checkpoint from; empty if `quantize` did not write it."""
    record = checkpoint.path / "diffquant.json"
    try:
        return FileDigests.read(read_json(record).get("source", {}) if record.is_file() else {})
    except TypeError as error:
        raise CheckpointError(f"{record} is not a record of diffquant's ({error}); quantize the model again") from error


def _tensor_records(plan: ExportPlan, streamed: Sequence[StreamedTensor]) -> dict[str, Any]:
    """Return diffquant.json's entry about each quantized weight, by name."""
    nbytes = packed_bytes(streamed)
    return {
        name: {
            "bits": matrix.scheme.bits,
            "container_bits": container_bits(matrix.scheme),
            "stored_bits": round(stored_bits_per_weight(nbytes[matrix.module], matrix.elements), 4),
            "granularity": matrix.scheme.granularity_text,
        }
        for name, matrix in plan.matrices.items()
        if matrix.has_codes
    }


def packed_bytes(streamed: Sequence[StreamedTensor]) -> dict[str, int]:
    """Return the stored bytes of each module, its codes and scales together, by the module's name."""
    nbytes: dict[str, int] = defaultdict(int)
    for tensor in streamed:
        nbytes[tensor.name.rpartition(".weight_")[0]] += tensor.nbytes
    return nbytes
