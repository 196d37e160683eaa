"""Motif's models: transformers' DiffLlama made into Motif-2.6B, the true names and shapes, and what is refused."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diffquant import Recipe, load, quantize
from diffquant.errors import CheckpointError
from diffquant.model.activations import poly_norm
from diffquant.model.adapters import adapter_for
from diffquant.quantization.inspection import inspect_checkpoint
from tests.support.checkpoints import SIZES, write_checkpoint
from tests.support.models import random_diffllama, random_ids
from tests.support.synthetic import preset
from tests.support.tables import in_one_test

WEIGHT, BIAS = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.125], dtype=torch.float64)

MOTIF_2_6B: dict[str, Any] = {"model_type": "Motif", "hidden_size": 2048, "intermediate_size": 8192}
MOTIF_2_6B |= {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 219520}
MOTIF_2_6B |= {"hidden_act": "poly_norm", "attn_rms_norm_eps": 1e-5, "tie_word_embeddings": True}
MOTIF_2_6B |= {"sliding_window": 4096, "use_sliding_window": False}
MOTIF_2_12_7B = preset("motif-2-12.7b")
LAYER_SHAPES = {f"self_attn.{name}_proj.weight": [2048, 2048] for name in "qkvo"}
LAYER_SHAPES |= {f"self_attn.lambda_{name}": [128] for name in ("q1", "k1", "q2", "k2")}
LAYER_SHAPES |= {f"mlp.{name}_proj.weight": [8192, 2048] for name in ("gate", "up")}
LAYER_SHAPES |= {"mlp.down_proj.weight": [2048, 8192], "mlp.act_fn.weight": [3], "mlp.act_fn.bias": [1]}
LAYER_SHAPES |= {f"{name}_layernorm.weight": [2048] for name in ("input", "post_attention")}
LAYER_SHAPES |= {"self_attn.subln.weight": [256]}


class NumpyPolyNorm(nn.Module):
    """PolyNorm as its paper writes it, in NumPy and float64."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.w, self.b = weight.double().numpy(), bias.double().numpy()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.detach().double().numpy()
        powers = (rows**exponent for exponent in (3, 2, 1))
        normed = [z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-6) for z in powers]
        return torch.from_numpy(sum(w * z for w, z in zip(self.w, normed, strict=True)) + self.b).to(x.dtype)


def side_by_side(rows: Tensor, heads: int) -> Tensor:
    """Rows whose heads i and i + heads/2 were a pair, with heads 2i and 2i + 1 a pair."""
    return rows.unflatten(0, (2, heads // 2, -1)).transpose(0, 1).flatten(0, 2)


@pytest.fixture(params=[{}, {"num_key_value_heads": 4}, {"num_attention_heads": 6, "num_key_value_heads": 2}])
def motif_and_oracle(request, tmp_path):
    """A tiny Motif-2.6B on disk, and the DiffLlama that computes the same."""
    heads_differ = {"head_dim": 12} if "num_attention_heads" in request.param else {}
    changes = request.param | {"rms_norm_eps": 1e-4, "hidden_size": 72 if heads_differ else 64} | heads_differ
    oracle = random_diffllama(**changes)
    config = oracle.config
    pairs, kv_heads = config.num_attention_heads // 2, config.num_key_value_heads
    tensors = {name: x.clone() for name, x in oracle.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    for i, layer in enumerate(oracle.model.layers):
        layer.self_attn.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (i - 1))
        prefix = f"model.layers.{i}."
        for name, heads in (("q", 2 * pairs), ("k", kv_heads), ("v", kv_heads)):
            weight = f"{prefix}self_attn.{name}_proj.weight"
            tensors[weight] = side_by_side(tensors[weight], heads)
        subln = 0.5 + torch.rand(2 * config.head_dim, generator=generator)
        tensors[f"{prefix}self_attn.subln.weight"] = subln
        layer.self_attn.o_proj.weight.data *= subln.repeat(pairs)
        weight, bias = torch.randn(3, generator=generator), torch.randn(1, generator=generator)
        tensors |= {f"{prefix}mlp.act_fn.weight": weight, f"{prefix}mlp.act_fn.bias": bias}
        layer.mlp.act_fn = NumpyPolyNorm(weight, bias)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sizes = {key: getattr(config, key) for key in (*SIZES, "rms_norm_eps", "head_dim")}
    stated = sizes | {"model_type": "motif", "hidden_act": "poly_norm", "attn_rms_norm_eps": 1e-4}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    return tmp_path, oracle


def test_logits_are_those_of_the_diffllama_it_was_made_of(motif_and_oracle):
    folder, oracle = motif_and_oracle
    ids = random_ids(2, 29)
    model = load(folder)
    torch.testing.assert_close(model(ids).logits, oracle(ids).logits, rtol=0, atol=1e-4)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids[:, :9], **settings), oracle.generate(ids[:, :9], **settings))


