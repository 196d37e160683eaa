"""unilm's attention, from its equations in float64."""

import math
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import DiffLlamaForCausalLM

from diffquant.errors import CheckpointError
from diffquant.family.mask import Mask
from diffquant.model.adapters import adapter_for
from diffquant.quantization.conversion import convert
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_random
from tests.support.models import random_ids
from tests.support.tables import in_one_test

WIDTH, HEAD = 48, 8
BASE = {"vocab_size": 11, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 3, "rms_norm_eps": 1e-6}
BASE |= {"num_attention_heads": 12, "head_dim": HEAD}


LLAMA_ANGLES = 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
# As unilm's decoder has them.
DECODER_ANGLES = 1.0 / (10000.0 ** torch.linspace(0, 1, HEAD // 2, dtype=torch.float64))


def rotated(x, angles):
    """Interleaved rotary embedding of [T, H, d] as a complex rotation."""
    length, _, width = x.shape
    turn = torch.polar(torch.ones(length, width // 2, dtype=torch.float64), torch.arange(length)[:, None] * angles)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn[:, None]).flatten(-2)


def causal_softmax(q, k):
    """[T, d] x [T, d] -> [T, T]."""
    logits = q @ k.T / math.sqrt(q.shape[-1])
    return logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf).softmax(-1)


def unilm_v1(x, weights, layer, pairs, kv_pairs, pairing, angles=LLAMA_ANGLES):
    q = rotated((x @ weights["q_proj"].T).unflatten(-1, (2 * pairs, HEAD)), angles)
    k = rotated((x @ weights["k_proj"].T).unflatten(-1, (2 * kv_pairs, HEAD)), angles)
    v = (x @ weights["v_proj"].T).unflatten(-1, (kv_pairs, 2 * HEAD))
    repeats = pairs // kv_pairs
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    vectors = [weights[f"lambda_{name}"] for name in ("q1", "k1", "q2", "k2")]
    lam = (vectors[0] @ vectors[1]).exp() - (vectors[2] @ vectors[3]).exp() + start
    heads = []
    for j in range(pairs):
        own = j // repeats
        keys = [2 * own, 2 * own + 1] if pairing == "flash" else [2 * j // repeats, (2 * j + 1) // repeats]
        first, second = (causal_softmax(q[:, 2 * j + m], k[:, keys[m]]) for m in range(2))
        y = (first - lam * second) @ v[:, j // repeats]
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights.get("subln", 1)
        heads.append(y * (1 - start))
    return torch.cat(heads, -1) @ weights["out_proj"].T


def unilm_v2(x, weights, pairs, kv_pairs, angles=LLAMA_ANGLES):
    q = rotated((x @ weights["q_proj"].T).unflatten(-1, (2 * pairs, HEAD)), angles)
    k = rotated((x @ weights["k_proj"].T).unflatten(-1, (kv_pairs, HEAD)), angles)
    v = (x @ weights["v_proj"].T).unflatten(-1, (kv_pairs, HEAD))
    lam = (x @ weights["lambda_proj"].T).sigmoid()
    heads = []
    for j in range(pairs):
        group = 2 * j // (2 * pairs // kv_pairs)
        first, second = (causal_softmax(q[:, 2 * j + m], k[:, group]) @ v[:, group] for m in range(2))
        heads.append(first - lam[:, j : j + 1] * second)
    return torch.cat(heads, -1) @ weights["o_proj"].T


def attention_and_weights(config, layer):
    """Our attention of one layer in float64 with random weights, and those weights by unilm's names."""
    adapter = adapter_for(BASE | config)
    torch.manual_seed(0)
    model = adapter.architecture.new_model().double()
    prefix = f"model.layers.{layer}.self_attn."
    weights, state = {}, {}
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            source = adapter.source_name(name)
            weight = torch.randn(adapter.source_shapes()[source], dtype=torch.float64) * 0.3
            weights[source.removeprefix(prefix).removesuffix(".weight")] = weight
            order = adapter.row_order(name)
            state[name] = weight if order is None else weight[order]
            assert state[name].shape == parameter.shape
    model.load_state_dict(state, strict=False)
    return model, model.attention_modules[layer], weights


def run(model, attention, x):
    rotary = model.model.rotary_emb(x[None], torch.arange(len(x))[None])
    return attention(x[None], rotary, Mask(), None)[0]


@pytest.mark.parametrize("pairing", ["flash", "plain"])
@pytest.mark.parametrize("kv_heads", [12, 6, 4, 2])
def test_v1_equals_its_equations(kv_heads, pairing):
    config = {"model_type": "diff_v1", "num_key_value_heads": kv_heads, "gqa_pairing": pairing}
    model, attention, weights = attention_and_weights(config, layer=2)
    x = torch.randn(19, WIDTH, dtype=torch.float64)
    expected = unilm_v1(x, weights, 2, pairs=6, kv_pairs=kv_heads // 2, pairing=pairing)
    torch.testing.assert_close(run(model, attention, x), expected, rtol=0, atol=2e-5)


@in_one_test("kv_heads", [6, 3, 2, 1])
def test_v2_equals_its_equations(kv_heads):
    config = {"model_type": "diff_v2", "num_key_value_heads": kv_heads}
    model, attention, weights = attention_and_weights(config, layer=1)
    x = torch.randn(19, WIDTH, dtype=torch.float64)
    expected = unilm_v2(x, weights, pairs=6, kv_pairs=kv_heads)
    torch.testing.assert_close(run(model, attention, x), expected, rtol=0, atol=2e-5)


def test_v1_turns_by_the_angles_of_unilms_decoder_where_the_config_says_so():
    config = {"model_type": "diff_v1", "num_key_value_heads": 4, "rope_angles": "linspace"}
    model, attention, weights = attention_and_weights(config, layer=1)
    x = torch.randn(19, WIDTH, dtype=torch.float64)
    expected, llamas = (
        unilm_v1(x, weights, 1, pairs=6, kv_pairs=2, pairing="flash", angles=angles)
        for angles in (DECODER_ANGLES, LLAMA_ANGLES)
    )
    torch.testing.assert_close(run(model, attention, x), expected, rtol=0, atol=2e-5)
    assert (llamas - expected).abs().max() > 0.01


def test_v2_turns_by_the_angles_of_unilms_decoder_where_the_config_says_so():
    config = {"model_type": "diff_v2", "num_key_value_heads": 3, "head_dim": None, "rope_angles": "linspace"}
    model, attention, weights = attention_and_weights(config, layer=1)
    x = torch.randn(19, WIDTH, dtype=torch.float64)
    expected = unilm_v2(x, weights, pairs=6, kv_pairs=3, angles=DECODER_ANGLES)
    torch.testing.assert_close(run(model, attention, x), expected, rtol=0, atol=2e-5)


@in_one_test(("stated", "message"), [("even", "linspace"), ("linspace", "rope_type 'linear'")])
def test_angles_that_are_not_computed_are_refused(stated, message):
    stretched = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}} if stated == "linspace" else {}
    with pytest.raises(CheckpointError, match=message):
        adapter_for(BASE | {"model_type": "diff_v1", "rope_angles": stated} | stretched)


@pytest.mark.parametrize("model_type", ["diff_v1", "diff_v2"])
@pytest.mark.parametrize("key", ["lambda_init", "attention_multiplier", "residual_multiplier", "no_rope_layers"])
def test_settings_of_other_architectures_are_refused_in_a_model_of_own_training(model_type, key):
    own = BASE | {"model_type": model_type, "num_key_value_heads": 6}
    adapter_for(own | {key: None})
    with pytest.raises(CheckpointError, match=f"{key} is"):
        adapter_for(own | {key: [1, 0] if key == "no_rope_layers" else 0.8})


@in_one_test("kv_heads", [12, 4])
def test_a_v1_checkpoint_without_norm_weights_has_ones(tmp_path, kv_heads):
    config = BASE | {"model_type": "diff_v1", "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5}
    tensors = write_random(tmp_path / "weighted", config, torch.float32)
    old = {name: tensor for name, tensor in tensors.items() if not name.endswith("subln.weight")}
    ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items() if name not in old}
    ids = random_ids(2, 15) % BASE["vocab_size"]
    for name, held in (("old", old), ("ones", old | ones)):
        shutil.copytree(tmp_path / "weighted", tmp_path / name)
        save_file(held, tmp_path / name / "model.safetensors")
    logits = {name: load(tmp_path / name)(ids).logits for name in ("weighted", "old", "ones")}
    assert len(ones) == BASE["num_hidden_layers"]
    torch.testing.assert_close(logits["old"], logits["ones"], rtol=0, atol=1e-6)
    assert (logits["weighted"] - logits["ones"]).abs().max() > 1e-3
    quantize(tmp_path / "old", tmp_path / "low", Recipe.of(weights="8:row"))
    convert(tmp_path / "old", tmp_path / "diffllama", "diffllama", dtype=torch.float32)
    assert torch.isfinite(load(tmp_path / "low")(ids).logits).all()
    converted = DiffLlamaForCausalLM.from_pretrained(tmp_path / "diffllama")(ids).logits
    torch.testing.assert_close(converted, logits["old"], rtol=0, atol=1e-4)


def test_lambda_is_float32_in_a_bfloat16_model():
    for model_type in ("diff_v1", "diff_v2"):
        model, attention, _ = attention_and_weights({"model_type": model_type, "num_key_value_heads": 6}, layer=1)
        model.bfloat16()
        assert attention.compute_lam(torch.randn(1, 5, WIDTH, dtype=torch.bfloat16)).dtype == torch.float32
