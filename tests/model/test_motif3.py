"""Motif-3: its formulas, decoding step by step, and latents at low bits."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diffquant import Recipe, load
from diffquant.calib.outlier_result import LOGITS
from diffquant.calib.outliers import measure_magnitudes
from diffquant.errors import UsageError
from diffquant.measure.sweep.subject import kv_bytes_per_token
from diffquant.model.motif3.architecture import plain_frequencies, yarn_factor, yarn_frequencies
from diffquant.model.motif3.attention import LatentAttention
from tests.support.checkpoints import MOTIF3, write_random
from tests.support.motif3 import LATENT, ROPE, WINDOW, Formulas
from tests.support.tables import in_one_test

# RMSNorms, λ and the gate of λ are computed in float32, whatever the model is in.
TOLERANCE = 1e-5


def random_ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, MOTIF3["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("motif3") / "model"
    return folder, write_random(folder, MOTIF3, torch.float64)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint[0])


def test_logits_are_those_of_the_formulas(checkpoint, model):
    ids = random_ids(2, 11)
    wanted = np.stack([Formulas(checkpoint[1]).logits(row) for row in ids.tolist()])
    np.testing.assert_allclose(model(ids).logits.numpy(), wanted, rtol=0, atol=TOLERANCE)


def test_both_forms_of_the_latent_compute_the_same(checkpoint, monkeypatch):
    """What a step reads in the latent's space is what keys and values of each head give, rotated latents too."""
    ids, taken = random_ids(2, 19), []
    absorbed = LatentAttention._attend_absorbed
    monkeypatch.setattr(LatentAttention, "_attend_absorbed", lambda *given: taken.append(given[1]) or absorbed(*given))
    for recipe in (Recipe(), Recipe.of(kv="8:row:rotated", residual=100)):
        model, logits = load(checkpoint[0], recipe), []
        for absorbs in (False, True):
            monkeypatch.setattr(LatentAttention, "_absorbs", lambda *_, absorbs=absorbs: absorbs)
            cache = model.new_cache()
            logits += [torch.cat([model(part, past_key_values=cache).logits for part in ids.split([14, 5], 1)], 1)]
            assert bool(taken) == absorbs
        taken.clear()
        torch.testing.assert_close(*logits, rtol=0, atol=1e-11)


def test_a_step_reads_many_tokens_in_the_latents_space(model):
    attention = model.attention_modules[0]
    assert attention._absorbs(1, 500)
    assert not attention._absorbs(500, 501)
    # Passes over the layers without a past see each matrix run, and what is rounded is of one form.
    assert not attention._absorbs(1, 1)
    attention.logits = Recipe.of(logits="8").logits
    assert not attention._absorbs(1, 500)
    attention.logits = Recipe().logits


@in_one_test("cache", ["another's", "4-D mask"])
def test_what_windows_of_latents_cannot_honour_is_refused(model, cache):
    ids = random_ids(1, 5)
    given = (
        {"past_key_values": DynamicCache()}
        if cache == "another's"
        else {"attention_mask": torch.ones(1, 1, 5, 5).bool()}
    )
    with pytest.raises(UsageError, match=r"DynamicCache cannot store|neither a 4-D attention_mask"):
        model(ids, **given)


def test_largest_logits_are_those_of_the_formulas(checkpoint, model):
    ids = random_ids(1, 11)
    formulas = Formulas(checkpoint[1])
    formulas.logits(ids[0].tolist())
    layers, _ = measure_magnitudes(model, ids)
    assert [layer[LOGITS].top[1] for layer in layers] == pytest.approx(formulas.largest, rel=1e-5)


def test_a_half_type_leaves_gates_of_streams_router_and_activations_in_float32(checkpoint):
    state = load(checkpoint[0], dtype=torch.bfloat16).state_dict()
    wide = {name for name, x in state.items() if x.dtype == torch.float32}
    assert wide == {n for n in state if any(part in n for part in ("mhc_", "router", "expert_bias", "act_fn"))}


def test_a_cache_costs_a_latent_of_each_token_and_a_window_of_them_in_most_layers(checkpoint):
    whole, windowed = 3, 2
    layers = whole + windowed * (WINDOW - 1) / 1024
    values = ROPE + LATENT
    assert kv_bytes_per_token(load(checkpoint[0])) == pytest.approx(2 * values * layers)
    # Codes, and a scale of 16 bits for the latent and one for the channels that turn.
    for bits in (8, 4):
        quantized = load(checkpoint[0], Recipe.of(kv=f"{bits}:row:rotated"))
        words = sum(4 * math.ceil(width * bits / 32) for width in (ROPE, LATENT))
        assert kv_bytes_per_token(quantized) == pytest.approx((words + 2 * 2) * layers)


def test_rotating_a_latent_before_it_is_rounded_loses_less_where_a_channel_sticks_out(checkpoint):
    model, ids = load(checkpoint[0]), random_ids(4, 40)
    attention = model.attention_modules[0]
    attention.kv_norm.weight.data[3] *= 12
    attention.wkv_b.weight.data[:, 3] /= 12
    errors, exact = {}, None
    for scheme in ("16", "4:row", "4:row:rotated"):
        model.apply_recipe(Recipe.of(v=scheme))
        walk = model.new_layer_runner(40)
        y = walk.run_layer(walk.layers[0], walk.embed(ids))
        exact = y if exact is None else exact
        errors[scheme] = float((y - exact).norm())
    assert 0 < errors["4:row:rotated"] < 0.8 * errors["4:row"]


def test_yarn_is_transformers_and_the_released_models_numbers():
    settings = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    ours = yarn_frequencies(64, 10000.0, settings)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, **settings}
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=262144, rope_parameters=rope)
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=2e-6)
    assert yarn_factor(64, 1.0) == pytest.approx(factor)
    known = {0: 1.0, 10: 0.05623413252, 15: 0.008286425246, 22: 1.6243898457e-4, 31: 2.0836277238e-6}
    assert [ours[j] for j in known] == pytest.approx(list(known.values()), rel=1e-9)
    assert plain_frequencies(64, 10000.0)[10] == pytest.approx(known[10])
