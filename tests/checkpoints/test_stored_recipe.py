"""A recipe of cache and logits stays with a checkpoint, through every verb that writes one."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from diffquant import convert, load, quantize
from diffquant.model.modeling import DiffTransformer
from diffquant.model.motif3.modeling import Motif3
from diffquant.model.sambay.modeling import SambaY
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test

RECIPE = Recipe.of(kv="4:row", logits="6:row:shift", residual=3, overrides={"*.layers.1.*.k": "8:row"})
KINDS = ["diffllama", "llama", "unilm-v1", "unilm-v2", "phi4flash", "motif3"]


def stored(folder):
    """The recipe in a folder's config.json, by what JSON says alone."""
    return json.loads((folder / "config.json").read_text()).get("diffquant_config", {}).get("recipe")


@in_one_test("kind", KINDS)
def test_a_saved_model_keeps_the_recipe_of_its_cache_and_logits(tmp_path, kind):
    quantize(write_checkpoint(tmp_path / "source", kind), tmp_path / "low", RECIPE)
    model = load(tmp_path / "low")
    model.save_pretrained(tmp_path / "saved")
    assert stored(tmp_path / "saved") == RECIPE.to_dict()
    assert Recipe.read(tmp_path / "saved" / "recipe.yaml") == RECIPE
    ids = torch.tensor([[5, 17, 3, 42, 8, 1, 60]])
    own_class = {"phi4flash": SambaY, "motif3": Motif3}.get(kind, DiffTransformer)
    openings = (load, AutoModelForCausalLM.from_pretrained, own_class.from_pretrained)
    for opened in (opening(tmp_path / "saved") for opening in openings):
        assert opened.recipe == RECIPE
        torch.testing.assert_close(opened(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
        opened.save_pretrained(tmp_path / "again")
        assert stored(tmp_path / "again") == RECIPE.to_dict()


def test_what_is_saved_is_the_recipe_of_that_moment(tmp_path):
    model = load(write_checkpoint(tmp_path / "source", "unilm-v2"), RECIPE)
    model.save_pretrained(tmp_path / "low")
    model.apply_recipe(Recipe())
    model.save_pretrained(tmp_path / "plain")
    assert stored(tmp_path / "low") == RECIPE.to_dict()
    assert stored(tmp_path / "plain") is None
    assert load(tmp_path / "plain").recipe == Recipe()
    assert not (tmp_path / "plain" / "recipe.yaml").exists()


@pytest.fixture
def kept(tmp_path):
    """A folder that has a recipe of cache and logits alone."""
    quantize(write_checkpoint(tmp_path / "source", "unilm-v1"), tmp_path / "kept", RECIPE)
    return tmp_path / "kept"


def test_weights_are_quantized_beside_the_sources_recipe_and_that_is_said(kept, tmp_path):
    report = quantize(kept, tmp_path / "low", Recipe.of(weights="8:row", logits="6:row:shift"))
    assert stored(tmp_path / "low") == Recipe.of(**{**arguments(RECIPE), "weights": "8:row"}).to_dict()
    assert load(tmp_path / "low").recipe.residual == 3
    carried = "k 4:row, *.layers.1.*.k 8:row, v 4:row, residual 3"
    assert report.notes == (
        f"the source's recipe is kept where this one has 16 bits: {carried}; replace it with an override "
        "such as '*.k=16'",
    )
    assert report.notes[0] in report.summary()


def arguments(recipe):
    return {key: value for key, value in recipe.to_dict().items() if key != "rounding"}


def test_what_a_new_recipe_says_replaces_the_sources_and_that_is_said(kept, tmp_path):
    report = quantize(kept, tmp_path / "low", Recipe.of(weights="8:row", kv="8", logits="4:row"))
    assert load(tmp_path / "low").recipe == Recipe.of(weights="8:row", kv="8", logits="4:row")
    assert report.notes == (
        "k 8:row replaces the source's k 4:row, *.layers.1.*.k 8:row",
        "v 8:row replaces the source's v 4:row",
        "logits 4:row replaces the source's logits 6:row:shift",
        "residual 0 replaces the source's residual 3",
    )


def test_an_override_gives_16_bits_again(kept, tmp_path):
    quantize(kept, tmp_path / "low", Recipe.of(weights="8:row", overrides={"*.k": "16"}))
    assert not any(scheme.quantizes for scheme in load(tmp_path / "low").recipe.schemes_of("k"))
    assert str(load(tmp_path / "low").recipe.v) == "4:row"


def test_the_dtype_that_a_model_runs_in_goes_along(tmp_path):
    source = write_checkpoint(tmp_path / "source", "unilm-v2")
    quantize(source, tmp_path / "half", RECIPE, dtype="bfloat16")
    quantize(tmp_path / "half", tmp_path / "low", "8:row")
    assert load(source).dtype == load(tmp_path / "half").dtype == load(tmp_path / "low").dtype == torch.float32


@in_one_test(("kind", "to"), [("unilm-v1", "diffllama"), ("llama", "diff-v2")])
def test_a_converted_checkpoint_keeps_the_recipe_and_that_is_said(tmp_path, kind, to):
    quantize(write_checkpoint(tmp_path / "source", kind), tmp_path / "kept", RECIPE)
    report = convert(tmp_path / "kept", tmp_path / "out", to)
    assert load(tmp_path / "out").recipe == report.recipe == RECIPE
    assert Recipe.read(tmp_path / "out" / "recipe.yaml") == RECIPE
    assert repr(RECIPE) in report.summary()
    assert repr(RECIPE) in (tmp_path / "out" / "README.md").read_text()
