"""`convert --to smoothed` and `scaled`: the same numbers, and less lost when inputs or weights are rounded."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffquant.errors import CheckpointError, UsageError
from diffquant.quantization import smoothing
from diffquant.quantization.conversion import convert
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import contents, write_checkpoint
from tests.support.models import random_ids

WEIGHTS = "model.safetensors"
CHANNEL = 5


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    monkeypatch.setattr(smoothing, "_TOKENS", 128)
    monkeypatch.setattr(smoothing, "_WINDOW", 32)


def write_source(folder, source, large=40.0, **changes):
    """A random checkpoint with a tokenizer; norms and `up_proj` make one channel of each input `large`."""
    vocabulary = tiny_lm.tokenizer()
    write_checkpoint(folder, source, vocab_size=len(vocabulary), **changes)
    vocabulary.save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if name.endswith(("layernorm.weight", "up_proj.weight", "up_proj.bias")):
            tensor[CHANNEL] *= large
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@torch.no_grad()
def logits(folder, dtype=torch.float32, **recipe):
    return load(folder, Recipe.of(**recipe), dtype)(random_ids()).logits


@pytest.mark.parametrize("source", ["llama", "diffllama", "unilm-v1", "unilm-v2", "gated", "motif"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", ["smoothed", "scaled"])
def test_all_models_of_the_family_compute_the_same_numbers(tmp_path, source, target, dtype):
    write_source(tmp_path / "source", source, dtype=dtype)
    made = convert(tmp_path / "source", tmp_path / "out", target)
    assert made.rounding_error == 0
    assert f"inputs of linear layers are {target}: each channel is divided by a power of two" in made.summary()
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("source", "out"))
    assert {name: tensor.dtype for name, tensor in before.items()} == {n: t.dtype for n, t in after.items()}
    changed = {name.split(".", 3)[-1] for name in before if not torch.equal(before[name], after[name])}
    scaled = ("input_layernorm", "self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
    assert {f"{name}.weight" for name in scaled} <= changed
    assert torch.equal(logits(tmp_path / "source", dtype), logits(tmp_path / "out", dtype))


@pytest.mark.parametrize("source", ["llama", "diffllama"])
def test_stock_transformers_computes_the_same_numbers(tmp_path, source):
    write_source(tmp_path / "source", source, attention_bias=True)
    convert(tmp_path / "source", tmp_path / "out", "smoothed")
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name)(random_ids()).logits for name in ("source", "out")
    )
    assert torch.equal(before, after)


@pytest.mark.parametrize("source", ["llama", "unilm-v1", "unilm-v2"])
def test_large_channels_cost_8_bit_activations_less(tmp_path, source):
    write_source(tmp_path / "source", source)
    convert(tmp_path / "source", tmp_path / "out", "smoothed")
    exact = logits(tmp_path / "source")
    before, after = (
        (logits(tmp_path / name, weights=8, activations=8) - exact).square().mean() for name in ("source", "out")
    )
    assert after < 0.25 * before


@pytest.mark.parametrize("source", ["llama", "unilm-v1", "unilm-v2"])
@pytest.mark.parametrize("rounding", ["nearest", "mse"])
def test_large_channels_cost_4_bit_weights_less(tmp_path, source, rounding):
    # One layer: through several of a random model, errors grow to about the size of the logits.
    write_source(tmp_path / "source", source, num_hidden_layers=1)
    convert(tmp_path / "source", tmp_path / "out", "scaled")
    exact = logits(tmp_path / "source")
    before, after = (
        (logits(tmp_path / name, weights="4:g32", rounding=rounding) - exact).square().mean()
        for name in ("source", "out")
    )
    assert after < 0.75 * before


@pytest.mark.parametrize("target", ["smoothed", "scaled"])
def test_no_factor_is_chosen_that_raises_the_error_of_the_products_it_was_chosen_on(target):
    goal = smoothing._GOALS[target]
    generator = torch.Generator().manual_seed(0)
    even = torch.randn(256, 32, generator=generator)
    large = even * torch.where(torch.arange(32) == CHANNEL, 100.0, 1.0)
    weight = torch.nn.Parameter(torch.randn(16, 32, generator=generator))

    def error(x, factors):
        return smoothing._error(x, [weight], [x @ weight.mT], factors, goal)

    with torch.no_grad():
        factors = smoothing._search(large, [weight], goal)
        assert factors[CHANNEL] > 4 * factors.median()
        assert torch.equal(factors.log2(), factors.log2().round())
        none = torch.ones(32, dtype=torch.float64)
        assert error(large, factors) < 0.5 * error(large, none)
        chosen = smoothing._search(even, [weight], goal)
        assert chosen is None or error(even, chosen) < error(even, none)
        assert smoothing._search(torch.zeros(4, 32), [weight], goal) is None


def test_widths_that_groups_do_not_divide_are_scaled_by_rows(tmp_path):
    write_source(tmp_path / "source", "llama", intermediate_size=72)
    made = convert(tmp_path / "source", tmp_path / "out", "scaled")
    assert "for 4-bit weights, 6 of 6 inputs" in made.summary()
    assert torch.equal(logits(tmp_path / "source"), logits(tmp_path / "out"))


def test_another_text_gives_other_factors_and_only_smoothing_reads_one(tmp_path):
    source = write_source(tmp_path / "source", "llama", large=3.0)
    text = tmp_path / "text.txt"
    text.write_text("zq! " * 400, encoding="utf-8")
    convert(source, tmp_path / "out", "smoothed")
    convert(source, tmp_path / "other", "smoothed", text=text)
    assert contents(tmp_path / "out")[WEIGHTS] != contents(tmp_path / "other")[WEIGHTS]
    with pytest.raises(UsageError, match="text is read only for to='smoothed' and to='scaled'"):
        convert(source, tmp_path / "third", "rotated", text=text)


def test_layers_whose_inputs_come_from_elsewhere_are_refused(tmp_path):
    write_checkpoint(tmp_path / "source", "phi4flash")
    with pytest.raises(CheckpointError, match=r"convert \(to='smoothed'\) does not support it yet"):
        convert(tmp_path / "source", tmp_path / "out", "smoothed")
    assert not (tmp_path / "out").exists()
