"""Motif-3's published index by name, what of it is packed, and the verbs that take a small one with all its names."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import diffquant
from diffquant import Recipe, load, quantize
from diffquant.checkpoints.compressed_tensors import PACKED
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.weight_source import PackingRules, matches_any_pattern
from diffquant.errors import CheckpointError, UsageError
from diffquant.model.adapters import adapter_for
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.roundings.gptq import descent
from tests.support import tiny_lm
from tests.support.checkpoints import MOTIF3, write_random
from tests.support.synthetic import preset
from tests.support.tables import in_one_test

CONFIG = preset("motif-3")
ATTENTION = {"wq_a.weight": [1024, 4096], "q_norm.weight": [1024], "wq_b.weight": [15360, 1024]}
ATTENTION |= {"wq_b_gate.weight": [8192, 1024], "wkv_a.weight": [576, 4096], "kv_norm.weight": [512]}
ATTENTION |= {"wkv_b.weight": [4096, 512], "lambda_proj.weight": [64, 4096], "wo.weight": [4096, 8192]}
STREAMS = {"rms_norm.weight": [16384], "proj_pre.weight": [4, 16384], "proj_post.weight": [4, 16384]}
STREAMS |= {"proj_res.weight": [16, 16384], "bias_pre": [4], "bias_post": [4], "bias_res": [4, 4]}
STREAMS |= {f"alpha_{name}": [1] for name in ("pre", "post", "res")}
NORMS = {"input_layernorm.weight": [4096], "post_attention_layernorm.weight": [4096]}
EXPERTS = {"router.gate.weight": [384, 4096], "expert_bias": [384], "experts.gate_up_proj": [384, 2560, 4096]}
EXPERTS |= {"experts.down_proj": [384, 4096, 1280], "experts.act_fn.weight": [384, 3], "experts.act_fn.bias": [384, 1]}
PREDICTED = {"embed_norm.weight": [4096], "final_layernorm.weight": [4096], "input_proj.weight": [4096, 8192]}


def network(inner):
    shapes = {"gate_proj.weight": [inner, 4096], "up_proj.weight": [inner, 4096], "down_proj.weight": [4096, inner]}
    return shapes | {"act_fn.weight": [3], "act_fn.bias": [1]}


def below(place, shapes):
    return {f"{place}.{name}": shape for name, shape in shapes.items()}


def published_shapes():
    """Names and shapes in the headers of the 155 published files, written down by hand."""
    shapes = {f"{name}.weight": [220160, 4096] for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = [4096]
    for layer in range(53):
        parts = NORMS | below("self_attn", ATTENTION) | below("mhc_attn", STREAMS) | below("mhc_ffn", STREAMS)
        if layer < 2:
            parts |= below("mlp", network(12288))
        else:
            parts |= below("moe", EXPERTS | below("shared_experts", network(1280)))
        shapes |= below(f"model.layers.{layer}", parts)
    parts = PREDICTED | NORMS | below("self_attn", ATTENTION) | below("mlp", network(12288))
    return shapes | below("model.mtp_layers.0", parts)


@pytest.fixture
def checkpoint(tmp_path):
    """A small one, with widths that groups of 32 divide."""
    wide = {"hidden_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "moe_intermediate_size": 32}
    wide |= {"intermediate_size": 64, "v_head_dim": 8, "vocab_size": tiny_lm.WORDS}
    write_random(tmp_path / "plain", MOTIF3 | wide, torch.bfloat16)
    tiny_lm.tokenizer().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_its_names_and_shapes_are_the_2236_of_the_published_index():
    shapes = {name: list(shape) for name, shape in adapter_for(CONFIG).source_shapes().items()}
    assert shapes == published_shapes()
    assert len(shapes) == 2236
    assert sum(map(math.prod, shapes.values())) == 314_841_775_750


def test_the_model_has_those_tensors_but_for_the_layer_that_predicts_one_token_more():
    architecture = adapter_for(CONFIG).architecture
    with torch.device("meta"):
        model = architecture.new_model()
    own = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert own == {name: shape for name, shape in published_shapes().items() if ".mtp_layers." not in name}
    assert architecture.layer_kinds == [
        ("" if layer % 4 == 0 else "windowed ") + "latent attention" + (" with experts" if layer >= 2 else "")
        for layer in range(53)
    ]
    scales = {layer["self_attn"].spec.scale * layer["self_attn"].scale_factor for layer in architecture.layers}
    assert sorted(scales) == pytest.approx([0.07216878365, 0.14467962580])
    assert {rows.window for rows in architecture.cached_shapes.values()} == {None, 129}


def test_by_name_and_by_rule_the_same_is_packed_and_the_same_stays():
    """What the adapter knows is what the rules for an unknown architecture choose by its tensors' names."""
    parameters, rules = adapter_for(CONFIG).source_parameters, PackingRules.read()
    packed = {name for name, each in parameters.items() if each.packing == "weights"}
    assert packed == {
        name
        for name, each in parameters.items()
        if rules.matches_weight(name, len(each.shape)) and not matches_any_pattern(name, rules.keep)
    }
    endings = {re.sub(r"^model\.layers\.\d+\.", "", name) for name in packed}
    matrices = [f"{name}_proj" for name in ("gate", "up", "down")]
    assert endings == {
        *(f"self_attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")),
        *(f"{part}.{name}.weight" for part in ("mlp", "moe.shared_experts") for name in matrices),
        "moe.experts.gate_up_proj",
        "moe.experts.down_proj",
    }


