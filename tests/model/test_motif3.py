"""Motif-3: the formulas in NumPy and float64, decoding step by step, and latents at low bits."""

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
from tests.support.tables import in_one_test

LAYERS, STREAMS, WINDOW = MOTIF3["num_hidden_layers"], MOTIF3["mhc_expansion_rate"], MOTIF3["sliding_window"] + 1
GROUPS, SIGNALS = MOTIF3["num_noise_heads"], 4
WIDTH, ROPE, VALUE, LATENT = (MOTIF3[key] for key in ("head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
# RMSNorms, λ and the gate of λ are computed in float32, whatever the model is in.
TOLERANCE = 1e-5


class Formulas:
    """The model as its tensors' names and shapes have it, a sequence and a token at a time, in NumPy and float64."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        # Magnitude of each layer's largest attention logit.
        self.largest = [0.0] * LAYERS

    def logits(self, ids: list[int]) -> np.ndarray:
        x = np.repeat(self.tensors["model.embed_tokens.weight"][ids][:, None], STREAMS, 1)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            x = self.part(x, at + "mhc_attn.", at + "input_layernorm", lambda h, at=at: self.attention(h, at))
            x = self.part(x, at + "mhc_ffn.", at + "post_attention_layernorm", lambda h, at=at: self.network(h, at))
        return self.norm(x.mean(1), "model.norm") @ self.tensors["lm_head.weight"].T

    def norm(self, x: np.ndarray, name: str, eps: float = 1e-5) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * self.tensors[name + ".weight"]

    def part(self, x, at, norm, compute):
        of = {name.removeprefix(at): tensor for name, tensor in self.tensors.items() if name.startswith(at)}
        u, mixed, writes = np.zeros_like(x[:, 0]), np.zeros_like(x), np.zeros(x.shape[:2])
        for t, streams in enumerate(x):
            n = self.norm(streams.reshape(-1), at + "rms_norm", 1e-6)
            pre = np.clip(of["alpha_pre"] * (of["proj_pre.weight"] @ n) + of["bias_pre"], -10, 10)
            post = np.clip(of["alpha_post"] * (of["proj_post.weight"] @ n) + of["bias_post"], -10, 10)
            res = of["alpha_res"] * (of["proj_res.weight"] @ n).reshape(STREAMS, STREAMS) + of["bias_res"]
            matrix = np.exp(np.clip(res, -20, 20))
            for _ in range(20):
                matrix /= np.maximum(matrix.sum(1, keepdims=True), 1e-8)
                matrix /= np.maximum(matrix.sum(0, keepdims=True), 1e-8)
            u[t] = sigmoid(pre) @ streams
            mixed[t], writes[t] = matrix @ streams, sigmoid(post)
        y = compute(self.norm(u, norm))
        return mixed + writes[:, :, None] * y[:, None]

    def attention(self, h: np.ndarray, at: str) -> np.ndarray:
        layer, at = int(at.split(".")[2]), at + "self_attn."
        of = {name.removeprefix(at).removesuffix(".weight"): x for name, x in self.tensors.items() if at in name}
        is_whole = layer % MOTIF3["sliding_window_period"] == 0
        scale = WIDTH**-0.5 * ((0.1 * math.log(8) + 1) ** 2 if is_whole else 1)
        latent_q = self.norm(h @ of["wq_a"].T, at + "q_norm")
        q = (latent_q @ of["wq_b"].T).reshape(len(h), -1, WIDTH)
        gate = sigmoid(latent_q @ of["wq_b_gate"].T).reshape(len(h), -1, VALUE)
        compressed = h @ of["wkv_a"].T
        latent, k_pe = self.norm(compressed[:, :LATENT], at + "kv_norm"), compressed[:, LATENT:]
        expanded = (latent @ of["wkv_b"].T).reshape(len(h), GROUPS, -1)
        k_nope, v = expanded[:, :, : WIDTH - ROPE], expanded[:, :, WIDTH - ROPE :]
        lam = sigmoid(h @ of["lambda_proj"].T)
        out = np.zeros((len(h), GROUPS * SIGNALS, VALUE))
        for t in range(len(h)):
            seen = range(0 if is_whole else max(0, t - WINDOW + 1), t + 1)
            for group in range(GROUPS):
                maps = []
                for head in range(5 * group, 5 * group + 5):
                    turned = turn(q[t, head, WIDTH - ROPE :], t, is_whole)
                    plain = q[t, head, : WIDTH - ROPE]
                    logits = [plain @ k_nope[s, group] + turned @ turn(k_pe[s], s, is_whole) for s in seen]
                    self.largest[layer] = max(self.largest[layer], np.abs(logits).max() * scale)
                    weights = np.exp(np.array(logits) * scale - max(logits) * scale)
                    maps.append(weights / weights.sum() @ v[list(seen), group])
                for j in range(SIGNALS):
                    signal = SIGNALS * group + j
                    out[t, signal] = (maps[j] - lam[t, signal] * maps[4]) * gate[t, signal]
        return out.reshape(len(h), -1) @ of["wo"].T

    def network(self, h: np.ndarray, at: str) -> np.ndarray:
        scale = {3: 0.75}.get(int(at.split(".")[2]), 0.5)
        if at + "mlp.gate_proj.weight" in self.tensors:
            return self.dense(h, at + "mlp.", scale)
        of = {name.removeprefix(at + "moe."): tensor for name, tensor in self.tensors.items() if at + "moe." in name}
        y = np.zeros_like(h)
        for t, x in enumerate(h):
            p = sigmoid(of["router.gate.weight"] @ x)
            chosen = np.argsort(-(p + of["expert_bias"]))[: MOTIF3["experts_top_k"]]
            for e in chosen:
                gate, up = np.split(of["experts.gate_up_proj"][e] @ x, 2)
                bias = np.clip(of["experts.act_fn.bias"][e], -0.125, 0.125)
                product = poly(gate, of["experts.act_fn.weight"][e], bias) * up
                y[t] += p[e] / p[chosen].sum() * 2.0 * (of["experts.down_proj"][e] @ (product * scale))
        return y + self.dense(h, at + "moe.shared_experts.", scale)

    def dense(self, h: np.ndarray, at: str, scale: float) -> np.ndarray:
        gate, up, down, weight = (
            self.tensors[at + n] for n in ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "act_fn.weight")
        )
        product = poly(h @ gate.T, weight, self.tensors[at + "act_fn.bias"]) * (h @ up.T)
        return product * scale @ down.T


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def poly(z: np.ndarray, raw: np.ndarray, bias: np.ndarray) -> np.ndarray:
    w = sigmoid(raw)
    normed = [y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) for y in (z**3, z**2, z)]
    return w[0] * normed[0] + w[1] * normed[1] + w[2] * normed[2] + bias


def turn(x: np.ndarray, position: int, is_whole: bool) -> np.ndarray:
    """First and second half turned against each other; θ is 100 under YaRN, and 5000 within windows."""
    half = ROPE // 2
    out = np.zeros_like(x)
    for j in range(half):
        f = (100.0 if is_whole else 5000.0) ** (-2 * j / ROPE)
        if is_whole:

            def channel(turns: float) -> float:
                return ROPE * math.log(4 / (2 * math.pi * turns)) / (2 * math.log(100.0))

            low, high = max(math.floor(channel(2)), 0), min(math.ceil(channel(0.01)), ROPE - 1)
            t = min(max((j - low) / (high - low), 0), 1)
            f = f * (1 - t) + f / 8 * t
        c, s = math.cos(position * f), math.sin(position * f)
        out[j], out[half + j] = x[j] * c - x[half + j] * s, x[half + j] * c + x[j] * s
    return out


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
