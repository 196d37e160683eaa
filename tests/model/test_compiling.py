"""torch.compile takes a model as one graph."""

import torch

from diffquant import Recipe
from tests.support.models import ours, random_diffllama, random_ids
from tests.support.tables import in_one_test


@in_one_test("recipe", [Recipe(), Recipe.of(logits="4:row")])
def test_a_forward_pass_is_one_graph(recipe):
    model = ours(random_diffllama(num_key_value_heads=4, num_hidden_layers=2))
    model.apply_recipe(recipe)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(lambda ids: model(ids, use_cache=False).logits)(random_ids())
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1
