"""Motif-2-12.7B's attention at tiny sizes, against a literal formula in float64 and with noise heads repeated."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffquant import Recipe, load, quantize
from diffquant.calib.outlier_result import LOGITS
from diffquant.calib.outliers import measure_magnitudes
from diffquant.quantization.inspection import inspect_checkpoint
from tests.support.attention_weights import attention_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids
from tests.support.recorded_calls import record_calls
from tests.support.tables import in_one_test

# As `write_checkpoint("motif-grouped")` has them: 8 signal heads, 2 noise heads, 2 KV pairs.
SIGNALS, NOISES, WIDTH = 8, 2, 12


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("grouped") / "model", "motif-grouped")


@pytest.fixture(scope="module")
def expanded(grouped, tmp_path_factory):
    """The same function as a Motif of ordinary pairs: pair p has source heads 5·(p // 4) + p % 4 and 5·(p // 4) + 4."""
    folder = tmp_path_factory.mktemp("expanded")
    heads = [head for p in range(SIGNALS) for head in (5 * (p // 4) + p % 4, 5 * (p // 4) + 4)]
    rows = torch.tensor([head * WIDTH + i for head in heads for i in range(WIDTH)])
    tensors = load_file(grouped / "model.safetensors")
    repeated = {name: x[rows] if "q_proj" in name else x for name, x in tensors.items()}
    save_file(repeated, folder / "model.safetensors")
    config = json.loads((grouped / "config.json").read_text())
    del config["num_noise_heads"]
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2 * SIGNALS}))
    return folder


def literal_attention(x, weights, layer):
    """One layer's attention of [T, D], head by head as the model's authors lay them out."""
    q, k, v = ((x @ weights[f"{name}_proj.weight"].T).view(len(x), -1, WIDTH) for name in "qkv")
    angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = angles.double().cos(), angles.double().sin()

    def turned(head):
        real, imaginary = head[:, : WIDTH // 2], head[:, WIDTH // 2 :]
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], 1)

    hidden = torch.ones(len(x), len(x)).triu(1).bool()

    def attention_map(query, key):
        return (turned(query) @ turned(key).T / math.sqrt(WIDTH)).masked_fill(hidden, -torch.inf).softmax(1)

    lam_init = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
    first, second = (weights[f"lambda_q{i}"] @ weights[f"lambda_k{i}"] for i in (1, 2))
    lam = first.exp() - second.exp() + lam_init
    outputs = []
    for s in range(SIGNALS):
        group = s // 4
        value = torch.cat([v[:, 2 * group], v[:, 2 * group + 1]], 1)
        a1 = attention_map(q[:, 5 * group + s % 4], k[:, 2 * group])
        a2 = attention_map(q[:, 5 * group + 4], k[:, 2 * group + 1])
        y = a1 @ value - lam * (a2 @ value)
        normed = y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() * weights["subln.weight"]
        outputs.append(normed * (1 - lam_init))
    return torch.cat(outputs, 1) @ weights["o_proj.weight"].T


@in_one_test("layer", [0, 1])
def test_a_layer_computes_the_authors_formula(grouped, layer):
    model = load(grouped, dtype=torch.float64)
    walk = model.new_layer_runner(17)
    weights = {name: x.double() for name, x in walk.layers[layer].self_attn.named_parameters()}
    x = torch.randn(1, 17, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(layer))
    got = walk.layers[layer].self_attn(x, *walk.layer_arguments(walk.layers[layer]))[0]
    # λ and the rotary tables are float32.
    torch.testing.assert_close(got, literal_attention(x[0], weights, layer), rtol=0, atol=1e-5)


RECIPES = {
    "16": {},
    "weights": {"weights": "4:g32"},
    "cache": {"kv": "4:row"},
    "residual": {"k": "6:c4", "v": "6:row", "residual": 3},
    "logits": {"logits": "4:row"},
    "logits-pair": {"logits": "5:pair"},
    "logits-tensor": {"logits": "6:tensor:shift"},
}


@in_one_test("name", RECIPES)
def test_it_computes_what_pairs_with_repeated_noise_heads_do(grouped, expanded, name):
    recipe, ids = Recipe.of(**RECIPES[name]), random_ids(2, 23)
    ours, theirs = (load(folder, recipe, torch.float64) for folder in (grouped, expanded))
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-9)


@in_one_test("name", ["16", "residual"])
def test_cached_decoding_and_beams_are_those_of_the_repeated_model(grouped, expanded, name):
    recipe, ids = Recipe.of(**RECIPES[name]), random_ids(2, 9)
    settings = {"max_new_tokens": 10, "do_sample": False, "num_beams": 2, "pad_token_id": 0, "eos_token_id": None}
    ours, theirs = (load(folder, recipe, torch.float64) for folder in (grouped, expanded))
    assert torch.equal(ours.generate(ids, **settings), theirs.generate(ids, **settings))


def test_sizes_and_codes_are_those_of_the_sources_rows(grouped, expanded, tmp_path):
    for folder, heads in ((grouped, SIGNALS + NOISES), (expanded, 2 * SIGNALS)):
        quantize(folder, tmp_path / str(heads), Recipe.of(weights="4:g32"))
        packed = load_file(tmp_path / str(heads) / "model.safetensors")["model.layers.0.self_attn.q_proj.weight_packed"]
        assert packed.shape[0] == heads * WIDTH
    ids = random_ids(1, 11)
    low, repeated = (load(tmp_path / str(heads), dtype=torch.float64)(ids).logits for heads in (10, 16))
    torch.testing.assert_close(low, repeated, rtol=0, atol=1e-9)
    assert "8 pairs (4 to a noise head) over 2 KV pairs" in str(inspect_checkpoint(grouped))


def test_outliers_count_a_shared_noise_map_once(grouped, expanded):
    ids = random_ids(2, 19)
    ours, theirs = (measure_magnitudes(load(folder), ids)[1][LOGITS] for folder in (grouped, expanded))
    assert (ours.count, theirs.count) == (2 * 2 * 10 * 190, 2 * 2 * 16 * 190)
    assert ours.top[1] == pytest.approx(theirs.top[1], rel=1e-6)


@in_one_test("text", ["16", "4:row", "4:pair", "4:tensor", "5:head:alike"])
def test_the_last_positions_maps_are_those_of_the_repeated_model(grouped, expanded, text):
    both = []
    for folder in (grouped, expanded):
        walk = load(folder, Recipe.of(logits=text), torch.float64).new_layer_runner(13)
        with record_calls(walk.layers[1].self_attn) as calls:
            walk.run_layer(walk.layers[1], walk.embed(random_ids(1, 13)))
        both.append(attention_weights(calls[0], 12))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_saved_model_is_grouped_still(grouped, tmp_path):
    model = load(grouped, dtype=torch.float64)
    model.save_pretrained(tmp_path / "native")
    again = load(tmp_path / "native", Recipe(), torch.float64)
    assert again.config.diff_spec.signals_per_noise == 4
    ids = random_ids(1, 7)
    # Not to the last bit: a BLAS may compute otherwise where weights begin elsewhere in memory.
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-12)
