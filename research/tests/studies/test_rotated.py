"""Rotated weights at 16 bits compute the source's function, and KL is torch's of the loaded models."""

import json

import pytest
import torch
from torch.nn.functional import kl_div

from diffquant import convert
from diffquant.data import books_text
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from research.studies import rotated
from research.studies.rotated import NARROW, ROTATED, SOURCE, TEXTS, change, compared, name_of, rotated_table
from tests.support import tiny_lm


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotated")
    model = tiny_lm.write_llama(folder / "model")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rotated, "_WINDOW", 32)
        rotated.measure_rotations(model, ["mse"], 600, folder / "rotated.json")
    return model, json.loads((folder / "rotated.json").read_text())


def test_at_16_bits_only_the_dtype_costs_anything(measured):
    _, result = measured
    exact, narrow = (result["results"][name_of(which, "16", "nearest")]["prose"]["kl"] for which in (ROTATED, NARROW))
    assert abs(exact) < 1e-7 < narrow


def test_kl_is_torchs_between_the_source_and_the_rounded_models(measured, tmp_path):
    model, result = measured
    text = books_text()
    ids = torch.tensor([[0, *tiny_lm.tokenizer().encode(text[len(text) // 2 :][:600])]])[:, :32]
    convert(model, tmp_path / "rotated", "rotated")
    exact, recipe = load(model, dtype=torch.float32), Recipe.of(weights="3:row", rounding="mse")
    for which, folder in ((SOURCE, model), (ROTATED, tmp_path / "rotated")):
        rounded = load(folder, recipe, dtype=torch.float32)
        with torch.inference_mode():
            p, q = (each(ids).logits[0].log_softmax(-1) for each in (exact, rounded))
        expected = kl_div(q, p, reduction="batchmean", log_target=True).item()
        kl = result["results"][name_of(which, "3:row", "mse")]["prose"]["kl_by_window"][0]
        assert kl == pytest.approx(expected, rel=1e-3)


def test_the_table_has_a_row_for_each_scheme_with_the_change_of_both_texts(measured):
    _, result = measured
    table = rotated_table([result]).splitlines()
    assert len(table) == 2 + len(compared(result)) >= 4
    for text in TEXTS:
        kl = [result["results"][name_of(which, "3:row", "mse")][text]["kl"] for which in (SOURCE, ROTATED)]
        assert change(result, "3:row", "mse", text).mean == pytest.approx(kl[1] - kl[0], abs=1e-9)
        assert f"{kl[0]:.4f} → {kl[1]:.4f}" in table[-1]
