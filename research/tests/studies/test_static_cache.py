"""Static scales of a cache are measured on text that they were not found on, and cost what a loaded model says."""

import json

import pytest
import torch
from torch.nn.functional import kl_div

from diffquant.calib.calibration.observe import observe_ranges
from diffquant.calib.calibration.observers import Observer
from diffquant.data import books_text
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from research.studies import static_cache
from research.studies.static_cache import CALIBRATIONS, SCORED, USUAL, CacheRow, cache_table, measure_cache
from tests.support import tiny_lm


def test_no_calibration_reads_a_passage_that_is_scored_but_the_one_that_says_so():
    scored = {passage for passage, _ in SCORED}
    leaking = [name for name, windows in CALIBRATIONS.items() if scored & {passage for passage, _ in windows}]
    assert leaking == ["6 of the 8 that are scored"]


@pytest.mark.parametrize("name", [name for name in CALIBRATIONS if "24" not in name and "2 of" not in name])
def test_calibrations_differ_in_text_alone_unless_they_name_their_number(name):
    assert len(set(CALIBRATIONS[name])) == 6


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    model = tiny_lm.write_llama(tmp_path_factory.mktemp("models") / "model")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(static_cache, "WINDOW", 32)
        rows = [CacheRow(4), CacheRow(4, "absmax", USUAL), CacheRow(4, "mse", USUAL)]
        patched.setattr(static_cache, "ROWS", rows)
        return model, json.loads(json.dumps(measure_cache(model)))


def test_kl_is_torchs_between_the_loaded_models(measured):
    model, result = measured
    exact, narrow = load(model, dtype=torch.float32), load(model, dtype=torch.float32)
    tokenizer, text = tiny_lm.tokenizer(), books_text()
    length = len(text) // 16

    def window(passage, number):
        ids = [tokenizer.bos_token_id or 0, *tokenizer.encode(text[passage * length : (passage + 1) * length])]
        return torch.tensor(ids[32 * number : 32 * (number + 1)])

    seen = torch.stack([window(*at) for at in CALIBRATIONS[USUAL]])
    narrow.model.ranges = observe_ranges(narrow, seen, ("k", "v"), Observer("absmax"))
    narrow.apply_recipe(Recipe.of(kv="4:static"))
    scored = window(*SCORED[3])[None]
    with torch.inference_mode():
        p, q = (m(scored).logits[0].log_softmax(-1) for m in (exact, narrow))
    expected = kl_div(q, p, reduction="batchmean", log_target=True).item()
    assert result["rows"][1]["kl"][3] == pytest.approx(expected, rel=1e-3)
    assert result["16 bits"]["kl"] == pytest.approx([0.0] * 8, abs=1e-6)


def test_the_table_pairs_mse_with_absmax_on_the_same_tokens(measured):
    lines = cache_table(measured[1]).splitlines()
    assert "a token and head" in lines[2]
    absmax, mse = lines[3].split(" | "), lines[4].split(" | ")
    assert absmax[5] == "-"
    assert mse[5].endswith("%")
    assert absmax[2:4] == mse[2:4] == [USUAL, "192"]
