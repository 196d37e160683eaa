"""Every key that transformers reads of a Llama or DiffLlama is computed, refused by name or of no effect on logits."""

import dataclasses
import inspect
import json
import re

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_rope_utils import RopeParameters, RotaryEmbeddingConfigMixin

import diffquant
from diffquant.errors import CheckpointError
from tests.support.models import SIZES, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test

MODELS = {"llama": (random_llama, LlamaForCausalLM), "diffllama": (random_diffllama, DiffLlamaForCausalLM)}
IDS = random_ids(2, 37)
BASE = SIZES | {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
SHORT = {"original_max_position_embeddings": 12}
LINEAR = {"rope_type": "linear", "factor": 3.0}
OF_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
OF_YARN = {"rope_parameters": YARN}
SCALED = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [2.0] * 8}
LONG = {"rope_type": "longrope", "factor": 2.0, **FACTORS}
BEYOND = LONG | SHORT


def rope(settings, **others):
    """Two configs whose rotary settings differ in one key."""
    return {"rope_parameters": settings | others}, {"rope_parameters": settings}


PLAIN = {"vocab_size": 95, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "rope_theta": 100.0}
PLAIN |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "gelu", "rms_norm_eps": 0.5}
PLAIN |= {"tie_word_embeddings": True, "attention_bias": True}
# Key -> a config that states it, and one that differs in that key alone and computes something else, if it fits at all.
COMPUTED = {
    **{key: ({key: value}, {}) for key, value in PLAIN.items()},
    "max_position_embeddings": (OF_DYNAMIC | {"max_position_embeddings": 16}, OF_DYNAMIC),
    "rope_parameters": ({"rope_parameters": LINEAR}, {}),
    "rope_scaling": ({"rope_scaling": {"type": "linear", "factor": 3.0}}, {}),
    "original_max_position_embeddings": (OF_YARN | {"original_max_position_embeddings": 16}, OF_YARN),
    "rope_parameters.rope_type": rope({"factor": 3.0}, rope_type="linear"),
    "rope_parameters.type": ({"rope_parameters": {"type": "linear", "factor": 3.0}}, {}),
    "rope_parameters.rope_theta": rope(LINEAR, rope_theta=100.0),
    "rope_parameters.factor": rope(LINEAR, factor=5.0),
    "rope_parameters.factor of null": rope(YARN, factor=None, **SHORT),
    "rope_parameters.partial_rotary_factor": rope({"rope_type": "proportional"}, partial_rotary_factor=0.5),
    "rope_parameters.original_max_position_embeddings": rope(YARN, **SHORT),
    "rope_parameters.attention_factor": rope(YARN, attention_factor=0.5),
    "rope_parameters.beta_fast": rope(YARN, beta_fast=8.0),
    "rope_parameters.beta_slow": rope(YARN, beta_slow=4.0),
    "rope_parameters.mscale": rope(SCALED, mscale=3.0),
    "rope_parameters.mscale_all_dim": rope(SCALED, mscale_all_dim=3.0),
    "rope_parameters.truncate": rope(YARN, truncate=False),
    "rope_parameters.short_factor": rope(LONG, short_factor=[3.0] * 8),
    "rope_parameters.long_factor": rope(BEYOND, long_factor=[3.0] * 8),
    "rope_parameters.low_freq_factor": rope(LLAMA3, low_freq_factor=2.0),
    "rope_parameters.high_freq_factor": rope(LLAMA3, high_freq_factor=40.0),
}
OF_LLAMA = {"mlp_bias": ({"mlp_bias": True}, {})}

# Key -> a config that is refused, and what the message names.
REFUSED = {
    "partial_rotary_factor": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "rope_parameters.partial_rotary_factor": (rope(YARN, partial_rotary_factor=0.5)[0], "partial_rotary_factor is 0.5"),
    "rope_parameters.mrope_section": ({"rope_parameters": LINEAR | {"mrope_section": [2, 3, 3]}}, "mrope_section is"),
    "rope_parameters.long_factor": ({"rope_parameters": LONG | {"long_factor": [2.0]}}, "long_factor has 1 numbers"),
    "rope_parameters.attention_factor": (rope(YARN, attention_factor="x")[0], "attention_factor is 'x'"),
    "per_layer_config": ({"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "per_layer_config"),
    "layer_types": ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has chunked_attention"),
    "sliding_window": ({"sliding_window": 8}, "sliding_window is 8"),
    # Read by what builds the masks of every model; vLLM reads both.
    "is_causal": ({"is_causal": False}, "is_causal is False"),
    "logit_scale": ({"logit_scale": 0.5}, "logit_scale is 0.5"),
    # Gemma's, which transformers leaves out of these models without a word.
    "attn_logit_softcapping": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "final_logit_softcapping": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
}
OF_DIFFLLAMA = {"mlp_bias": ({"mlp_bias": True}, "mlp_bias is true")}

# Key -> a value that changes no logit. What generation reads of them (the tokens that begin, end and pad) is read.
WITHOUT_EFFECT = {"transformers_version": "0.1", "architectures": ["Other"], "name_or_path": "elsewhere"}
WITHOUT_EFFECT |= {"output_hidden_states": True, "output_attentions": True, "return_dict": False, "use_cache": False}
WITHOUT_EFFECT |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "_commit_hash": "abc", "initializer_range": 0.5}
WITHOUT_EFFECT |= {"chunk_size_feed_forward": 4, "is_encoder_decoder": True, "problem_type": "regression"}
WITHOUT_EFFECT |= {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1}, "num_labels": 3}
WITHOUT_EFFECT |= {"pad_token_id": 3, "bos_token_id": 4, "eos_token_id": [5, 6], "attention_dropout": 0.5}
WITHOUT_EFFECT |= {"pretraining_tp": 2, "lambda_std_dev": 3.0}
WITHOUT_EFFECT |= {"attn_implementation": "eager", "experts_implementation": "eager"}
# transformers refuses dropout for DiffLlama, which would differ from map to map, and cannot run without return_dict.
NOT_ASKED = {("diffllama", "attention_dropout"), ("llama", "return_dict"), ("diffllama", "return_dict")}


