"""What `plan` says a model takes is what `quantize` writes and a cache holds."""

import json

import pytest
import torch
from typer.testing import CliRunner

import diffquant
from diffquant.errors import UsageError
from diffquant.model.cache import PackedCache
from diffquant.verbs.cli import app
from tests.support import tiny_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize("weights", ["16", "8:row", "4:g16", "3:g16"])
def test_weights_take_what_quantize_writes(model, tmp_path, weights):
    written = diffquant.quantize(model, tmp_path / "out", {"weights": weights, "kv": 8})
    assert diffquant.plan(model, {"weights": weights}).weights == written.bytes_after
    # What is packed already is planned as it is.
    packed = diffquant.plan(tmp_path / "out")
    assert packed.weights == written.bytes_after
    assert str(packed.recipe.k) == "8:row"
    if weights == "8:row":
        assert diffquant.plan(tmp_path / "out", {"kv": 16}).cache == diffquant.plan(model).cache
        with pytest.raises(UsageError, match="out has quantized weights already"):
            diffquant.plan(tmp_path / "out", {"weights": "4:g16"})


@pytest.mark.parametrize(
    "cache", [{}, {"kv": 8}, {"k": "4:c32", "v": "4:row:rotated", "residual": 64}, {"kv": "6:g8"}], ids=repr
)
@pytest.mark.parametrize(("context", "batch"), [(200, 1), (97, 3)])
def test_a_cache_takes_what_it_holds_after_so_many_tokens(model, cache, context, batch):
    loaded = diffquant.load(model, diffquant.Recipe.of(**cache), device="cpu")
    held = PackedCache(diffquant.Recipe.of(**cache), loaded.config.num_hidden_layers)
    ids = torch.randint(0, 50, (batch, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loaded(ids, past_key_values=held)
    assert diffquant.plan(model, cache or None, context=context, batch=batch).cache == held.nbytes


def test_the_longest_context_fits_and_one_token_more_does_not(model):
    plan = diffquant.plan(model, {"kv": 8}, context=64, batch=2, memory="2M")
    assert (plan.memory, plan.fits) == (2_000_000, plan.peak <= 2_000_000)
    at = diffquant.plan(model, {"kv": 8}, context=plan.longest, batch=2, memory="2M")
    over = diffquant.plan(model, {"kv": 8}, context=plan.longest + 1, batch=2, memory="2M")
    assert (at.fits, over.fits) == (True, False)
    none = diffquant.plan(model, memory="1K")
    assert (none.fits, none.longest) == (False, 0)
    assert str(none).startswith("DOES NOT FIT")


def test_weights_that_fit_without_a_token_are_not_said_to_be_too_large(model):
    weights = diffquant.plan(model).weights
    for batch, memory, said in (
        (1, weights - 1, "with 1 sequence, the weights alone do not fit"),
        (1000, weights + 1, "with 1000 sequences, no token fits in addition to the weights"),
    ):
        assert str(diffquant.plan(model, batch=batch, memory=memory)).splitlines()[-1] == said


def test_the_command_fits_80_columns_and_gives_json(model):
    shown = CliRunner().invoke(app, ["plan", str(model), "--kv", "8", "--context", "128", "--memory", "24G"])
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines()[1:])) <= 80
    data = CliRunner().invoke(app, ["plan", str(model), "--context", "128", "--memory", "24G", "--json"])
    assert json.loads(data.output)["fits"] is True
