import dataclasses

import pytest
from transformers import DiffLlamaConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diffquant.errors import CheckpointError
from diffquant.model.adapters import adapter_for
from diffquant.model.adapters.sizes import DIFFLLAMA, LLAMA, ROPE_TYPES
from tests.support.checkpoints import SIZES
from tests.support.tables import in_one_test

LIBRARY = {"llama": LlamaConfig, "diffllama": DiffLlamaConfig, "diff_v1": DiffLlamaConfig}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SETTINGS = {"factor": 2.0, **FACTORS}
CONFIGS = {
    "nothing": {},
    "heads": {"num_key_value_heads": 4, "head_dim": 32},
    "nulls": {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None, "eos_token_id": None},
    "tokens": {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 0, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "hidden_act": "gelu", "rms_norm_eps": 1e-3, "max_position_embeddings": 99},
    "theta": {"rope_theta": 5e5},
    "theta-of-parameters": {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    "old-spelling": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7e4},
    "partial": {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "proportional"}},
    "stretched": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


def stated(kind, *without):
    """A rope of a type with all its settings but some."""
    return {"rope_type": kind, **{key: SETTINGS[key] for key in ROPE_TYPES[kind] if key not in without}}


@pytest.mark.parametrize("model_type", LIBRARY)
@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_read_as_the_library_reads_it(model_type, change):
    config = SIZES | {"model_type": model_type, "head_dim": 16} | change
    library, ours = LIBRARY[model_type](**config), adapter_for(config).architecture
    for field in dataclasses.fields(ours):
        if field.name not in ("diff_spec", "mlp_bias"):
            assert getattr(ours, field.name) == getattr(library, field.name), field.name


@in_one_test(("library", "defaults"), [(LlamaConfig, LLAMA), (DiffLlamaConfig, DIFFLLAMA)])
def test_defaults_are_the_librarys(library, defaults):
    fields = {field.name: field.default for field in dataclasses.fields(library)}
    held = {key: value for key, value in defaults.items() if key in fields and key != "initializer_range"}
    assert held == {key: fields[key] for key in held}
    assert library().initializer_range == defaults["initializer_range"]
    assert set(defaults) - set(fields) <= {"mlp_bias"}


def test_rope_types_are_those_that_transformers_computes():
    assert set(ROPE_TYPES) == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in ROPE_TYPES.items() for key in keys])
def test_a_rope_without_a_setting_is_refused_as_transformers_refuses_it(kind, key):
    sizes = SIZES | {"model_type": "llama", "head_dim": 16}
    whole, lacking = ({"rope_parameters": rope} for rope in (stated(kind), stated(kind, key)))
    assert adapter_for(sizes | whole).architecture.rope_parameters == LlamaConfig(**sizes, **whole).rope_parameters
    with pytest.raises(KeyError):
        LlamaConfig(**sizes, **lacking)
    with pytest.raises(CheckpointError, match=f"its rope_type '{kind}' lacks {key}"):
        adapter_for(sizes | lacking)


@in_one_test(
    ("changes", "said"),
    [
        (
            {"rms_norm_eps": "1e-5", "hidden_act": None},
            "hidden_act is None, not str; rms_norm_eps is '1e-5', not float",
        ),
        ({"num_key_value_heads": True}, "heads is True"),
        ({"eos_token_id": [2, "x"]}, r"eos_token_id is \[2, 'x'\]"),
        ({"hidden_size": 130, "head_dim": 16}, "hidden_size 130 is not a multiple of num_attention_heads"),
    ],
)
def test_a_setting_of_a_wrong_type_or_size_is_named(changes, said):
    with pytest.raises(CheckpointError, match=said):
        adapter_for(SIZES | {"model_type": "llama"} | changes)
