"""The cache whose attention reads codes, against the packed one that expands them."""

import pytest
import torch

from diffquant.model.adapters import adapter_for
from diffquant.model.cache import PackedCache
from diffquant.model.fused_cache import FusedCache
from diffquant.recipe import Recipe
from tests.support.models import SIZES, ours, random_diffllama, random_ids, random_llama
from tests.support.thorough import sampled, thorough

pytest.importorskip("triton")

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def small_model(generation):
    if generation == "v2":
        torch.manual_seed(0)
        return adapter_for(SIZES | SMALL | {"model_type": "diff_v2"}).architecture.new_model().eval()
    return ours(random_diffllama(**SMALL | {"num_key_value_heads": 2}) if generation == "v1" else random_llama(**SMALL))


def generated(model, cache, ids, mask, **settings):
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY, **settings)


@pytest.mark.parametrize(
    ("generation", "recipe"),
    sampled(
        [
            ("v1", Recipe.of(k="4:c16", v=4, residual=5)),
            ("v1", Recipe.of(kv=6)),
            ("plain", Recipe.of(k="6:c16", v=16)),
            ("v2", Recipe.of(kv=8, residual=3)),
            ("plain", Recipe.of()),
        ],
        5,
    ),
    ids=lambda x: x if isinstance(x, str) else f"{x.k}-{x.v}-{x.residual}",
)
def test_the_same_tokens_as_with_the_packed_cache(generation, recipe):
    model = small_model(generation)
    ids = random_ids(length=27)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    fused = FusedCache(recipe, layers=1)
    wanted = generated(model, PackedCache(recipe, layers=1), ids, mask)
    assert torch.equal(generated(model, fused, ids, mask), wanted)
    assert fused.get_seq_length() == 31


def test_logits_of_chunks_are_those_of_the_packed_cache():
    model, recipe, ids = small_model("v1"), Recipe.of(k="4:c16", v=6, residual=4), random_ids(batch=1, length=40)
    packed, fused = PackedCache(recipe, 1), FusedCache(recipe, 1)
    for chunk in ids.split((3, 19, 13, 5), 1):
        out = model(chunk, past_key_values=fused).logits
        torch.testing.assert_close(out, model(chunk, past_key_values=packed).logits, rtol=1e-4, atol=1e-4)


@thorough
def test_beams_move_whole_sequences():
    model, recipe, ids = small_model("plain"), Recipe.of(kv=8, residual=2), random_ids(batch=1, length=9)
    wanted = generated(model, PackedCache(recipe, 1), ids, None, num_beams=2)
    assert torch.equal(generated(model, FusedCache(recipe, 1), ids, None, num_beams=2), wanted)


def test_masks_with_holes_go_the_other_way():
    model, recipe, ids = small_model("v1"), Recipe.of(kv=8), random_ids(batch=1, length=9)
    hole = torch.ones_like(ids)
    hole[0, 4] = 0
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    seen[..., 4:, 1] = False
    for mask in (hole, seen):
        caches = [PackedCache(recipe, 1), FusedCache(recipe, 1)]
        assert torch.equal(*(model(ids, attention_mask=mask, past_key_values=cache).logits for cache in caches))


def states(tokens, seed):
    return torch.randn(2, 1, tokens, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recipe", sampled([Recipe.of(), Recipe.of(k="4:c16", v=8, residual=3)], 2), ids=["16", "c16"])
def test_a_cache_grows_with_its_tokens(recipe):
    k, v = states(130, 0), states(130, 1)
    growing = FusedCache(recipe, 1)
    growing.update(k[:, :, :100], v[:, :, :100], 0)
    before = growing.nbytes
    read = growing.update(k[:, :, 100:], v[:, :, 100:], 0)
    packed = PackedCache(recipe, 1)
    packed.update(k[:, :, :100], v[:, :, :100], 0)
    assert all(torch.equal(a, b) for a, b in zip(read, packed.update(k[:, :, 100:], v[:, :, 100:], 0), strict=True))
    assert growing.nbytes > before
    growing.crop(-2)
    assert growing.get_seq_length() == 128
    growing.reset()
    assert (growing.get_seq_length(), growing.nbytes) == (0, 0)


@pytest.mark.parametrize("recipe", sampled([Recipe.of(), Recipe.of(kv=4, residual=2)], 2), ids=["16", "4"])
def test_generation_takes_it_where_the_kernels_run(recipe, monkeypatch):
    model, ids = small_model("v1"), random_ids(length=9)
    model.apply_recipe(recipe)
    wanted = generated(model, None if recipe == Recipe() else model.new_cache(), ids, None)
    monkeypatch.setattr("diffquant.model.modeling.fused_cache_refusal", lambda *what: None)
    assert isinstance(model.new_cache(), FusedCache)
    made = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    assert isinstance(made.past_key_values, FusedCache)
    assert torch.equal(made.sequences, wanted)


def test_on_cuda_it_is_said_once_why_decoding_is_slow(monkeypatch, caplog):
    model = small_model("v1").model
    assert not model.has_fused_cache
    assert caplog.text == ""
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    for _ in range(2):
        assert not model.has_fused_cache
    assert caplog.text.count("the decode kernel is not used") == 1
    assert "float16 and bfloat16, not torch.float32" in caplog.text
