"""A source format of one file: registered here, nothing else of diffquant changed, then taken through every verb."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diffquant import Recipe, load, quantize
from diffquant.model.adapters import READERS, adapter_for, register
from diffquant.quantization.inspection import inspect_checkpoint
from tests.support.checkpoints import SIZES

RENAMES = {".self_attn.": ".mixer.", ".mlp.gate_proj.": ".mlp.w1."}
IDS = torch.randint(0, 90, (2, 23), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def checkpoints(tmp_path):
    """A DiffLlama, and the same one under other names and a model_type of its own."""

    @register("toy_diff")
    def read_toy(config):
        return replace(adapter_for(config | {"model_type": "diffllama"}), renames=RENAMES)

    torch.manual_seed(0)
    DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES)).save_pretrained(tmp_path / "known")
    (tmp_path / "toy").mkdir()
    tensors = load_file(tmp_path / "known" / "model.safetensors")
    save_file({read_toy_name(name): x for name, x in tensors.items()}, tmp_path / "toy" / "model.safetensors")
    config = json.loads((tmp_path / "known" / "config.json").read_text())
    (tmp_path / "toy" / "config.json").write_text(json.dumps(config | {"model_type": "toy_diff"}))
    yield tmp_path / "known", tmp_path / "toy"
    del READERS["toy_diff"]


def read_toy_name(name):
    for ours, theirs in RENAMES.items():
        name = name.replace(ours, theirs)
    return name


def test_it_is_inspected_quantized_and_loaded_as_the_format_it_renames(checkpoints, tmp_path):
    known, toy = checkpoints
    ours, theirs = inspect_checkpoint(toy), inspect_checkpoint(known)
    assert (ours.model_type, ours.parameters) == ("toy_diff", theirs.parameters)
    assert ours.lam == pytest.approx(theirs.lam, rel=1e-6)
    torch.testing.assert_close(float32_logits(toy), float32_logits(known), rtol=0, atol=1e-12)
    for source in checkpoints:
        quantize(source, tmp_path / f"{source.name}-low", Recipe.of(weights="4:g32"))
    assert inspect_checkpoint(tmp_path / "toy-low").packed == SIZES["num_hidden_layers"] * 7
    low = float32_logits(tmp_path / "toy-low")
    torch.testing.assert_close(low, float32_logits(tmp_path / "known-low"), rtol=0, atol=1e-12)
    assert (low - float32_logits(toy)).abs().max() > 1e-3


def float32_logits(folder):
    """Logits in float64: in float32 a BLAS may round otherwise where weights begin elsewhere in memory."""
    return load(folder, dtype=torch.float64)(IDS).logits


def test_a_model_type_has_one_reader():
    with pytest.raises(ValueError, match="'llama' has a reader already"):
        register("llama")(lambda config: None)
