"""The packed cache against fake-quantized attention, and by its own rules."""

import pytest
import torch

from diffquant.errors import DiffQuantError, UsageError
from diffquant.model.cache import PackedCache, PackedStates
from diffquant.model.windowed_cache import WindowedLayer
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.support.fake_quantizer import fake_quantize
from tests.support.models import ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test


def states(tokens, batch=2, heads=3, width=16, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, width, generator=generator).to(dtype)


def stored(scheme, residual, *chunks):
    held = PackedStates(Scheme.parse(scheme), residual)
    for chunk in chunks:
        held.append(chunk)
    return held


class FakeQuantizedCache:
    """The naive oracle: keeps all states in full and fake-quantizes them whenever they are read."""

    def __init__(self, recipe):
        self.recipe, self.states = recipe, {}

    def get_seq_length(self):
        return self.states[0][0].shape[2] if self.states else 0

    def update(self, k, v, layer):
        past = self.states.get(layer)
        self.states[layer] = (k, v) if past is None else tuple(torch.cat(x, 2) for x in zip(past, (k, v), strict=True))
        schemes = (self.recipe.k, self.recipe.v)
        return tuple(self.read(x, scheme) for x, scheme in zip(self.states[layer], schemes, strict=True))

    def read(self, x, scheme):
        block = (scheme.granularity_size or 1) if scheme.granularity == "column" else 1
        old = max(x.shape[2] - self.recipe.residual, 0) // block * block
        if not scheme.quantizes or not old:
            return x
        return torch.cat(
            [fake_quantize(x[:, :, :old], scheme.bits, scheme.granularity, scheme.granularity_size), x[:, :, old:]], 2
        )


RECIPES = [
    Recipe.of(kv=8),
    Recipe.of(kv="4:g4", residual=5),
    Recipe.of(k="4:c8", v="6", residual=8),
    Recipe.of(k=16, v=4),
    Recipe.of(k="6:c4", v=16, residual=3),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"k{r.k}-v{r.v}-r{r.residual}")
@pytest.mark.parametrize("build", [random_diffllama, random_llama], ids=["diff-v1", "llama"])
def test_logits_equal_naive_fake_quantized_attention(build, recipe):
    model = ours(build(num_key_value_heads=4))
    model.apply_recipe(recipe)
    ids = random_ids(length=40)
    packed, naive = model.new_cache(), FakeQuantizedCache(recipe)
    for chunk in (ids[:, :21], ids[:, 21:22], ids[:, 22:31], ids[:, 31:]):
        out = model(chunk, past_key_values=packed).logits
        torch.testing.assert_close(out, model(chunk, past_key_values=naive).logits, rtol=0, atol=1e-5)


@in_one_test("scheme", ["4:row", "6:g8", "8:c8"])
def test_a_token_is_quantized_once(scheme):
    held = stored(scheme, 4, states(40))
    before = held.words.clone()
    for seed in range(1, 20):
        held.append(states(1, seed=seed))
    assert torch.equal(held.words[:, :, : before.shape[2]], before)


@pytest.mark.parametrize("scheme", ["4:row", "6:g8", "8:c8", "16"])
@pytest.mark.parametrize("cropped", [1, 5, 13, 30, 37])
def test_crop_forgets_the_newest_and_keeps_the_rest(scheme, cropped):
    held = stored(scheme, 6, states(37))
    before = held.read()
    packed = 0 if held.words is None else held.words.shape[2]
    held.crop(cropped)
    assert torch.equal(held.read(), before[:, :, : 37 - cropped])
    held.append(states(9, seed=1))
    assert held.length == 37 - cropped + 9
    kept = min(packed, 37 - cropped)
    assert torch.equal(held.read()[:, :, :kept], before[:, :, :kept])


@pytest.mark.parametrize("scheme", ["4:row", "6:g8", "8:c8", "16"])
@pytest.mark.parametrize("forgotten", [-2, 0, 1, 8, 13, 24, 33, 37])
def test_the_oldest_tokens_are_forgotten_and_the_others_stay_as_they_are(scheme, forgotten):
    held = stored(scheme, 6, states(37))
    before, size = held.read(), held.nbytes
    held.forget_oldest(forgotten)
    gone = max(forgotten, 0)
    assert torch.equal(held.read(), before[:, :, gone:])
    assert held.nbytes < size or not gone
    packed = 0 if held.words is None else held.words.shape[2]
    held.append(states(9, seed=1))
    assert held.length == 46 - gone
    held.crop(12)
    kept = min(packed, held.length)
    assert torch.equal(held.read()[:, :, :kept], before[:, :, gone : gone + kept])


def test_a_static_cache_without_its_ranges_says_what_is_missing():
    held = stored("8:static", 2, states(2))
    with pytest.raises(UsageError, match="a cache at 8:static needs calibrated ranges"):
        held.append(states(1))


