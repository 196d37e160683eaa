"""DiffTransformer against transformers' DiffLlama and Llama, on seeded random models."""

import pytest
import torch

from diffquant.recipe import Recipe
from tests.support.models import ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **settings}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "mha": {},
    "gqa2": {"num_key_value_heads": 4},
    "gqa4-bias-tied": {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True},
    "head12": {"head_dim": 12},
    "six-heads": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    "rope-linear": rope("linear", factor=2.0),
    "rope-dynamic": rope("dynamic", factor=2.0) | {"max_position_embeddings": 16},
    "rope-yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "rope-llama3": rope("llama3", **LLAMA3),
}


@in_one_test("changes", CONFIGS.values())
def test_logits_equal_transformers_diffllama_at_once_and_in_pieces(changes):
    oracle = random_diffllama(**changes)
    model, ids = ours(oracle), random_ids()
    torch.testing.assert_close(model(ids).logits, oracle(ids).logits, rtol=0, atol=1e-4)
    past = theirs = None
    for chunk in (ids[:, :20], ids[:, 20:21], ids[:, 21:29], ids[:, 29:]):
        out, expected = model(chunk, past_key_values=past, use_cache=True), oracle(chunk, past_key_values=theirs)
        torch.testing.assert_close(out.logits, expected.logits, rtol=0, atol=1e-4)
        past, theirs = out.past_key_values, expected.past_key_values


@pytest.mark.parametrize("name", ["mha", "gqa4-bias-tied", "rope-llama3"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generated_tokens_equal_transformers_diffllama(name, beams):
    oracle = random_diffllama(**CONFIGS[name])
    settings = {"max_new_tokens": 24, "do_sample": False, "num_beams": beams, "pad_token_id": 0, "eos_token_id": None}
    ids = random_ids(length=9)
    assert torch.equal(ours(oracle).generate(ids, **settings), oracle.generate(ids, **settings))


def test_left_padding_does_not_change_a_sequence():
    model = ours(random_diffllama(num_key_value_heads=4))
    ids = random_ids()
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[:1], model(ids[:1]).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded[1:, 9:], model(ids[1:, 9:]).logits, rtol=0, atol=1e-5)
    assert torch.isfinite(padded).all()


def test_padded_generation_continues_each_prompt_as_if_alone():
    model = ours(random_diffllama())
    ids = random_ids(length=12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    together = model.generate(ids, attention_mask=mask, **settings)
    alone = model.generate(ids[1:, 5:], attention_mask=mask[1:, 5:], **settings)
    assert torch.equal(together[1, 12:], alone[0, 7:])


@in_one_test("changes", [{}, {"num_key_value_heads": 2, "mlp_bias": True, "attention_bias": True}])
def test_the_plain_baseline_equals_transformers_llama(changes):
    oracle = random_llama(**changes)
    ids = random_ids()
    torch.testing.assert_close(ours(oracle)(ids).logits, oracle(ids).logits, rtol=0, atol=1e-4)


def test_logits_to_keep_and_loss_follow_transformers():
    oracle = random_diffllama()
    model, ids = ours(oracle), random_ids()
    torch.testing.assert_close(
        model(ids, logits_to_keep=3).logits, oracle(ids, logits_to_keep=3).logits, rtol=0, atol=1e-4
    )
    torch.testing.assert_close(model(ids, labels=ids).loss, oracle(ids, labels=ids).loss)


def test_its_own_checkpoint_comes_back_through_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model = ours(random_diffllama(num_key_value_heads=4))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids()
    assert torch.equal(again(ids).logits, model(ids).logits)


@in_one_test("backend", ["auto", "naive", "simulated"])
def test_every_backend_that_quantizes_logits_fires_in_every_layer(backend):
    model = ours(random_diffllama())
    model.apply_recipe(Recipe.of(logits="4:row"))
    model.use_attention(backend)
    model(random_ids())
    model.check_quantizers_ran()
    assert [layer["entries"] for layer in model.logit_report()] == [2 * 2 * 4 * 37 * 38 // 2] * 3
