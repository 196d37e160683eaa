"""DEX checkpoints against transformers' Llama with DEX's formula put literally behind its attention, in float64."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffquant.conversion import convert
from diffquant.errors import CheckpointError, UsageError
from diffquant.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.source.source import open_source
from tests.support.checkpoints import SIZES, edit_json, write_llama

HEADS = 4
STEPS = 100
DEX = "model.layers.{}.self_attn.dex."


def write_dex(folder, part="proj.weight", half=True, bias=False, dtype=torch.float64, **changes):
    """A random DEX checkpoint, and the Llama that it was made of, in transformers, without DEX."""
    write_llama(folder, dtype, num_hidden_layers=2, eos_token_id=None, **changes)
    llama = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    width = llama.config.head_dim
    for layer in range(2):
        name = DEX.format(layer)
        tensors[name + part] = torch.randn(width, width, generator=generator, dtype=torch.float64).to(dtype) * 0.3
        tensors[name + "lambda_learn"] = torch.tensor(0.4 + 0.2 * layer, dtype=dtype)
        tensors[name + "step"] = torch.tensor(STEPS)
        if half:
            tensors[name + "head_mask"] = torch.tensor([layer == 0, True, layer == 1, False])
        if bias:
            tensors[name + part.replace("weight", "bias")] = torch.randn(width, generator=generator).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", model_type="dex_llama", dex_steps=STEPS)
    return llama, tensors


def put_dex(llama, tensors):
    """The formula of arXiv 2505.16333 in front of each o_proj: O_h − λ·W_D(O_h) for the selected heads."""
    for layer, block in enumerate(llama.model.layers):
        parts = {
            name.removeprefix(DEX.format(layer)): data for name, data in tensors.items() if DEX.format(layer) in name
        }

        def differential(_module, arguments, parts=parts):
            heads = arguments[0].unflatten(-1, (HEADS, -1)).clone()
            for h in range(HEADS):
                if parts.get("head_mask", torch.ones(HEADS))[h]:
                    out = heads[..., h, :]
                    mixed = out @ parts["proj.weight"].T if "proj.weight" in parts else out @ parts["weight"]
                    mixed = mixed + parts.get("proj.bias", parts.get("bias", 0))
                    heads[..., h, :] = out - parts["lambda_learn"] * mixed
            return (heads.flatten(-2),)

        block.self_attn.o_proj.register_forward_pre_hook(differential)
    return llama


def ids():
    return torch.randint(0, SIZES["vocab_size"], (2, 19), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("part", ["proj.weight", "weight"])
@pytest.mark.parametrize("half", [True, False], ids=["half", "all"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("attention_bias", [True, False], ids=["attention bias", "none"])
def test_logits_are_those_of_the_formula(tmp_path, part, half, bias, attention_bias):
    llama, tensors = write_dex(tmp_path / "dex", part, half, bias, attention_bias=attention_bias)
    plain = llama(ids()).logits
    expected = put_dex(llama, tensors)(ids()).logits
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(load(tmp_path / "dex")(ids()).logits, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_convert_writes_a_llama_that_stock_transformers_runs(tmp_path, bias):
    llama, tensors = write_dex(tmp_path / "dex", bias=bias)
    report = convert(tmp_path / "dex", tmp_path / "llama", "llama")
    assert (report.source_type, report.target_type) == ("dex_llama", "llama")
    stock, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "llama", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = put_dex(llama, tensors)(ids()).logits
    torch.testing.assert_close(stock(ids()).logits, expected, rtol=0, atol=1e-6)
    assert "dex_steps" not in json.loads((tmp_path / "llama/config.json").read_text())


def test_the_fold_is_rounded_once_and_the_rounding_is_measured(tmp_path):
    _, tensors = write_dex(tmp_path / "dex", dtype=torch.bfloat16)
    report = convert(tmp_path / "dex", tmp_path / "llama", "llama")
    written = load_file(tmp_path / "llama/model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    weight, mixing = (
        tensors[f"model.layers.0.self_attn.{name}"].double() for name in ("o_proj.weight", "dex.proj.weight")
    )
    width = mixing.shape[0]
    for h, selected in enumerate((1, 1, 0, 0)):
        block = slice(h * width, (h + 1) * width)
        folded = weight[:, block] @ (
            torch.eye(width) - selected * float(tensors[DEX.format(0) + "lambda_learn"]) * mixing
        )
        torch.testing.assert_close(written[:, block], folded.bfloat16(), rtol=2**-7, atol=1e-7)
    assert 1e-4 < report.rounding_error < 2**-8
    assert "the same function but for weights rounded to bfloat16" in report.summary()


def test_quantized_it_is_the_folded_llama_quantized(tmp_path):
    write_dex(tmp_path / "dex", bias=True, dtype=torch.float32)
    convert(tmp_path / "dex", tmp_path / "llama", "llama")
    for name in ("dex", "llama"):
        quantize(tmp_path / name, tmp_path / f"low-{name}", Recipe.of(weights="4:row"))
    low = [load(tmp_path / f"low-{name}")(ids()).logits for name in ("dex", "llama")]
    assert torch.equal(*low)
    assert open_source(tmp_path / "low-dex").model_type == "llama"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"step": torch.tensor(STEPS - 1)},
            r"0\.self_attn\.dex\.step is 99 of dex_steps 100: λ is still half annealed",
        ),
        ({"lambda_learn": None}, r"0\.self_attn\.dex\.lambda_learn is missing"),
        ({"proj.weight": None}, r"0\.self_attn\.dex\. has not one of weight and proj\.weight"),
        ({"weight": torch.eye(8)}, r"0\.self_attn\.dex\. has not one of|is \[8, 8\], not"),
        ({"head_mask": torch.ones(3)}, r"dex\.head_mask is \[3\], not \[4\]"),
        ({"head_mask": torch.tensor([1.0, 0.0, 0.5, 1.0])}, r"dex\.head_mask holds 0\.5, and selects with 0 and 1"),
        ({"gate": torch.ones(3)}, r"dex\.gate is no part of DEX"),
        ({"lambda_learn": torch.tensor(math.nan)}, r"dex\.lambda_learn"),
    ],
    ids=["annealed", "no lambda", "no matrix", "two matrices", "mask", "soft mask", "unknown", "no number"],
)
def test_what_does_not_fold_is_refused_by_name(tmp_path, changes, complaint):
    write_dex(tmp_path / "dex")
    tensors = load_file(tmp_path / "dex/model.safetensors")
    tensors |= {DEX.format(0) + part: data for part, data in changes.items() if data is not None}
    gone = {DEX.format(0) + part for part, data in changes.items() if data is None}
    save_file({name: data for name, data in tensors.items() if name not in gone}, tmp_path / "dex/model.safetensors")
    with pytest.raises(CheckpointError, match=complaint):
        open_source(tmp_path / "dex")


def test_a_plain_llama_is_not_converted_into_itself(tmp_path):
    write_llama(tmp_path / "llama")
    with pytest.raises(UsageError, match="cannot convert llama, a plain Transformer, to llama exactly"):
        convert(tmp_path / "llama", tmp_path / "out", "llama")
