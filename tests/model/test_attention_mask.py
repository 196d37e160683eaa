"""Masks as transformers' callers pass them, against transformers' own models."""

import pytest
import torch

from diffquant import load
from diffquant.attention import attend
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.recipe import Recipe
from tests.attention.test_attention import random_inputs
from tests.support.checkpoints import write_checkpoint
from tests.support.models import ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test

BUILDS = {"diff-v1": random_diffllama, "llama": random_llama}
BATCH, LENGTH = 2, 13


def order(length=LENGTH):
    return torch.ones(length, length, dtype=torch.bool).tril()


def prefix():
    """Five tokens that see each other, and causal order behind them."""
    seen = order()
    seen[:5, :5] = True
    return seen[None, None]


def scattered():
    """Another random choice of earlier tokens for each sequence; each sees itself."""
    chosen = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
    return (chosen & order()) | torch.eye(LENGTH, dtype=torch.bool)


MASKS = {"prefix": prefix(), "scattered": scattered(), "all": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)}


def added(seen, lowest):
    return torch.zeros(seen.shape).masked_fill(~seen, lowest)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_mask_of_what_each_query_sees_equals_transformers(build, attention, mask):
    oracle, ids = build(num_key_value_heads=4), random_ids(BATCH, LENGTH)
    model = ours(oracle)
    oracle.set_attn_implementation(attention)
    floats = added(mask, torch.finfo(torch.float32).min)
    expected = oracle(ids, attention_mask=mask if attention == "sdpa" else floats).logits
    assert not torch.allclose(expected, oracle(ids).logits, atol=1e-2)
    for given in (mask, floats, added(mask, -torch.inf), added(mask, -1e4)):
        torch.testing.assert_close(model(ids, attention_mask=given).logits, expected, rtol=0, atol=1e-4)


@in_one_test("build", BUILDS.values())
def test_such_a_mask_over_cached_tokens_equals_transformers(build):
    oracle, ids, mask = build(num_key_value_heads=4), random_ids(BATCH, LENGTH), scattered()
    model = ours(oracle)
    first = mask[:, :, :9, :9]
    past = model(ids[:, :9], attention_mask=first, use_cache=True).past_key_values
    theirs = oracle(ids[:, :9], attention_mask=first, use_cache=True).past_key_values
    found = model(ids[:, 9:], attention_mask=mask[:, :, 9:], past_key_values=past).logits
    expected = oracle(ids[:, 9:], attention_mask=mask[:, :, 9:], past_key_values=theirs).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_causal_mask_with_padding_is_the_padding_mask_also_to_scales_of_logits_and_operands():
    """Padding enters no scale, whichever of the two forms says where it is."""
    model, ids = ours(random_diffllama(num_key_value_heads=4)), random_ids(BATCH, LENGTH)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.long)
    valid[1, :4] = 0
    seen = (order() & valid[:, None, None].bool()) & valid[:, None, :, None].bool()
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    logits = ("16", "4:tensor", "4:row:shift", "5:pair")
    for recipe in (*({"logits": scheme} for scheme in logits), {"qk": "4:head:smooth"}):
        model.apply_recipe(Recipe.of(**recipe))
        found = model(ids, attention_mask=seen, position_ids=positions).logits
        expected = model(ids, attention_mask=valid).logits
        torch.testing.assert_close(found[valid.bool()], expected[valid.bool()], rtol=0, atol=1e-4)


@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
@pytest.mark.parametrize("backend", ["flashdiff1", "flashdiff2", "auto"])
def test_backends_agree_on_what_each_query_sees(backend, generation):
    q, k, v, lam = random_inputs(generation, 13, 13)
    seen = scattered()
    seen[1, :, 6] = False
    found = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(explicit=seen)), backend)
    expected = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(explicit=seen)), "naive")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not found[1, :, 6].any()


@in_one_test("build", BUILDS.values())
def test_sequences_packed_by_their_positions_do_not_see_each_other_as_in_transformers(build):
    oracle, ids = build(num_key_value_heads=4), random_ids(1, LENGTH)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 4, 5, 6, 7, 8]])
    found = ours(oracle)(ids, position_ids=positions).logits
    expected = oracle(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    alone = torch.cat([oracle(part).logits for part in ids.split([5, 3, 5], 1)], 1)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)


@in_one_test(
    ("mask", "said"),
    [
        (torch.ones(BATCH, 1, LENGTH, LENGTH), "from 1.0 to 1.0. Other numbers are a bias"),
        (added(scattered(), -2.0), "from -2.0 to 0.0. Other numbers are a bias"),
        (scattered().long(), "got torch.int64"),
        (scattered().expand(-1, 8, -1, -1), r"the same for all heads; got \[2, 8, 13, 13\]"),
        (scattered()[:, 0], r"got \[2, 13, 13\]"),
        (scattered()[..., :7], r"got \[2, 1, 13, 7\]"),
        (torch.ones(BATCH, 7), r"attention_mask must be \[2, 13\] over cached and new tokens"),
        ({"full_attention": scattered()}, "must be a tensor, got dict"),
    ],
)
def test_a_mask_that_is_not_computed_is_refused_by_name(mask, said):
    with pytest.raises(UsageError, match=said):
        ours(random_diffllama())(random_ids(BATCH, LENGTH), attention_mask=mask)


def test_mambas_layers_refuse_what_they_cannot_honour(tmp_path):
    model = load(write_checkpoint(tmp_path / "source", "phi4flash"))
    for given in ({"attention_mask": scattered()}, {"position_ids": torch.tensor([[0, 1, 0]])}):
        ids = random_ids(BATCH, LENGTH) if "attention_mask" in given else random_ids(1, 3)
        with pytest.raises(UsageError, match="Mamba's layers read tokens one after the other"):
            model(ids, **given)
