"""Scales of a calibrated cache, stored where compressed-tensors has them, and what it and diffquant make of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle import fake_quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import diffquant
from diffquant.errors import CheckpointError
from diffquant.quantization.modeling_diffquant import _IS_RENAMED
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test

STATIC = {"weights": "4:row", "kv": "e4m3:static"}
SCALES = [f"model.layers.{layer}.self_attn.{target}_scale" for layer in (0, 1) for target in ("k", "v")]


def write_source(folder, source):
    write_checkpoint(folder, source, vocab_size=tiny_lm.WORDS)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def v1(tmp_path):
    report = diffquant.quantize(write_source(tmp_path / "v1", "unilm-v1"), tmp_path / "low", STATIC)
    assert not report.notes
    return tmp_path / "low"


def test_a_scale_of_each_layer_is_stored_as_compressed_tensors_names_it(v1):
    config = json.loads((v1 / "config.json").read_text())["quantization_config"]
    args = QuantizationConfig.model_validate(config).kv_cache_scheme
    stated = args.num_bits, args.type, args.strategy, args.symmetric, args.dynamic
    assert stated == (8, "float", "tensor", True, False)
    tensors = load_file(v1 / "model.safetensors")
    assert [name for name in sorted(tensors) if name.endswith(("k_scale", "v_scale"))] == SCALES
    assert all(tensors[name].dtype == torch.float32 and tensors[name].shape == (1,) for name in SCALES)
    # A power of two, which bfloat16 holds.
    assert all(torch.frexp(tensors[name])[0] == 0.5 for name in SCALES)
    assert "kv_cache_scheme" in (v1 / "README.md").read_text()
    stored = json.loads((v1 / "diffquant.json").read_text())["bytes"]
    assert stored == sum(tensor.nbytes for tensor in tensors.values())


def test_keys_and_values_are_what_compressed_tensors_rounds_them_to(v1):
    model, tensors = diffquant.load(v1, dtype="float32"), load_file(v1 / "model.safetensors")
    args = QuantizationArgs.model_validate(
        json.loads((v1 / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    )
    plain = diffquant.load(v1, {"kv": 16}, dtype="float32")
    ids = random_ids(batch=2, length=21)
    caches = [each(ids, use_cache=True).past_key_values for each in (model, plain)]
    for name, what in zip(SCALES[:2], ("keys", "values"), strict=True):
        rounded, exact = getattr(caches[0].layers[0], f"stored_{what}").read(), getattr(caches[1].layers[0], what)
        theirs = fake_quantize(exact, tensors[name], None, args)
        assert torch.equal(rounded, theirs)
        assert not torch.equal(rounded, exact)


def test_stock_transformers_opens_it_and_rounds_the_cache_if_its_own_library_finds_the_cache(tmp_path):
    """In transformers 5.24 compressed-tensors 0.20 looks for the cache by its older name, and leaves it plain."""
    diffquant.quantize(write_source(tmp_path / "llama", "llama"), tmp_path / "low", STATIC)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "low")
    ours = diffquant.load(tmp_path / "low", {"kv": 16} if _IS_RENAMED else None)
    ids = random_ids(batch=1, length=21)
    asked = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(theirs.generate(ids, **asked), ours.generate(ids, **asked))
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=0, atol=1e-4)


def test_a_recipe_for_the_cache_alone_is_stored_without_a_packed_weight(tmp_path):
    source = write_source(tmp_path / "v2", "unilm-v2")
    diffquant.quantize(source, tmp_path / "low", {"kv": "e4m3:static"})
    config = json.loads((tmp_path / "low/config.json").read_text())["quantization_config"]
    assert (config["config_groups"], config["format"]) == ({}, "pack-quantized")
    ids = random_ids()
    assert diffquant.load(tmp_path / "low").recipe.k.granularity == "static"
    plain, low = diffquant.load(source), diffquant.load(tmp_path / "low", {"kv": 16})
    assert torch.equal(low(ids).logits, plain(ids).logits)


def test_a_model_with_scales_of_a_cache_alone_is_measured_and_quantized_as_the_16_bit_model_that_it_is(tmp_path):
    source = write_source(tmp_path / "v2", "unilm-v2")
    diffquant.quantize(source, tmp_path / "low", {"kv": "e4m3:static"})
    asked = {"tasks": "perplexity", "characters": 500}
    alone = diffquant.evaluate(tmp_path / "low", **asked)["perplexity"]
    swept = diffquant.sweep(tmp_path / "low", tmp_path / "sweep", targets="kv", bits="8", **asked)
    own = next(cell for cell in swept.cells if cell.point.target == "recipe")
    assert own.result.details["perplexity"] == alone.details["perplexity"]
    diffquant.quantize(tmp_path / "low", tmp_path / "later", "4:row")
    diffquant.quantize(source, tmp_path / "once", STATIC)
    assert (tmp_path / "later/model.safetensors").read_bytes() == (tmp_path / "once/model.safetensors").read_bytes()
    diffquant.quantize(tmp_path / "low", tmp_path / "dynamic", {"kv": "8"})
    assert diffquant.load(tmp_path / "dynamic").recipe == diffquant.Recipe.of(kv=8)
    with pytest.raises(CheckpointError, match="convert its 16-bit original"):
        diffquant.convert(tmp_path / "low", tmp_path / "rotated", "rotated")


# A recipe, whether the source has a tokenizer, and what is said.
LEFT = [
    ({"kv": "e4m3"}, True, "only diffquant applies this cache"),
    ({"k": "e4m3:static", "v": "e4m3"}, True, "only diffquant applies this cache"),
    ({"kv": "e4m3:static", "residual": 4}, True, "only diffquant applies this cache"),
    ({"kv": "e4m3:static"}, False, "no scales of the cache are stored: "),
    ({"kv": "8:static"}, True, ""),
]


@in_one_test(("recipe", "has_tokenizer", "said"), LEFT)
def test_what_engines_do_not_have_is_left_to_diffquant_and_said(tmp_path, recipe, has_tokenizer, said):
    source = (write_source if has_tokenizer else write_checkpoint)(tmp_path / "v2", "unilm-v2")
    notes = diffquant.quantize(source, tmp_path / "low", {"weights": "8:row"} | recipe).notes
    assert [note[: len(said)] for note in notes] == ([said] if said else [])
    assert "kv_cache_scheme" not in (tmp_path / "low/config.json").read_text()


# What is done to a folder's tensors, and what is said when it is opened.
DAMAGED = [
    (lambda tensors: tensors.pop(SCALES[0]), rf"missing {SCALES[0]} \[1\]"),
    (lambda tensors: tensors.update({SCALES[1]: torch.ones(2)}), rf"{SCALES[1]} is \[2\], not \[1\]"),
    (lambda tensors: tensors.update({SCALES[2]: torch.tensor([torch.nan])}), f"{SCALES[2]} is nan"),
]


@in_one_test(("change", "said"), DAMAGED)
def test_a_damaged_scale_is_refused_by_name(v1, tmp_path, change, said):
    damaged = Path(shutil.copytree(v1, tmp_path / "damaged", dirs_exist_ok=True))
    tensors = load_file(damaged / "model.safetensors")
    change(tensors)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        diffquant.load(damaged)
