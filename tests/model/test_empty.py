"""No sequence, and no token, gives no logits, whatever is quantized."""

import torch

from diffquant import load
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test

RECIPES = [
    {},
    {"logits": "6:tensor", "kv": "8:row"},
    {"logits": "6:row:shift", "k": "4:c4", "residual": 2},
    {"logits": "4:b4"},
    {"qk": "4:b4:smooth", "logits": "4:head:alike"},
]


@in_one_test("kind", ["diffllama", "llama", "unilm-v2", "motif-grouped", "gated", "phi4flash", "motif3"])
def test_no_tokens_give_logits_of_no_tokens(tmp_path, kind):
    model = load(write_checkpoint(tmp_path / "source", kind))
    for recipe in RECIPES:
        model.apply_recipe(Recipe.of(**recipe))
        for shape in ((0, 5), (1, 0), (0, 0)):
            ids = torch.zeros(shape, dtype=torch.long)
            for mask in (None, torch.ones_like(ids)):
                assert model(ids, attention_mask=mask, use_cache=True).logits.shape == (*shape, 90)
        model.check_quantizers_ran()


def test_a_call_of_no_tokens_leaves_a_cache_as_it_is(tmp_path):
    for kind in ("unilm-v1", "phi4flash", "motif3"):
        model = load(write_checkpoint(tmp_path / kind, kind), Recipe.of(k="4:c4", v="8", logits="6:row"))
        ids, cache = torch.tensor([[3, 5, 8, 13, 21, 34, 55]]), model.new_cache()
        model(ids[:, :6], past_key_values=cache)
        model(ids[:, :0], past_key_values=cache)
        other = model.new_cache()
        model(ids[:, :6], past_key_values=other)
        last = [model(ids[:, 6:], past_key_values=each).logits for each in (cache, other)]
        assert torch.equal(*last)
