"""Weights that are stored [in, out], against transformers' own Conv1D and experts in models of random weights."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from diffquant.checkpoints.weight_layout import find_transposed
from diffquant.checkpoints.weight_source import PackingRules, open_weights
from diffquant.errors import CheckpointError
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.tables import in_one_test

GPT = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 96}
WIDE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
LLAMA = WIDE | {"intermediate_size": 96, "num_key_value_heads": 2}
EXPERTS = LLAMA | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
OF_CONV1D = {
    "GPT2LMHeadModel": GPT,
    "GPT2Model": GPT | {"add_cross_attention": True},
    "GPT2DoubleHeadsModel": GPT | {"n_inner": 48},
    "OpenAIGPTLMHeadModel": GPT,
    "ImageGPTForCausalImageModeling": GPT,
    "DecisionTransformerModel": GPT | {"hidden_size": 64, "state_dim": 5, "act_dim": 3},
}
OF_LINEARS = {
    "GPTBigCodeForCausalLM": GPT,
    "GPTNeoForCausalLM": WIDE | {"num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
    "GPTNeoXForCausalLM": WIDE | {"intermediate_size": 96},
    "CodeGenForCausalLM": GPT | {"rotary_dim": 16},
    "BloomForCausalLM": {"hidden_size": 64, "n_layer": 1, "n_head": 2, "vocab_size": 96},
    "OPTForCausalLM": WIDE | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "PhiForCausalLM": WIDE | {"intermediate_size": 96},
    "Qwen2ForCausalLM": LLAMA,
    "GemmaForCausalLM": LLAMA | {"head_dim": 16},
    "MixtralForCausalLM": EXPERTS,
    "BertLMHeadModel": WIDE | {"intermediate_size": 96, "is_decoder": True},
}
NEMOTRON = LLAMA | {"layers_block_type": ["moe"], "n_routed_experts": 2, "moe_intermediate_size": 96}
EXPERTS_FIRST = {"GptOssForCausalLM": EXPERTS, "Llama4ForCausalLM": EXPERTS | {"intermediate_size_mlp": 96}}


def random_model(name, sizes):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes))


def write(folder, model):
    """The model's tensors under the modules' own names, whatever names its checkpoints have."""
    folder.mkdir()
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "of-no-name"}))
    return folder


@in_one_test(("name", "sizes"), OF_CONV1D.items())
def test_every_conv1d_is_known_and_refused(tmp_path, name, sizes):
    model = random_model(name, sizes)
    expected = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D)}
    assert expected
    source = open_weights(write(tmp_path / "model", model))
    assert set(find_transposed(source.checkpoint.tensors)) == expected
    with pytest.raises(
        CheckpointError, match=rf"{len(expected)} weights of .* are stored \[in, out\].*keep='PATTERN'"
    ) as refusal:
        quantize(source, tmp_path / "out", Recipe.of(weights="4:g16"))
    assert sum(name in str(refusal.value) for name in expected) == min(len(expected), 5)
    assert not (tmp_path / "out").exists()


@in_one_test(("name", "sizes"), OF_LINEARS.items())
def test_linears_are_not_taken_for_transposed(tmp_path, name, sizes):
    source = open_weights(write(tmp_path / "model", random_model(name, sizes)))
    assert find_transposed(source.checkpoint.tensors) == []
    assert plan_quantization(source, Recipe.of(weights="4:row")).schemes


@pytest.mark.parametrize(("width", "inner"), [(64, 64), (64, 32), (32, 64), (96, 64)], ids=str)
@pytest.mark.parametrize(
    "name", ["GptOssForCausalLM", "Llama4ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"]
)
def test_of_square_experts_the_other_matrix_shows_the_layout(tmp_path, name, width, inner):
    sizes = {
        "hidden_size": width,
        "num_experts": 2,
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), inner),
    }
    model = random_model(name, EXPERTS | {"intermediate_size_mlp": 96} | sizes)
    experts = [name for name, tensor in model.named_parameters() if tensor.ndim == 3]
    down = next(tensor for name, tensor in model.named_parameters() if name.endswith("experts.down_proj"))
    # How transformers multiplies with them, whose own flag says it of some.
    expected = experts if name in EXPERTS_FIRST else []
    assert tuple(down.shape[1:]) == ((inner, width) if expected else (width, inner))
    source = open_weights(write(tmp_path / "model", model))
    assert sorted(find_transposed(source.checkpoint.tensors)) == sorted(expected)
    if expected:
        with pytest.raises(CheckpointError, match=r"stored \[in, out\]"):
            plan_quantization(source, Recipe.of(weights="4:row"))
    else:
        assert any(".experts." in module for module in plan_quantization(source, Recipe.of(weights="4:row")).schemes)


@in_one_test("name", ["w1", "up_proj", "gate_up_proj"])
def test_square_experts_that_nothing_shows_the_layout_of_are_refused_and_can_be_kept(tmp_path, name):
    tensors = {f"layers.0.mlp.experts.{name}": torch.ones(2, 64, 64), "layers.0.mlp.proj.weight": torch.ones(64, 64)}
    if name == "up_proj":
        # Without a gate both fit either way.
        tensors["layers.0.mlp.experts.down_proj"] = torch.ones(2, 64, 64)
    folder = write(tmp_path / "model", torch.nn.Module())
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"are square, and .*experts\.{name} \[2, 64, 64\].*keep='PATTERN'"):
        plan_quantization(open_weights(folder), Recipe.of(weights="4:row"))
    plan = plan_quantization(open_weights(folder, PackingRules.read(keep=("*.experts.*",))), Recipe.of(weights="4:row"))
    assert list(plan.schemes) == ["layers.0.mlp.proj"]


@in_one_test("is_transposed", [False, True])
def test_of_experts_without_a_gate_the_router_shows_the_layout(tmp_path, is_transposed):
    model = random_model("NemotronHForCausalLM", NEMOTRON)
    folder = write(tmp_path / "model", model)
    tensors = load_file(folder / "model.safetensors")
    experts = sorted(name for name, tensor in tensors.items() if tensor.ndim == 3)
    assert [name.rpartition(".")[2] for name in experts] == ["down_proj", "up_proj"]
    if is_transposed:
        # As in a checkpoint of which transformers turns the matrices.
        tensors |= {name: tensors[name].mT.contiguous() for name in experts}
        save_file(tensors, folder / "model.safetensors")
    assert sorted(find_transposed(open_weights(folder).checkpoint.tensors)) == (experts if is_transposed else [])


def test_what_is_stored_so_can_be_kept(tmp_path):
    model = random_model("GPT2LMHeadModel", GPT)
    rules = PackingRules.read(keep=("*.c_attn.*", "*.c_fc.*"))
    folder = write(tmp_path / "model", model)
    # What is left of Conv1D is refused, the square one too, which no bias gives away.
    with pytest.raises(CheckpointError, match=r"attn\.c_proj\.weight \[64, 64\].*mlp\.c_proj\.weight \[256, 64\]"):
        plan_quantization(open_weights(folder, rules), Recipe.of(weights="4:row"))
    save_file({"a.weight": torch.ones(64, 96), "h.c_attn.weight": torch.ones(64, 192)}, folder / "model.safetensors")
    plan = plan_quantization(open_weights(folder, PackingRules.read(keep=("*.c_attn.*",))), Recipe.of(weights="4:row"))
    assert list(plan.schemes) == ["a"]


def test_a_fused_projection_without_bias_is_known_by_its_shape(tmp_path):
    folder = write(tmp_path / "model", random_model("GPT2Model", GPT))
    tensors = {"h.0.attn.c_attn.weight": torch.ones(64, 192), "h.0.attn.c_proj.weight": torch.ones(64, 64)}
    save_file(tensors, folder / "model.safetensors")
    assert find_transposed(open_weights(folder).checkpoint.tensors) == sorted(tensors)
