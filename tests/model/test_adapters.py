import pytest
import torch

from diffquant.errors import CheckpointError, UnknownModelTypeError
from diffquant.model.adapters import READERS, adapter_for
from diffquant.model.cache import PackedLayer
from diffquant.model.windowed_cache import RecurrentLayer
from tests.support.checkpoints import MOTIF3
from tests.support.models import SIZES
from tests.support.tables import in_one_test

GATED = {
    "pairs": 4, "kv_pairs": 2, "head_dim": 16, "value_dim": 16, "shared_k": True, "lam": "two-gates",
    "output_gate": True,
}  # fmt: skip
CASES = [
    {"model_type": "diffllama", "num_key_value_heads": 4},
    {"model_type": "diff_v1", "num_key_value_heads": 4},
    {"model_type": "diff_v1", "num_key_value_heads": 4, "gqa_pairing": "plain"},
    {"model_type": "diff_v2", "num_key_value_heads": 2},
    {"model_type": "phi4flash", "num_hidden_layers": 8},
    MOTIF3,
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"model_type": "motif", "num_attention_heads": 10, "num_noise_heads": 2, "num_key_value_heads": 4, "head_dim": 16},
    {"model_type": "diff_transformer", "spec": GATED},
]

each_family = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(x) for x in list(case.values())[:4]))


@each_family
def test_the_table_is_that_of_the_modules(case):
    architecture = adapter_for(SIZES | case).architecture
    with torch.device("meta"):
        model = architecture.new_model()
    shapes = {name: each.shape for name, each in architecture.parameters.items()}
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    kept = ("lambda_proj", "output_gate_proj", "lm_head", "dt_proj", "wq_b_gate", "router", "mhc_")
    packed = {name for name, shape in architecture.linear_shapes().items() if len(shape) == 2}
    assert packed == {n for n in linears if not any(part in n for part in kept)}
    for blocks, layer in zip(architecture.layers, model.model.layers, strict=True):
        for name, module in layer.named_children():
            stated = {name: parameter.shape for name, parameter in blocks[name].parameter_specs().items()}
            assert stated == {name: tuple(p.shape) for name, p in module.named_parameters()}


@each_family
def test_a_models_configuration_gives_its_architecture_back(case):
    architecture = adapter_for(SIZES | case).architecture
    config = architecture.config
    assert type(config)(**config.to_dict()).architecture == architecture


@each_family
def test_a_cache_holds_what_the_blocks_say(case):
    """Of 16-bit states: keys and values of as many heads and widths as a model stores of its own tokens."""
    architecture = adapter_for(SIZES | case).architecture
    model = architecture.new_model()
    cache = model.new_cache()
    model(torch.randint(0, 90, (1, 5)), past_key_values=cache)
    for layer, rows in architecture.cached_shapes.items():
        kept = cache.layers[layer]
        is_ours = isinstance(kept, PackedLayer)
        stored = (kept.stored_keys.read(), kept.stored_values.read()) if is_ours else (kept.keys, kept.values)
        assert [(x.shape[1], x.shape[3]) for x in stored] == [rows.keys, rows.values]
    states = [block.cached_shapes for layer in architecture.layers for block in layer.values()]
    states = [state for state in states if isinstance(state, tuple)]
    recurrent = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    assert states == [tuple(x[0].shape for x in layer.read()) for layer in recurrent]


def test_an_unknown_model_type_lists_what_is_read():
    with pytest.raises(UnknownModelTypeError, match=f"'mamba' is not supported; choose from {', '.join(READERS)}"):
        adapter_for(SIZES | {"model_type": "mamba"})


@in_one_test(
    ("change", "message"),
    [
        ({"num_attention_heads": 7, "head_dim": 8}, "num_attention_heads is 7.*even"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1.*even"),
        ({"num_key_value_heads": 6}, "3 KV pairs do not divide 4 query pairs"),
        ({"hidden_size": None}, "lacks a positive hidden_size"),
        ({"vocab_size": -3, "num_hidden_layers": "two"}, "vocab_size, num_hidden_layers"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral'"),
        ({"model_type": "diff_v1", "gqa_pairing": "loose"}, "gqa_pairing is 'loose'; it must be flash or plain"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        adapter_for(SIZES | {"model_type": "diffllama"} | change)


@in_one_test("model_type", ["diffllama", "llama", "diff_v1", "diff_v2", "diff_transformer"])
def test_a_sliding_window_is_refused_never_ignored(model_type):
    config = SIZES | {"model_type": model_type, "sliding_window": 512}
    with pytest.raises(CheckpointError, match="sliding_window is 512; windowed attention is not supported"):
        adapter_for(config)
    with pytest.raises(CheckpointError, match="layer_types has sliding_attention"):
        adapter_for(SIZES | {"model_type": model_type, "layer_types": ["full_attention", "sliding_attention"]})
    if model_type == "llama":
        assert adapter_for(config | {"use_sliding_window": False}).architecture.hidden_size == SIZES["hidden_size"]


def test_heads_of_a_native_model_are_as_wide_as_its_spec_says():
    spec = {"pairs": 4, "kv_pairs": 2, "head_dim": 8, "value_dim": 8, "maps": 1}
    config = SIZES | {"model_type": "diff_transformer", "spec": spec}
    assert adapter_for(config).architecture.head_dim == 8
    with pytest.raises(CheckpointError, match="head_dim is 16, and `spec` has 8"):
        adapter_for(config | {"head_dim": 16})
