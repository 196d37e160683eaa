"""KL of caches as generation reads them: against whole texts read at once, and the preset against its table."""

import json

import pytest
import torch

from diffquant import Recipe, load
from diffquant.data import pocket_models
from diffquant.errors import UsageError
from diffquant.measure.stats import mean_interval
from diffquant.measure.sweep.subject import kv_bytes_per_token
from research.pages.raw import raw
from research.studies.kv_decoded import FORMS, LONG, CacheForm, decoded, is_beaten, measure_forms
from tests.support.checkpoints import SOURCES, write_checkpoint
from tests.support.models import random_ids

BEST = CacheForm("4:c32", "4:row:rotated", 64)


@pytest.mark.parametrize("name", SOURCES)
def test_tokens_read_one_by_one_behind_a_prompt_are_those_of_a_whole_text(tmp_path, name):
    model, ids = load(write_checkpoint(tmp_path / "model", name)), random_ids(batch=3, length=19)
    states = decoded(model, ids, 7)
    with torch.no_grad():
        whole = model(ids).logits[:, -7:]
    torch.testing.assert_close(states.logits(), whole, rtol=0, atol=1e-4)


def test_a_residual_keeps_what_a_whole_text_would_round(tmp_path):
    model, ids = load(write_checkpoint(tmp_path / "model", "diffllama")), random_ids(batch=2, length=19)
    exact = decoded(model, ids, 3).logits()
    model.apply_recipe(CacheForm("2:row", "2:row", 19).recipe(2))
    torch.testing.assert_close(decoded(model, ids, 3).logits(), exact, rtol=0, atol=1e-5)
    model.apply_recipe(CacheForm("2:row", "2:row", 8).recipe(2))
    assert (decoded(model, ids, 3).logits() - exact).abs().max() > 1e-3


@pytest.mark.parametrize("form", [*FORMS, CacheForm("4:c64", "4:row", 64)], ids=lambda form: form.name)
def test_a_cache_is_found_by_its_name(form):
    assert CacheForm.named(form.name) == form


@pytest.mark.parametrize("name", ["4:row", "4:row,4:row", "4:row, 4:row, residual", "4:row, 4:row, ends", "4:row, "])
def test_a_name_that_no_cache_has_is_refused(name):
    with pytest.raises(UsageError, match="no cache"):
        CacheForm.named(name)


def test_forms_are_measured_once_each_and_named_by_what_they_are(tmp_path):
    forms = (CacheForm("4:row", "3:row:rotated"), CacheForm("8:row", "8:row", 4, True))
    file = tmp_path / "kv.json"
    model = pocket_models("prose")[1]
    measured = measure_forms(model, forms, 250, 24, 4, 8, file)
    assert list(measured["results"]) == ["4:row, 3:row:rotated", "8:row, 8:row, residual 4, ends 16"]
    low, high = measured["results"].values()
    assert low["prose"]["kl"] > 10 * high["prose"]["kl"] > 0
    assert mean_interval(low["prose"]["kl_by_window"]).mean == pytest.approx(low["prose"]["kl"])
    assert measure_forms(model, forms, 250, 24, 4, 8, file)["results"] == json.loads(file.read_text())["results"]


def test_a_cache_is_beaten_by_one_of_as_few_bytes_and_less_kl():
    results = {
        name: {"bytes": size, "prose": {"kl": kl}}
        for name, size, kl in (("a", 10, 0.3), ("b", 10, 0.2), ("c", 9, 0.25), ("d", 12, 0.21))
    }
    assert [name for name in results if is_beaten(results, name, "prose", "bytes")] == ["a", "d"]


@pytest.mark.parametrize("model", pocket_models("prose"), ids=lambda path: path.name)
def test_the_preset_stores_the_bytes_of_its_row(model):
    recipe = Recipe.parse("kv-4bit-best")
    assert recipe == BEST.recipe(5)
    loaded = load(model, recipe)
    row = raw(f"kv-decoded/{model.name}.json")["results"][BEST.name]
    assert kv_bytes_per_token(loaded, LONG) == row["bytes_long"]
    loaded.apply_recipe(Recipe())
    assert row["bytes_long"] < 0.3 * kv_bytes_per_token(loaded, LONG)