def keys_of_the_library():
    """Keys that the installed transformers reads of these config.json files, those of rotary settings behind a dot."""
    fields = {field.name for library in (LlamaConfig, DiffLlamaConfig) for field in dataclasses.fields(library)}
    mixin = RotaryEmbeddingConfigMixin
    readers = (PreTrainedConfig.__post_init__, mixin.convert_rope_params_to_dict, mixin.standardize_rope_params)
    sources = [inspect.getsource(function) for function in readers]
    taken = re.findall(r'(?:kwargs\.(?:pop|get)\(|(?:has|get)attr\(self, )"(\w+)"', "\n".join(sources))
    taken += re.findall(r'getattr\(config, "(\w+)"', inspect.getsource(create_causal_mask))
    # Older versions keep names for themselves beside those of config.json.
    return (
        fields
        | {name for name in taken if not name.startswith("_")}
        | {f"rope_parameters.{key}" for key in RopeParameters.__annotations__}
    )


def test_every_key_of_the_library_has_its_place():
    assert keys_of_the_library() <= {*COMPUTED, *OF_LLAMA, *REFUSED, *WITHOUT_EFFECT}


def write(folder, model_type, config):
    """A checkpoint of random weights whose config.json is as it is written here."""
    random_model, _ = MODELS[model_type]
    shapes = {key: value for key, value in (BASE | config).items() if key in SHAPING}
    model = random_model(**shapes)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(2)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(BASE | {"model_type": model_type} | config))
    return folder


SHAPING = {*BASE, *COMPUTED, "mlp_bias"} - {"rope_parameters", "rope_scaling", "rope_theta"}


def logits_of(folder):
    return diffquant.load(folder)(IDS).logits


def librarys_logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(IDS, return_dict=True).logits


def cases(both, of_llama, of_diffllama):
    chosen = {"llama": both | of_llama, "diffllama": both | of_diffllama}
    return [(kind, key) for kind, keys in chosen.items() for key in keys]


@pytest.mark.parametrize(("model_type", "key"), cases(COMPUTED, OF_LLAMA, {}))
def test_a_computed_key_is_computed_as_transformers_does(tmp_path, model_type, key):
    stated, other = (COMPUTED | OF_LLAMA)[key]
    folder = write(tmp_path / "model", model_type, stated)
    logits = logits_of(folder)
    torch.testing.assert_close(logits, librarys_logits(folder), rtol=0, atol=1e-4)
    (folder / "config.json").write_text(json.dumps(BASE | {"model_type": model_type} | other))
    try:
        without = logits_of(folder)
    except CheckpointError:
        return
    assert (without - logits).abs().max() > 1e-3


@in_one_test(("model_type", "key"), cases(REFUSED, {}, OF_DIFFLLAMA))
def test_a_key_that_is_not_computed_is_refused_by_name(tmp_path, model_type, key):
    stated, message = (REFUSED | OF_DIFFLLAMA)[key]
    folder = write(tmp_path / "model", model_type, {})
    (folder / "config.json").write_text(json.dumps(BASE | {"model_type": model_type} | stated))
    with pytest.raises(CheckpointError, match=message):
        diffquant.load(folder)


@in_one_test("model_type", MODELS)
def test_other_keys_change_nothing_in_transformers_or_here(tmp_path, model_type):
    folder = write(tmp_path / "model", model_type, {})
    logits = logits_of(folder)
    for key, value in WITHOUT_EFFECT.items():
        (folder / "config.json").write_text(json.dumps(BASE | {"model_type": model_type, key: value}))
        assert torch.equal(logits_of(folder), logits), key
        if (model_type, key) not in NOT_ASKED:
            torch.testing.assert_close(librarys_logits(folder), logits, rtol=0, atol=1e-4, msg=key)
