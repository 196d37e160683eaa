"""Training: what a recipe rounds has no gradients, and says so."""

import pytest
import torch

from diffquant import Recipe
from diffquant.errors import UsageError
from tests.support.models import ours, random_diffllama, random_ids
from tests.support.tables import in_one_test


@in_one_test("recipe", [{"logits": "4:row"}, {"qk": "8:row"}, {"p": "8:row"}, {"pv": "8:row"}, {"k": 8}])
def test_a_backward_pass_through_what_a_recipe_rounds_is_refused(recipe):
    model, ids = ours(random_diffllama()), random_ids()
    model.apply_recipe(Recipe.of(**recipe))
    with torch.enable_grad():
        loss = model(ids, labels=ids).loss
        with pytest.raises(UsageError, match=r"have no gradients: train at 16 bits, after model\.apply_recipe"):
            loss.backward()
    model.apply_recipe(Recipe())
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