def test_an_override_reaches_what_stays_but_gates_of_streams_norms_and_activations():
    parameters = adapter_for(CONFIG).source_parameters
    named = {re.sub(r"\.\d+\.", ".N.", name) for name, each in parameters.items() if each.packing == "named"}
    of_mtp = [f"self_attn.{name}" for name in ("wq_a", "wq_b", "wq_b_gate", "wkv_a", "wkv_b", "wo", "lambda_proj")]
    of_mtp += ["input_proj", *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    assert named == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        *(f"model.layers.N.{name}.weight" for name in ("self_attn.lambda_proj", "self_attn.wq_b_gate")),
        "model.layers.N.moe.router.gate.weight",
        *(f"model.mtp_layers.N.{name}.weight" for name in of_mtp),
    }


def test_inspect_says_what_it_is(checkpoint):
    found, tensors = inspect_checkpoint(checkpoint), load_file(checkpoint / "model.safetensors")
    assert found.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert found.spec.attention_name == "grouped DIFF V2"
    assert found.kinds == {
        "latent attention": 1,
        "windowed latent attention with experts": 2,
        "latent attention with experts": 2,
    }
    assert len(found.lam) == 5
    assert found.sizes["4:g32"] < found.sizes["8:g32"] < found.sizes["16"]
    assert "8 pairs (4 to a noise head) over 2 KV pairs, width 12, values 8" in str(found)


def test_it_is_quantized_scored_and_generated_from(checkpoint, tmp_path):
    recipe = Recipe.of(weights="4:g32", kv="8:row:rotated", logits="8")
    quantize(checkpoint, tmp_path / "low", recipe)
    plain, low = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "low"))
    packed = {name.removesuffix(PACKED) for name in low if name.endswith(PACKED)}
    assert packed == set(open_source(tmp_path / "low").packed)
    assert {f"model.layers.{layer}.moe.experts.down_proj" for layer in range(1, 5)} < packed
    kept = {name for name in plain if name.removesuffix(".weight") not in packed}
    assert all(torch.equal(low[name], plain[name]) for name in kept)
    assert {name for name in plain if ".mtp_layers." in name} < kept
    ids = torch.randint(0, tiny_lm.WORDS, (2, 19), generator=torch.Generator().manual_seed(0))
    models = [load(tmp_path / "low", dtype=torch.float32), load(checkpoint, recipe, dtype=torch.float32)]
    for model in models:
        model.apply_recipe(recipe)
    assert torch.equal(*(model(ids).logits for model in models))
    models[0].check_quantizers_ran()
    scores = [
        diffquant.evaluate(folder, "perplexity", given, characters=600, dtype="float32")["perplexity"].details
        for folder, given in ((tmp_path / "low", None), (checkpoint, recipe), (checkpoint, None))
    ]
    assert scores[0] == scores[1]
    assert scores[0]["perplexity"] != scores[2]["perplexity"]
    told = diffquant.generate(tmp_path / "low", "the cat", max_new_tokens=5)
    assert told


