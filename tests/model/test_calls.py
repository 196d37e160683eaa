"""Calls of no tokens, backward, compiled and under autocast."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import Trainer, TrainingArguments

from diffquant import load
from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.attention import project_sigmoids
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_checkpoint
from tests.support.models import ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test
from tests.support.thorough import thorough

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


@in_one_test("recipe", [Recipe(), Recipe.of(logits="4:row")])
def test_a_forward_pass_is_one_graph(recipe):
    model = ours(random_diffllama(num_key_value_heads=4, num_hidden_layers=2))
    model.apply_recipe(recipe)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(lambda ids: model(ids, use_cache=False).logits)(random_ids())
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1


@thorough
def test_compiled_decoding_with_a_quantized_cache_stops_compiling():
    model = ours(random_diffllama(num_key_value_heads=4, num_hidden_layers=1))
    model.apply_recipe(Recipe.of(kv="8"))
    torch._dynamo.reset()
    counters.clear()
    ids, graphs, compiled = random_ids(), [], torch.compile(model.forward, backend="eager", dynamic=True)
    ours_compiled, plain = model.new_cache(), model.new_cache()
    for step in (ids, *ids[:, :8].split(1, 1)):
        read = compiled(input_ids=step, past_key_values=ours_compiled).logits
        torch.testing.assert_close(read, model(step, past_key_values=plain).logits)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[5] == graphs[-1] > 0


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


@in_one_test("smoothing", [0.0, 0.1])
def test_trainer_computes_the_loss_of_transformers_model(tmp_path, smoothing):
    oracle, rows = random_diffllama(), [{"input_ids": row, "labels": row} for row in random_ids()]
    made = TrainingArguments(tmp_path, label_smoothing_factor=smoothing, report_to=[], use_cpu=True, disable_tqdm=True)
    losses = [Trainer(each, made, eval_dataset=rows).evaluate()["eval_loss"] for each in (oracle, ours(oracle))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_gates_are_float32():
    projection, x = nn.Linear(64, 4, bias=False), torch.randn(2, 9, 64)
    gates = project_sigmoids(x, projection)
    with in_bfloat16():
        assert torch.equal(project_sigmoids(x, projection), gates)
