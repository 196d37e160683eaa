"""examples/vision_pairs.py on random weights of the public models' names: against torch, transformers and formulas."""

import math
import runpy
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import ViTConfig, ViTModel

from diffquant.errors import CheckpointError
from diffquant.recipe.scheme import Scheme
from tests.support.tables import in_one_test

EXAMPLE = Path(__file__).parents[2] / "examples/vision_pairs.py"
EXACT = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def randomized(state):
    generator = torch.Generator().manual_seed(1)
    return {name: each + 0.1 * torch.randn(each.shape, generator=generator) for name, each in state.items()}


def images(side):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))


class Classic(nn.Module):
    """A classifier of torch's own layers, with the names of classic-10M."""

    def __init__(self):
        super().__init__()
        self.cls_token, self.pos_embedding = nn.Parameter(torch.zeros(1, 1, 48)), nn.Parameter(torch.zeros(1, 65, 48))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, 48, 8, 8)
        self.transformer = nn.ModuleList(
            nn.TransformerEncoderLayer(48, 8, 96, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x):
        x = self.patch_embed.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embedding
        for layer in self.transformer:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def of_the_checkpoint(name):
    for theirs, ours in (("self_attn", "attn"), ("linear1", "mlp.0"), ("linear2", "mlp.3")):
        name = name.replace(theirs, ours)
    return name


def test_a_classic_classifier_is_torchs_own_encoder(example):
    oracle = Classic().eval()
    oracle.load_state_dict(randomized(oracle.state_dict()))
    model = example["Vision"]({of_the_checkpoint(name): each for name, each in oracle.state_dict().items()})
    assert not model.is_diff
    with torch.inference_mode():
        torch.testing.assert_close(model.answers(images(64)), oracle(images(64)), **EXACT)


def test_a_clips_baseline_is_transformers_vit(example):
    config = ViTConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=12, intermediate_size=192, layer_norm_eps=1e-6
    )
    oracle = ViTModel(config, add_pooling_layer=False).eval()
    oracle.load_state_dict(randomized(oracle.state_dict()))
    state, tensors = oracle.state_dict(), {}
    names = {"embeddings.cls_token": "cls_token", "embeddings.position_embeddings": "pos_embed"}
    names |= {f"embeddings.patch_embeddings.projection.{p}": f"patch_embed.proj.{p}" for p in ("weight", "bias")}
    names |= {f"layernorm.{part}": f"norm.{part}" for part in ("weight", "bias")}
    tensors |= {ours: state[theirs] for theirs, ours in names.items()}
    layers = oracle.get_submodule("layers" if hasattr(oracle, "layers") else "encoder.layer")
    for number, layer in enumerate(layers):
        parts = {name: each for name, each in layer.named_modules() if isinstance(each, nn.Linear | nn.LayerNorm)}
        linears = [each for each in parts.values() if isinstance(each, nn.Linear)]
        norms = [each for each in parts.values() if isinstance(each, nn.LayerNorm)]
        q, k, v, out, up, down = linears
        named = {"norm1": norms[0], "norm2": norms[1], "attn.proj": out, "mlp.fc1": up, "mlp.fc2": down}
        for ours, module in named.items():
            tensors |= {f"blocks.{number}.{ours}.{name}": each for name, each in module.state_dict().items()}
        for part in ("weight", "bias"):
            tensors[f"blocks.{number}.attn.qkv.{part}"] = torch.cat([getattr(x, part) for x in (q, k, v)])
    model = example["Vision"]({f"module.visual.{name}": each.detach() for name, each in tensors.items()})
    with torch.inference_mode():
        expected = oracle(images(224)).last_hidden_state[:, 0]
    expected = expected / expected.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(model.answers(images(224)), expected, **EXACT)


