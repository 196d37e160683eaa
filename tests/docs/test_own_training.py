"""docs/models.md, "Your own training": its program and its table, on models as public repositories write theirs.

The models share no code with the package: names and heads are their own, λ_init is counted as they count, and
attention is torch's.
"""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from tests.docs.test_walkthroughs import blocks

PAGE = "docs/models.md"
WIDTH, INNER, PAIRS, D, WORDS = 128, 352, 4, 16, 300


class Norm(nn.Module):
    def __init__(self, width, eps=1e-5, has_weight=True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width)) if has_weight else None

    def forward(self, x):
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        return x if self.weight is None else x * self.weight


def turned(x, way):
    """RoPE of [B, T, heads, d], with neighbours as complex numbers, or backwards on halves as in modded-nanogpt."""
    if way is None:
        return x
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(0, D, 2) / D))[:, None]
    if way == "neighbours":
        numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * angles.cos() + x2 * angles.sin(), x2 * angles.cos() - x1 * angles.sin()], -1)


class Attention(nn.Module):
    def __init__(self, layer, version, kv_pairs, *, counted=lambda layer: 0.8 - 0.6 * math.exp(-0.3 * layer),
                 eps=1e-5, norm="weight", has_factor=True, values=2 * D, way="neighbours"):  # fmt: skip
        super().__init__()
        self.version, self.kv_pairs, self.way = version, kv_pairs, way
        self.values = values if version == 1 else D
        self.wq = nn.Linear(WIDTH, 2 * PAIRS * D, bias=False)
        self.wk = nn.Linear(WIDTH, (2 if version == 1 else 1) * kv_pairs * D, bias=False)
        self.wv = nn.Linear(WIDTH, kv_pairs * self.values, bias=False)
        self.wo = nn.Linear(PAIRS * self.values, WIDTH, bias=False)
        if version == 2:
            self.lambda_proj = nn.Linear(WIDTH, PAIRS, bias=False)
            return
        self.lambda_init = counted(layer)
        self.factor = 1 - self.lambda_init if has_factor else 1.0
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(0.3 * torch.randn(D)))
        self.subnorm = nn.Identity() if norm is None else Norm(self.values, eps, norm == "weight")
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, x):
        batch, length, _ = x.shape
        q = turned(self.wq(x).view(batch, length, 2 * PAIRS, D), self.way).transpose(1, 2)
        k = turned(self.wk(x).view(batch, length, -1, D), self.way).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.kv_pairs, self.values).transpose(1, 2)
        q1, q2 = q.chunk(2, 1)
        k1, k2 = k.chunk(2, 1) if self.version == 1 else (k, k)
        signal, noise = (
            scaled_dot_product_attention(*each, v, is_causal=True, enable_gqa=True) for each in ((q1, k1), (q2, k2))
        )
        if self.version == 2:
            y = signal - self.lambda_proj(x).sigmoid().transpose(1, 2).unsqueeze(-1) * noise
        else:
            lam = (self.lambda_q1 * self.lambda_k1).sum().exp() - (self.lambda_q2 * self.lambda_k2).sum().exp()
            y = self.subnorm(signal - (lam + self.lambda_init) * noise) * self.factor
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.ln_1, self.attn = Norm(WIDTH), Attention(*args, **kwargs)
        self.ln_2, self.mlp = Norm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class DiffGPT(nn.Module):
    """A decoder with a tied head."""

    def __init__(self, version, kv_pairs, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(layer, version, kv_pairs, **kwargs) for layer in range(3))
        self.ln_f = Norm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, x in self.named_parameters():
            if name.endswith(("wq.weight", "wk.weight")):
                # Maps that are far from even.
                x.data *= 3

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@pytest.fixture
def difference_of(tmp_path, monkeypatch):
    """Runs the page's program on a model, with replacements in its text: what it finds, over the largest logit."""
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(PAGE, "python")

    def run(model, replaced=(), **variables):
        monkeypatch.setitem(sys.modules, "training", SimpleNamespace(model=model.eval()))
        text = program
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        exec(text, variables)
        return float(variables["difference"] / model(variables["ids"]).abs().max())

    return run


def test_the_program_finds_the_logits_of_a_v1(difference_of):
    assert difference_of(DiffGPT(1, 2)) < 1e-5


def test_with_the_words_for_v2_it_finds_those_of_a_v2(difference_of):
    (program,) = blocks(PAGE, "python")
    line = next(line for line in program.splitlines() if line.startswith("MODEL_TYPE"))
    v1, v2 = line.partition(" = ")[2].split("  # V2: ")
    assert difference_of(DiffGPT(2, 4), [(v1, v2)]) < 1e-5


def test_it_shows_heads_in_the_wrong_order(difference_of):
    assert difference_of(DiffGPT(1, 2), [('("q_proj", "k_proj")', "()")]) > 0.1


VARIANTS = {
    "layers from 1": ({"counted": lambda layer: 0.8 - 0.6 * math.exp(-0.3 * (layer + 1))}, {"lam_init_offset": 1}),
    "one λ_init": ({"counted": lambda _: 0.8}, {"lam_init_offset": 1000}),
    "epsilon": ({"eps": 0.1}, {"post_norm_eps": 0.1}),
    "norm without weight": ({"norm": "plain"}, {"post_norm": "plain"}),
    "no norm": ({"norm": None, "has_factor": False}, {"post_norm": "none", "scale_by_init": False}),
    "no factor": ({"has_factor": False}, {"scale_by_init": False}),
    "narrow values": ({"values": D}, {"value_dim": D}),
    "no positions": ({"way": None}, {"rope": "none"}),
    "turned backwards": ({"way": "backwards"}, {"rope": "half"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_spec_says_how_a_model_differs(variant, difference_of):
    trained, written = VARIANTS[variant]
    (spec,) = blocks(PAGE, "json")

    def swapped(name, x):
        is_turned = variant == "turned backwards" and name.endswith(("q_proj.weight", "k_proj.weight"))
        return x.unflatten(0, (-1, 2, D // 2)).flip(1).flatten(0, 2) if is_turned else x

    replaced = [
        ('"out_proj"', '"o_proj"'),
        ('"model_type": MODEL_TYPE', '"model_type": "diff_transformer", "spec": spec'),
        ("    tensors[name] = x", "    tensors[name] = swapped(name, x)"),
    ]
    spec = json.loads(spec) | written
    assert difference_of(DiffGPT(1, 2, **trained), replaced, spec=spec, swapped=swapped) < 1e-5


def test_the_spec_on_the_page_is_what_diff_v1_has():
    from diffquant.family.spec import read_spec
    from diffquant.model.adapters import adapter_for

    (spec,) = blocks(PAGE, "json")
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    assert read_spec(json.loads(spec)) == adapter_for({"model_type": "diff_v1"} | sizes | heads).architecture.diff_spec
