"""examples/fold_dex.py against transformers' Llama with DEX's formula put in front of o_proj, in float64."""

import runpy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.docs.commands import ROOT
from tests.support.checkpoints import SIZES, write_llama

HEADS, LAYERS = 4, 2
DEX = "model.layers.{}.self_attn.dex."


def write_dex(folder, masked, shifted, **changes):
    """Write a random DEX checkpoint; returns the Llama that it was made of and DEX's parts, layer by layer."""
    write_llama(folder, torch.float64, num_hidden_layers=LAYERS, eos_token_id=None, **changes)
    llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    generator, width = torch.Generator().manual_seed(5), llama.config.head_dim
    layers = []
    for layer in range(LAYERS):
        random = {"dtype": torch.float64, "generator": generator}
        parts = {
            "proj.weight": torch.randn(width, width, **random) * 0.3,
            "lambda_learn": torch.tensor(0.4 + layer / 5),
        }
        if masked:
            parts["head_mask"] = torch.tensor([layer == 0, True, layer == 1, False])
        if shifted:
            parts["proj.bias"] = torch.randn(width, **random)
        layers.append(parts)
    named = {DEX.format(layer) + part: data for layer, parts in enumerate(layers) for part, data in parts.items()}
    save_file(load_file(folder / "model.safetensors") | named, folder / "model.safetensors")
    return llama, layers


def with_dex(llama, layers):
    """The formula of arXiv 2505.16333 in front of each o_proj: O_h − λ·(M·O_h + b) for the selected heads."""
    for block, parts in zip(llama.model.layers, layers, strict=True):

        def differential(_module, arguments, parts=parts):
            heads = arguments[0].unflatten(-1, (HEADS, -1)).clone()
            for h in range(HEADS):
                if parts.get("head_mask", torch.ones(HEADS))[h]:
                    mixed = heads[..., h, :] @ parts["proj.weight"].T + parts.get("proj.bias", 0)
                    heads[..., h, :] -= parts["lambda_learn"] * mixed
            return (heads.flatten(-2),)

        block.self_attn.o_proj.register_forward_pre_hook(differential)
    return llama


@pytest.mark.parametrize("masked", [True, False], ids=["half", "all"])
@pytest.mark.parametrize("shifted", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("attention_bias", [True, False], ids=["attention bias", "none"])
def test_the_folded_llama_computes_the_formula(tmp_path, masked, shifted, attention_bias):
    llama, layers = write_dex(tmp_path / "dex", masked, shifted, attention_bias=attention_bias)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 19), generator=torch.Generator().manual_seed(0))
    plain = llama(ids).logits
    expected = with_dex(llama, layers)(ids).logits
    assert (expected - plain).abs().max() > 1e-3
    runpy.run_path(str(ROOT / "examples/fold_dex.py"))["fold"](tmp_path / "dex", tmp_path / "folded")
    stock, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "folded", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(stock(ids).logits, expected, rtol=0, atol=1e-6)
