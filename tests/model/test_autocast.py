"""Models under autocast, as the trainers of transformers and lm-eval's mixed precision run them."""

import torch
from torch import nn

from diffquant.family.mask import Mask
from diffquant.model.attention import project_sigmoids
from diffquant.recipe import Recipe
from tests.support.models import ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test


def in_bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@in_one_test("make", [random_diffllama, random_llama])
def test_a_model_comes_as_close_to_float32_as_transformers_does(make):
    oracle = make(num_key_value_heads=4)
    model, ids = ours(oracle), random_ids()
    exact = oracle(ids).logits
    with in_bfloat16():
        errors = [(each(ids).logits - exact).norm() for each in (model, oracle)]
    assert errors[0] < 1.2 * errors[1]


def test_a_step_of_training_reaches_every_parameter():
    model, ids = ours(random_diffllama()), random_ids()
    with torch.enable_grad():
        with in_bfloat16():
            loss = model(ids, labels=ids).loss
        loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@in_one_test("recipe", [{}, {"logits": "8:row"}, {"p": "8:row"}, {"qk": "8:row"}])
def test_lambda_and_what_a_recipe_rounds_keep_their_float32(recipe):
    model = ours(random_diffllama())
    model.apply_recipe(Recipe.of(**recipe))
    attention, layout = model.attention_modules[0], model.attention_modules[0].layout
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 9, width, generator=generator).bfloat16()
        for heads, width in (
            (layout.query_heads, layout.head_dim),
            (layout.key_heads, layout.head_dim),
            (layout.kv_pairs, layout.value_dim),
        )
    )
    attended = attention.attend(q, k, v, attention.scalar_lam(), Mask())
    with in_bfloat16():
        assert torch.equal(attention.attend(q, k, v, attention.scalar_lam(), Mask()), attended)


def test_gates_are_float32():
    projection, x = nn.Linear(64, 4, bias=False), torch.randn(2, 9, 64)
    gates = project_sigmoids(x, projection)
    with in_bfloat16():
        assert torch.equal(project_sigmoids(x, projection), gates)
