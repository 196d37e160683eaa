"""Motif-3 as its formulas have it, in NumPy and float64; nothing of diffquant computes here."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from tests.support.checkpoints import MOTIF3

LAYERS, STREAMS, WINDOW = MOTIF3["num_hidden_layers"], MOTIF3["mhc_expansion_rate"], MOTIF3["sliding_window"] + 1
GROUPS, SIGNALS = MOTIF3["num_noise_heads"], 4
WIDTH, ROPE, VALUE, LATENT = (
    int(MOTIF3[key]) for key in ("head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
)
# NumPy returns no types here that mypy knows.
Array = Any


class Formulas:
    """The model as its tensors' names and shapes have it, a sequence and a token at a time, in NumPy and float64."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        # Magnitude of each layer's largest attention logit.
        self.largest = [0.0] * LAYERS

    def logits(self, ids: list[int]) -> Array:
        x = np.repeat(self.tensors["model.embed_tokens.weight"][ids][:, None], STREAMS, 1)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            x = self.part(x, at + "mhc_attn.", at + "input_layernorm", partial(self.attention, at=at))
            x = self.part(x, at + "mhc_ffn.", at + "post_attention_layernorm", partial(self.network, at=at))
        return self.norm(x.mean(1), "model.norm") @ self.tensors["lm_head.weight"].T

    def norm(self, x: Array, name: str, eps: float = 1e-5) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * self.tensors[name + ".weight"]

    def part(self, x: Array, at: str, norm: str, compute: Callable[[Array], Array]) -> Array:
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

    def attention(self, h: Array, at: str) -> Array:
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

    def network(self, h: Array, at: str) -> Array:
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

    def dense(self, h: Array, at: str, scale: float) -> Array:
        gate, up, down, weight = (
            self.tensors[at + n] for n in ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "act_fn.weight")
        )
        product = poly(h @ gate.T, weight, self.tensors[at + "act_fn.bias"]) * (h @ up.T)
        return product * scale @ down.T


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def poly(z: Array, raw: Array, bias: Array) -> Array:
    w = sigmoid(raw)
    normed = [y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) for y in (z**3, z**2, z)]
    return w[0] * normed[0] + w[1] * normed[1] + w[2] * normed[2] + bias


def turn(x: Array, position: int, is_whole: bool) -> Array:
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
