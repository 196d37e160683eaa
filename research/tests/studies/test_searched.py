"""Searched widths store no more than the uniform one beside them, and KL is torch's of the loaded models."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div

from diffquant import quantize
from diffquant.calib.search.search import Search
from diffquant.data import books_text
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from research.studies import searched
from research.studies.searched import SEARCHED, TEXTS, UNIFORM, gain, measure_searches, searched_table
from tests.support import tiny_lm


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched")
    model = tiny_lm.write_llama(folder / "model")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(searched, "_WINDOW", 32)
        patched.setattr(searched, "Search", partial(Search, windows=1, window=32, check_characters=300))
        return model, json.loads(json.dumps(measure_searches(model, [4, 5], 600, folder)))


def test_the_files_that_quantize_writes_of_searched_widths_are_not_larger(measured, tmp_path):
    model, result = measured
    for width, both in result["results"].items():
        sizes = {}
        for name in (SEARCHED, UNIFORM):
            recipe = Recipe.from_dict(both[name]["recipe"])
            quantize(model, tmp_path / f"{width}-{name}", recipe)
            sizes[name] = (tmp_path / f"{width}-{name}" / "model.safetensors").stat().st_size
        # Headers name the tensors' places, which take a digit more or less.
        assert sizes[SEARCHED] < sizes[UNIFORM] + 64
        assert both[SEARCHED]["bytes"] <= both[UNIFORM]["bytes"]


def test_kl_is_torchs_between_the_loaded_models(measured):
    model, result = measured
    text = books_text()
    ids = torch.tensor([[0, *tiny_lm.tokenizer().encode(text[len(text) // 2 :][:600])]])[:, :32]
    exact = load(model, dtype=torch.float32)
    for name in (SEARCHED, UNIFORM):
        narrow = load(model, Recipe.from_dict(result["results"]["4"][name]["recipe"]), dtype=torch.float32)
        with torch.inference_mode():
            p, q = (m(ids).logits[0].log_softmax(-1) for m in (exact, narrow))
        expected = kl_div(q, p, reduction="batchmean", log_target=True).item()
        assert result["results"]["4"][name]["prose"]["kl_by_window"][0] == pytest.approx(expected, rel=1e-3)


def test_the_gain_is_the_paired_difference_over_windows(measured):
    _, result = measured
    ours, plain = (result["results"]["5"][name]["elsewhere"] for name in (SEARCHED, UNIFORM))
    changes, weights = np.subtract(ours["kl_by_window"], plain["kl_by_window"]), ours["tokens_by_window"]
    change = gain(result, "5", "elsewhere")
    assert change.mean == pytest.approx(np.average(changes, weights=weights))
    assert change.mean == pytest.approx(ours["kl"] - plain["kl"])


def test_the_table_has_both_sizes_and_both_texts(measured):
    _, result = measured
    table = searched_table([result])
    assert table.count("\n") == 1 + len(result["results"])
    for both in result["results"].values():
        assert all(f"{both[name]['bytes']:,}" in table for name in (SEARCHED, UNIFORM))
        assert all(f"{both[name][text]['kl']:.4f}" in table for name in (SEARCHED, UNIFORM) for text in TEXTS)