@pytest.mark.parametrize("rule", ["gptq", "tuned"])
def test_rules_that_read_a_text_round_its_matrices_where_experts_are_kept(checkpoint, tmp_path, rule, monkeypatch):
    monkeypatch.setattr(descent, "_STEPS", 4)
    kept = {"*.experts.*": "16"}
    settings = {"name": rule, "tokens": 256, "window": 64}
    recipe = Recipe.of(weights="4:g32", rounding=settings, overrides=kept)
    quantize(checkpoint, tmp_path / "low", recipe)
    nearest = quantize(checkpoint, tmp_path / "near", Recipe.of(weights="4:g32", overrides=kept))
    names = {error.name for error in nearest.errors}
    low, near = (load_file(tmp_path / folder / "model.safetensors") for folder in ("low", "near"))
    differing = {n for n in names if not torch.equal(*(x[n.removesuffix(".weight") + PACKED] for x in (low, near)))}
    assert len(differing) > 0.9 * len(names)
    with pytest.raises(UsageError, match=r"needs the inputs of Linears.*moe\.experts\.gate_up_proj"):
        plan_quantization(open_source(checkpoint), Recipe.of(weights="4:g32", rounding=settings))


@pytest.mark.parametrize("change", ["unknown", "missing", "reshaped"])
def test_a_tensor_that_the_index_has_not_is_refused_by_name(checkpoint, change):
    tensors, name = load_file(checkpoint / "model.safetensors"), "model.layers.1.moe.expert_bias"
    if change == "unknown":
        tensors["model.layers.1.moe.router.bias"] = torch.zeros(6)
    else:
        tensors |= {name: torch.zeros(5)}
    if change == "missing":
        del tensors[name]
    save_file(tensors, checkpoint / "model.safetensors")
    said = {
        "unknown": r"not part of the model: model\.layers\.1\.moe\.router\.bias",
        "missing": r"missing model\.layers\.1\.moe\.expert_bias \[6\]",
        "reshaped": r"model\.layers\.1\.moe\.expert_bias is \[5\], not \[6\]",
    }
    with pytest.raises(CheckpointError, match=said[change]):
        open_source(checkpoint)


def test_a_checkpoint_without_the_predicting_layer_says_so_in_its_config(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({n: x for n, x in tensors.items() if ".mtp_layers." not in n}, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing model\.mtp_layers\.0\.embed_norm\.weight"):
        open_source(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert len(open_source(checkpoint).checkpoint.tensors) == len(tensors) - 19


@in_one_test(
    ("changes", "message"),
    [
        ({"score_func": "softmax"}, "score_func is 'softmax', not 'sigmoid'"),
        ({"attention_cls": "gqa"}, "attention_cls is 'gqa', not 'gdla'"),
        ({"mhc_enabled": False}, "mhc_enabled is False, not True"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu', not 'poly_norm'"),
        ({"num_shared_experts": 2}, "num_shared_experts is 2, not 1"),
        ({"headwise_attn_output_gate": True}, "headwise_attn_output_gate is True, not False"),
        ({"sliding_window_pattern": "last"}, "sliding_window_pattern is 'last', not 'interleave'"),
        ({"sliding_window": 0}, "sliding_window is 0, not an integer above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling has type 'linear'"),
        ({"num_noise_heads": 32}, "num_noise_heads 32 does not divide num_attention_heads 80 into groups"),
        ({"num_noise_heads": 8}, "num_noise_heads 8 is not num_key_value_heads 16"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd or not below head_dim 192"),
        ({"experts_top_k": 385}, "experts_top_k 385 is more than num_experts 384"),
        ({"q_lora_rank": "1024"}, "q_lora_rank is '1024', not an integer above 0"),
        ({"route_scale": "2"}, "route_scale is '2', not a number"),
        ({"route_norm": 1}, "route_norm is 1, not true or false"),
        ({"num_experts": None}, "num_experts is None, not an integer above 0"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_naming_its_key(changes, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        adapter_for(CONFIG | changes)


def test_a_window_whose_switch_is_not_stated_is_refused():
    config = {key: value for key, value in CONFIG.items() if key != "use_sliding_window"}
    with pytest.raises(CheckpointError, match="sliding_window is stated without use_sliding_window"):
        adapter_for(config)