def differential(width=8, pairs=2, layers=2, clip=False):
    """Random tensors of a differential model, with either project's names."""
    wide, side = 2 * width * pairs, 224 if clip else 64
    patch = 16 if clip else 8
    shapes = {"cls_token": (1, 1, wide), "pos_embed" if clip else "pos_embedding": (1, (side // patch) ** 2 + 1, wide)}
    shapes |= {"patch_embed.proj.weight": (wide, 3, patch, patch), "patch_embed.proj.bias": (wide,)}
    norm = ("weight", "bias") if clip else ("weight",)
    shapes |= {f"norm.{part}": (wide,) for part in norm}
    if not clip:
        shapes |= {"head.weight": (10, wide), "head.bias": (10,)}
    for layer in range(layers):
        at = f"{'blocks' if clip else 'layers'}.{layer}"
        shapes |= {f"{at}.norm{n}.{part}": (wide,) for n in (1, 2) for part in norm}
        for name, rows, columns in (("fc1" if clip else "0", 2 * wide, wide), ("fc2" if clip else "3", wide, 2 * wide)):
            shapes |= {f"{at}.mlp.{name}.weight": (rows, columns), f"{at}.mlp.{name}.bias": (rows,)}
        for name in ("q", "k", "v", "out"):
            shapes[f"{at}.attn.{name}_proj.weight"] = (wide, wide)
            if clip:
                shapes[f"{at}.attn.{name}_proj.bias"] = (wide,)
        shapes |= {f"{at}.attn.lambda_{name}": (width,) for name in ("q1", "k1", "q2", "k2")}
        shapes[f"{at}.attn.{'diff_norm' if clip else 'subln'}.weight"] = (2 * width,)
    generator = torch.Generator().manual_seed(3)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def by_formula(t, x, clip):
    """Both projects' differential models, pair by pair in float64."""
    t = {name: each.double() for name, each in t.items()}
    patch = t["patch_embed.proj.weight"].shape[-1]
    blocks = x.double().unfold(2, patch, patch).unfold(3, patch, patch)
    x = (
        torch.einsum("bchwij,dcij->bhwd", blocks, t["patch_embed.proj.weight"]).flatten(1, 2)
        + t["patch_embed.proj.bias"]
    )
    x = torch.cat([t["cls_token"].expand(len(x), -1, -1), x], 1) + t["pos_embed" if clip else "pos_embedding"]

    def norm(x, name):
        if clip:
            centred = x - x.mean(-1, keepdim=True)
            scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * t[f"{name}.weight"]

    def product(x, name):
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros(1))

    for layer in range(2):
        at = f"{'blocks' if clip else 'layers'}.{layer}"
        seen = norm(x, f"{at}.norm1")
        q, k, v = (product(seen, f"{at}.attn.{name}_proj") for name in "qkv")
        init = 0.8 if clip else 0.8 - 0.6 * math.exp(-0.3 * layer)
        vectors = [t[f"{at}.attn.lambda_{name}"] for name in ("q1", "k1", "q2", "k2")]
        lam = torch.exp(vectors[0] @ vectors[1]) - torch.exp(vectors[2] @ vectors[3]) + init
        width, heads = len(vectors[0]), []
        for pair in range(q.shape[-1] // (2 * width)):
            first, second = (slice(width * h, width * (h + 1)) for h in (2 * pair, 2 * pair + 1))
            maps = [(q[..., s] @ k[..., s].mT / math.sqrt(width)).softmax(-1) for s in (first, second)]
            head = (maps[0] - lam * maps[1]) @ v[..., 2 * width * pair : 2 * width * (pair + 1)]
            head = head / (head.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            heads.append(head * t[f"{at}.attn.{'diff_norm' if clip else 'subln'}.weight"] * (1 - init))
        x = x + product(torch.cat(heads, -1), f"{at}.attn.out_proj")
        up, down = ("fc1", "fc2") if clip else ("0", "3")
        inner = product(norm(x, f"{at}.norm2"), f"{at}.mlp.{up}")
        x = x + product(inner * (1 + torch.erf(inner / math.sqrt(2))) / 2, f"{at}.mlp.{down}")
    x = norm(x[:, 0], "norm")
    return x / x.norm(dim=-1, keepdim=True) if clip else product(x, "head")


@in_one_test("clip", [False, True])
def test_a_differential_model_is_what_its_formulas_say(example, clip):
    tensors = differential(clip=clip)
    model = example["Vision"](tensors)
    assert model.is_diff
    side = 224 if clip else 64
    torch.testing.assert_close(model.answers(images(side)).double(), by_formula(tensors, images(side), clip), **EXACT)


def test_fewer_bits_move_the_answers_further(example):
    # Larger logits, whose rounding shows above float32's own.
    tensors = {name: each * (8 if "q_proj" in name else 1) for name, each in differential().items()}
    model = example["Vision"](tensors)
    full = model.answers(images(64))
    distances = []
    for bits in (8, 6, 4, 3):
        model.logits = Scheme.parse(f"{bits}:tensor")
        distances.append(example["distance"](model, full, model.answers(images(64))))
    assert 0 < distances[0] < distances[1] < distances[2] < distances[3]


def test_a_pair_is_compared_by_one_command(example, tmp_path, monkeypatch, capsys):
    for name in ("differential", "other"):
        (tmp_path / name).mkdir()
        save_file(differential(), tmp_path / name / "model.safetensors")
    files = [str(tmp_path / name / "model.safetensors") for name in ("differential", "other")]
    monkeypatch.setattr(sys, "argv", ["vision_pairs.py", *files, "--count", "2"])
    example["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["logits", "at", "differential", "other"]
    # Both are the same weights.
    assert all(line.split()[-1] == line.split()[-2] for line in lines[1:-1])
    assert {line.split()[0] for line in lines[3:-1]} == set(example["SCHEMES"])


def test_a_checkpoint_of_a_trainer_holds_its_command_line_too(example, tmp_path):
    """As SLIP's main.py writes checkpoint_best.pt, whose names DiffCLIP's files have."""
    tensors = differential()
    stored = {"state_dict": {f"module.{name}": each for name, each in tensors.items()}, "args": Namespace(lr=1e-3)}
    torch.save(stored, tmp_path / "checkpoint_best.pt")
    model = example["read_model"](tmp_path / "checkpoint_best.pt")
    assert {name: each.shape for name, each in model.tensors.items()} == {name: t.shape for name, t in tensors.items()}


def test_other_weights_are_refused(example):
    with pytest.raises(CheckpointError, match=r"no patch_embed\.proj\.weight"):
        example["Vision"]({"model.embed_tokens.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"patches 4 pixels wide; choose from 8 or 16"):
        example["Vision"](differential() | {"patch_embed.proj.weight": torch.zeros(2, 3, 4, 4)})
