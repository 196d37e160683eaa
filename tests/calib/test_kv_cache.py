"""Ranges that an export's quantized cache is calibrated with where the user gives none."""

import pytest
import torch

import diffquant
from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.calib.calibration.observe import observe_ranges
from diffquant.calib.calibration.observers import Observer
from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from diffquant.quantization.loading import load, load_by_layer
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids


def test_a_plain_checkpoint_with_rounded_weights_has_the_ranges_of_the_quantized_one(tmp_path):
    plain, quantized = write_checkpoint(tmp_path / "plain", "unilm-v1"), tmp_path / "quantized"
    recipe, ids = Recipe.of(weights="4:g32"), torch.randint(90, (2, 32))
    diffquant.quantize(plain, quantized, recipe)
    simulated, stored = calibrate_cache(plain, recipe, ids).tensors, calibrate_cache(quantized, ids=ids).tensors
    assert simulated.keys() == stored.keys()
    assert all(torch.equal(simulated[name], stored[name]) for name in stored)
    exact = calibrate_cache(plain, ids=ids).tensors
    assert not torch.equal(exact["layers.1.k"], stored["layers.1.k"])


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", "llama")
    tiny_lm.tokenizer().save_pretrained(source)
    with pytest.raises(UsageError, match=r"token \d+ \(.*embedding has 90 rows"):
        calibrate_cache(source)


@pytest.mark.parametrize("name", ["diffllama", "phi4flash"])
@pytest.mark.parametrize("weights", ["16", "4:g16"])
def test_a_model_that_is_read_layer_by_layer_gives_the_same_ranges_and_keeps_none(name, weights, tmp_path):
    source = open_source(write_checkpoint(tmp_path / "model", name))
    recipe, ids = Recipe.of(weights=weights), random_ids(2, 24)
    model = load_by_layer(source, recipe)
    ranges = observe_ranges(model, ids, ("k", "v"), Observer("absmax"))
    whole = observe_ranges(load(source, recipe, torch.float32), ids, ("k", "v"), Observer("absmax"))
    assert set(ranges) == set(whole)
    for place, wanted in whole.items():
        torch.testing.assert_close(ranges[place], wanted, rtol=1e-5, atol=0)
    layers = {parameter.device.type for parameter in model.model.layers.parameters()}
    assert layers == {"meta"}
