"""A model in memory is quantized to the bit as its folder would be."""

import pytest
import torch

import diffquant
from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test


def same(a, b):
    """Whether two models hold the same parameters, to the bit, under the same recipe."""
    states = a.state_dict(), b.state_dict()
    return (
        a.recipe == b.recipe
        and set(states[0]) == set(states[1])
        and all(x.dtype == states[1][name].dtype and torch.equal(x, states[1][name]) for name, x in states[0].items())
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["unilm-v1", "unilm-v2-half", "diffllama", "llama"])
@pytest.mark.parametrize(
    "recipe",
    [{"weights": "4:g32", "kv": 8, "logits": "6:row"}, {"weights": "nvfp4"}, {"weights": "e4m3:b128"}],
    ids=str,
)
def test_the_result_is_the_disks(tmp_path, kind, dtype, recipe):
    model = diffquant.load(write_checkpoint(tmp_path / "given", kind), dtype=dtype)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path / "saved")
    diffquant.quantize(tmp_path / "saved", tmp_path / "quantized", recipe)
    expected, result = diffquant.load(tmp_path / "quantized", dtype=dtype), diffquant.quantize(model, recipe=recipe)
    assert same(result, expected)
    ids = random_ids(2, 9)
    assert torch.equal(result(ids).logits, expected(ids).logits)
    assert not torch.equal(result(ids).logits, model(ids).logits)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_the_models_own_cache_stays_where_the_recipe_says_nothing_of_it(tmp_path):
    model = diffquant.load(write_checkpoint(tmp_path / "given", "llama"), {"kv": 8})
    recipe = diffquant.quantize(model, recipe={"weights": "8:row"}).recipe
    assert (str(recipe.k), str(recipe.weights)) == ("8:row", "8:row")


@in_one_test(
    ("options", "said"),
    [
        ({"output": "out"}, "leave out output"),
        ({"overwrite": True}, "leave out output"),
        ({"effort": "balanced"}, "gptq needs a tokenizer"),
    ],
)
def test_what_is_about_files_is_refused(tmp_path, options, said):
    model = diffquant.load(write_checkpoint(tmp_path / "given", "llama"))
    with pytest.raises(UsageError, match=said):
        diffquant.quantize(model, **{"recipe": "4:g32"} | options)


def test_a_models_weights_stay_under_a_recipe_of_its_cache(tmp_path):
    checkpoint, ids = write_checkpoint(tmp_path / "given", "llama"), random_ids(2, 9)
    diffquant.quantize(checkpoint, tmp_path / "quantized", {"weights": "4:g32"}, effort="fast")
    kv = {"kv": "8:row"}
    for model in (diffquant.load(checkpoint, {"weights": "4:g32"}), diffquant.load(tmp_path / "quantized")):
        recipe, expected = model.recipe, model(ids).logits
        model.apply_recipe(kv)
        assert model.recipe == Recipe.of(**kv).with_weights_of(recipe)
        with pytest.raises(UsageError, match="are already quantized"):
            diffquant.quantize(model, recipe={"weights": "4:g32"})
        with pytest.raises(UsageError, match="are at low bits"):
            model.save_pretrained(tmp_path / "saved")
        for other in ("8:row", {"overrides": {"*.q_proj": "8:row"}}):
            with pytest.raises(UsageError, match="weight schemes differ from those with which this model was loaded"):
                model.apply_recipe(other)
        model.apply_recipe(recipe)
        assert torch.equal(model(ids).logits, expected)
    plain = diffquant.load(checkpoint)
    with pytest.raises(UsageError, match="weight schemes differ"):
        plain.apply_recipe({"weights": "4:g32"} | kv)


def test_a_model_whose_parts_lie_on_the_disk_is_refused(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "given", "llama")
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    model = diffquant.load(checkpoint, device_map=places, offload_folder=tmp_path / "offloaded")
    with pytest.raises(UsageError, match="are offloaded"):
        diffquant.quantize(model, recipe={"weights": "8:row"})