@in_one_test("dtype", [torch.float16, torch.bfloat16])
def test_poly_norm_of_half_types_survives_cubes_that_they_cannot_hold(dtype):
    x = torch.linspace(-3000, 3000, 97).to(dtype)
    y = poly_norm(x[None], WEIGHT.to(dtype), BIAS.to(dtype))
    wanted = NumpyPolyNorm(WEIGHT.to(dtype), BIAS.to(dtype))(x[None].double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=1e-3)


def test_its_tensors_are_the_514_of_the_published_index():
    shapes = adapter_for(MOTIF_2_6B).source_shapes()
    wanted = {f"model.layers.{i}.{name}": shape for i in range(32) for name, shape in LAYER_SHAPES.items()}
    wanted |= {"model.embed_tokens.weight": [219520, 2048], "model.norm.weight": [2048]}
    assert {name: list(shape) for name, shape in shapes.items()} == wanted
    assert len(wanted) == 514
    assert sum(math.prod(shape) for shape in shapes.values()) == 2_597_218_432


def test_the_grouped_models_tensors_are_the_643_of_12_7_b_parameters():
    shapes = adapter_for(MOTIF_2_12_7B).source_shapes()
    assert len(shapes) == 643
    assert sum(math.prod(shape) for shape in shapes.values()) == 12_703_860_896
    layer = {name: list(shapes[f"model.layers.39.self_attn.{name}_proj.weight"]) for name in "qkvo"}
    assert layer == {"q": [5120, 4096], "k": [2048, 4096], "v": [2048, 4096], "o": [4096, 8192]}


def test_quantizing_keeps_activation_lambda_and_norm_as_they_are(tmp_path):
    source = write_checkpoint(tmp_path / "motif", "motif", torch.bfloat16)
    quantize(source, tmp_path / "low", Recipe.of(weights="4:g32"))
    before, after = (load(folder, dtype=torch.float32).state_dict() for folder in (source, tmp_path / "low"))
    changed = {name.split(".")[-2] for name, x in before.items() if not torch.equal(x, after[name])}
    assert changed == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert inspect_checkpoint(tmp_path / "low").packed == 2 * 7


@in_one_test(
    ("changes", "message"),
    [
        ({"num_attention_heads": 15, "head_dim": 128, "hidden_size": 1920}, "num_attention_heads is 15"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        ({"num_key_value_heads": 12}, "6 KV pairs do not divide 8 query pairs"),
        ({"hidden_size": 2050}, "hidden_size 2050 is not a multiple"),
        ({"hidden_act": "poly_relu"}, "hidden_act is 'poly_relu', which is not supported; choose from .*poly_norm"),
        ({"fused_rope": True}, "fused_rope is True"),
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"k_ratio": 2}, "k_ratio is 2 without num_noise_heads"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling has type 'yarn'"),
        ({"use_sliding_window": True}, "sliding_window is 4096"),
        ({"attn_rms_norm_eps": "1e-5"}, "attn_rms_norm_eps is '1e-5'"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_naming_its_key(changes, message):
    with pytest.raises(CheckpointError, match=message):
        adapter_for(MOTIF_2_6B | changes)


@in_one_test(
    ("changes", "message"),
    [
        ({"num_noise_heads": 7}, "num_noise_heads 7 does not divide num_attention_heads 40"),
        ({"num_noise_heads": 40}, "num_noise_heads 40 does not divide num_attention_heads 40"),
        ({"num_noise_heads": True}, "num_noise_heads True does not divide"),
        ({"num_noise_heads": "8"}, "num_noise_heads '8' does not divide"),
        ({"num_key_value_heads": 15}, "num_key_value_heads 15 is not an even number"),
        ({"num_key_value_heads": 12}, "num_noise_heads 8 is not a multiple of half of num_key_value_heads 12"),
        ({"k_ratio": 4}, "k_ratio is 4; only one signal key"),
        ({"head_dim": None}, "head_dim is missing"),
    ],
)
def test_a_grouped_config_that_is_not_computed_is_refused_naming_its_key(changes, message):
    with pytest.raises(CheckpointError, match=message):
        adapter_for(MOTIF_2_12_7B | changes)
