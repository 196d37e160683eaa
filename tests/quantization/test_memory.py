"""Plans: what they say is what `quantize` writes and a cache holds, of folders, models in memory and rules unnamed."""

import json
import logging

import pytest
import torch
from typer.testing import CliRunner

import diffquant
from diffquant.errors import UsageError
from diffquant.model.cache import PackedCache
from diffquant.recipe import Recipe
from diffquant.verbs.cli import app
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test


@pytest.mark.parametrize("weights", ["16", "8:row", "4:g16", "3:g16"])
def test_weights_take_what_quantize_writes(checkpoint, tmp_path, weights):
    written = diffquant.quantize(checkpoint, tmp_path / "out", {"weights": weights, "kv": 8})
    assert diffquant.plan(checkpoint, {"weights": weights}).weights == written.bytes_after
    # What is packed already is planned as it is.
    packed = diffquant.plan(tmp_path / "out")
    assert packed.weights == written.bytes_after
    assert str(packed.recipe.k) == "8:row"


def test_packed_weights_are_planned_as_they_run(checkpoint, tmp_path):
    diffquant.quantize(checkpoint, tmp_path / "out", {"weights": "8:row", "kv": 8})
    assert diffquant.plan(tmp_path / "out", {"kv": 16}).cache == diffquant.plan(checkpoint).cache
    with pytest.raises(UsageError, match="out has quantized weights already"):
        diffquant.plan(tmp_path / "out", {"weights": "4:g16"})


@pytest.mark.parametrize(
    "cache", [{}, {"kv": 8}, {"k": "4:c32", "v": "4:row:rotated", "residual": 64}, {"kv": "6:g8"}], ids=repr
)
@pytest.mark.parametrize(("context", "batch"), [(200, 1), (97, 3)])
def test_a_cache_takes_what_it_holds_after_so_many_tokens(checkpoint, cache, context, batch):
    loaded = diffquant.load(checkpoint, diffquant.Recipe.of(**cache), device="cpu")
    held = PackedCache(diffquant.Recipe.of(**cache), loaded.config.num_hidden_layers)
    ids = torch.randint(0, 50, (batch, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loaded(ids, past_key_values=held)
    assert diffquant.plan(checkpoint, cache or None, context=context, batch=batch).cache == held.nbytes


def test_the_longest_context_fits_and_one_token_more_does_not(checkpoint):
    plan = diffquant.plan(checkpoint, {"kv": 8}, context=64, batch=2, memory="2M")
    assert (plan.memory, plan.fits) == (2_000_000, plan.peak <= 2_000_000)
    at = diffquant.plan(checkpoint, {"kv": 8}, context=plan.longest, batch=2, memory="2M")
    over = diffquant.plan(checkpoint, {"kv": 8}, context=plan.longest + 1, batch=2, memory="2M")
    assert (at.fits, over.fits) == (True, False)
    none = diffquant.plan(checkpoint, memory="1K")
    assert (none.fits, none.longest) == (False, 0)
    assert str(none).startswith("DOES NOT FIT")


def test_memory_for_more_tokens_than_are_tried_is_planned_in_blocks_too(checkpoint):
    assert diffquant.plan(checkpoint, {"k": "4:c32"}, context=64, memory="9999T").longest == 2**24


def test_weights_that_fit_without_a_token_are_not_said_to_be_too_large(checkpoint):
    weights = diffquant.plan(checkpoint).weights
    for batch, memory, said in (
        (1, weights - 1, "with 1 sequence, the weights alone do not fit"),
        (1000, weights + 1, "with 1000 sequences, no token fits in addition to the weights"),
    ):
        assert str(diffquant.plan(checkpoint, batch=batch, memory=memory)).splitlines()[-1] == said


def test_the_command_fits_80_columns_and_gives_json(checkpoint):
    shown = CliRunner().invoke(app, ["plan", str(checkpoint), "--kv", "8", "--context", "128", "--memory", "24G"])
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines()[1:])) <= 80
    data = CliRunner().invoke(app, ["plan", str(checkpoint), "--context", "128", "--memory", "24G", "--json"])
    assert json.loads(data.output)["fits"] is True


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


def test_a_model_with_adapters_in_the_place_of_weights_is_refused(tmp_path):
    model = diffquant.load(write_checkpoint(tmp_path / "given", "llama"))
    attention = model.model.layers[1].self_attn
    attention.q_proj = torch.nn.ModuleDict({"base_layer": attention.q_proj})
    with pytest.raises(UsageError, match=r"no longer has model\.layers\.1\.self_attn\.q_proj\.weight: merge"):
        diffquant.quantize(model, recipe={"weights": "8:row"})


def rule_of(folder):
    return json.loads((folder / "diffquant.json").read_text())["rounding"]["name"]


@in_one_test("given", ["4:g16", {"weights": "4:g16"}])
def test_what_is_typed_without_a_rule_is_rounded_by_mse(checkpoint, tmp_path, given):
    report = diffquant.quantize(checkpoint, tmp_path / "out", given)
    assert rule_of(tmp_path / "out") == "mse"
    assert "by mse" in report.summary()
    nearest = diffquant.quantize(checkpoint, tmp_path / "nearest", given, rounding="nearest")
    assert all(
        ours.error < theirs.error
        for ours, theirs in zip(
            sorted(report.errors, key=lambda e: e.name), sorted(nearest.errors, key=lambda e: e.name), strict=True
        )
    )


def test_a_stored_recipe_without_a_rule_keeps_its_meaning(checkpoint, tmp_path):
    diffquant.quantize(checkpoint, tmp_path / "old", {"weights": "4:g16"}, rounding="nearest")
    stored = tmp_path / "old" / "recipe.yaml"
    assert "rounding" not in stored.read_text()
    for name, recipe in {"file": stored, "text": str(stored), "object": Recipe.of(weights="4:g16")}.items():
        diffquant.quantize(checkpoint, tmp_path / name, recipe)
        assert rule_of(tmp_path / name) == "nearest"
        again, old = ((tmp_path / each / "model.safetensors").read_bytes() for each in (name, "old"))
        assert again == old


def test_schemes_that_mse_cannot_do_are_rounded_to_nearest_and_it_is_said(checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO, "diffquant.verbs")
    diffquant.quantize(checkpoint, tmp_path / "out", {"weights": "8:tensor"})
    assert rule_of(tmp_path / "out") == "nearest"
    assert "rounding by nearest, because" in caplog.text


@in_one_test(("effort", "rule"), [("fast", "mse"), ("balanced", "gptq"), ("best", "tuned")])
def test_an_effort_is_a_rule(checkpoint, tmp_path, effort, rule):
    class Planned(Exception):
        pass

    def stop(plan):
        assert plan.recipe.rounding.name == rule
        raise Planned

    with pytest.raises(Planned):
        diffquant.quantize(checkpoint, tmp_path / "out", {"weights": "4:g16"}, effort=effort, on_plan=stop)


def test_an_effort_beside_a_rule_and_one_that_is_none_are_refused(checkpoint, tmp_path):
    with pytest.raises(UsageError, match="effort chooses the rounding rule; leave out rounding"):
        diffquant.quantize(checkpoint, tmp_path / "out", {"weights": "4:g16"}, effort="best", rounding="mse")
    with pytest.raises(UsageError, match="unknown effort 'bets'; did you mean 'best'"):
        diffquant.quantize(checkpoint, tmp_path / "out", {"weights": "4:g16"}, effort="bets")