def test_a_layer_with_a_window_holds_what_later_tokens_see_and_returns_what_these_see():
    layer = WindowedLayer(Recipe.of(k=16, v=16), {}, 5)
    x, y, seen = states(19), states(19, seed=1), 0
    for chunk in (7, 1, 2, 9):
        end = seen + chunk
        keys, values = layer.update(x[:, :, seen:end], y[:, :, seen:end])
        first = max(seen - 4, 0)
        assert torch.equal(keys, x[:, :, first:end])
        assert torch.equal(values, y[:, :, first:end])
        assert (layer.stored_keys.length, layer.stored_values.length) == (4, 4)
        seen = end
    # Where the newest tokens are padding in one sequence, others stay.
    layer.update(x[:, :, :1], y[:, :, :1], needed=2)
    assert layer.stored_keys.length == layer.stored_values.length == 2
    layer.crop(0)
    with pytest.raises(UsageError, match="cannot restore earlier tokens"):
        layer.crop(-1)


@in_one_test("scheme", ["4:row", "6:g8", "8:c8"])
def test_batch_operations_move_whole_sequences(scheme):
    recipe = Recipe.of(k=scheme, v="4:row", residual=3)
    cache = PackedCache(recipe, layers=1)
    keys, values = cache.update(states(20), states(20, seed=1), 0)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].stored_keys.read(), keys[[1, 0]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].stored_values.read(), values[[1, 1, 0, 0]])
    cache.batch_select_indices(torch.tensor([3]))
    assert torch.equal(cache.layers[0].stored_keys.read(), keys[:1])
    cache.reset()
    assert cache.get_seq_length() == 0


def test_padding_does_not_enter_a_blocks_scales():
    model = ours(random_diffllama(num_key_value_heads=4))
    model.apply_recipe(Recipe.of(k="4:c8", v="4:row"))
    ids = random_ids(length=24)
    mask = torch.ones_like(ids)
    mask[:, :8] = 0
    changed = ids.clone()
    changed[:, :8] = 0
    outs = [model(each, attention_mask=mask).logits[:, 8:] for each in (ids, changed)]
    torch.testing.assert_close(*outs, rtol=0, atol=0)


def test_bits_that_are_stored_are_those_of_the_recipe():
    cache, x = PackedCache(Recipe.of(k="8:row", v="4:row"), layers=2), states(256, dtype=torch.float16)
    for layer in range(2):
        cache.update(x, x, layer)
    assert cache.nbytes == 2 * (2 * 3 * 256) * ((16 + 2) + (8 + 2))


@in_one_test("dtype", [torch.float16, torch.bfloat16])
def test_tiny_and_huge_half_states_stay_finite(dtype):
    huge, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 8
    x = states(4, dtype=dtype) * 0 + torch.tensor([huge, -huge] * 8, dtype=dtype)
    assert torch.isfinite(stored("8:row", 0, x).read()).all()
    assert torch.isfinite(stored("4:row", 0, x * 0 + tiny).read()).all()


def test_crop_takes_a_negative_count():
    cache = PackedCache(Recipe.of(kv=8), layers=1)
    cache.update(states(5), states(5), 0)
    with pytest.raises(UsageError, match="negative number of tokens"):
        cache.crop(2)
    cache.crop(-2)
    assert cache.get_seq_length() == 3


@in_one_test(("recipe", "fewest"), [({"kv": "4:row", "residual": 30}, 31), ({"k": "4:c16", "v": "4:row"}, 16)])
def test_texts_that_are_too_short_for_the_cache_to_quantize_are_told_of(recipe, fewest):
    """Their results are those of 16 bits."""
    model = ours(random_diffllama())
    plain, ids = model(random_ids(1, fewest)).logits, random_ids(1, fewest)
    model.apply_recipe(Recipe.of(**recipe))
    model(ids[:, :-1])
    with pytest.raises(DiffQuantError, match=f"quantizes texts of {fewest} tokens or more, but the longest had"):
        model.check_quantizers_ran()
    assert not torch.equal(model(ids).logits, plain)
    model.check_quantizers_ran()
    model.apply_recipe(Recipe.of(**recipe))
    cache = model.new_cache()
    for token in ids.split(1, 1):
        model(token, past_key_values=cache)
    model.check_quantizers_ran()


def test_a_layer_whose_logit_quantizer_did_not_fire_is_named():
    model = ours(random_diffllama())
    model.apply_recipe(Recipe.of(logits="4:row"))
    model.attention_modules[1].logits = Scheme.parse("16")
    model(random_ids())
    with pytest.raises(DiffQuantError, match="layers 1 did not"):
        model.check_quantizers_ran()
    model.apply_recipe(Recipe.of(logits="4:row"))
    model(random_ids())
    model.check_quantizers_ran()
    assert all(row["calls"] == 1 and row["step_max"] > 0 for row in model.logit_report())
