"""A KV cache's scales fit random models, and a calibration that read too little is told from a wrong folder."""

import shutil
from dataclasses import replace

import pytest

pytest.importorskip("onnxruntime")

import diffquant
from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.data import pocket_models
from diffquant.errors import ToleranceError
from diffquant.onnx import ExportOptions, export, verify
from tests.support.models import random_diffllama
from tests.support.thorough import sampled

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 2048, "tie_word_embeddings": True}


def random_model(folder, seed):
    """A stock DiffLlama of random weights, whose attention is flat, with a tokenizer of English prose."""
    random_diffllama(seed, **SIZES).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket_models("prose")[0] / name, folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("random") / "model", 0)


@pytest.mark.parametrize("seed", sampled(range(7), 2))
def test_the_first_commands_of_the_readme_pass_on_a_random_model(tmp_path, seed):
    random_model(tmp_path / "model", seed)
    diffquant.quantize(tmp_path / "model", tmp_path / "4bit", recipe={"weights": "4:g32", "kv": 8})
    report = diffquant.export(tmp_path / "4bit", tmp_path / "onnx", embed=8)
    assert "too narrow" not in report.summary()
    assert diffquant.verify(tmp_path / "onnx", tmp_path / "4bit", threads=1).cache.value < 3


def test_export_warns_of_a_calibration_that_loses_much_on_text_held_out(model, tmp_path):
    ranges = calibrate_cache(model)
    assert 1 < ranges.settings["held_out"]["loss"] < 3
    narrow = replace(ranges, settings=ranges.settings | {"held_out": {"layer": 3, "loss": 35.0}})
    summary = export(model, tmp_path / "out", ExportOptions(kv_bits=8), ranges=narrow).summary()
    assert "warning: KV-cache calibration is too narrow in layer 3: 35x the error of fitted scales" in summary
    assert "kv=16" in summary


@pytest.mark.parametrize(("by", "found", "text"), [(0.2, "narrow", "more text"), (30.0, "wide", "other text")])
def test_verify_names_the_layer_that_a_calibration_does_not_fit(model, tmp_path, by, found, text):
    ranges = calibrate_cache(model)
    tensors = {name: x * by if name.startswith("layers.2.") else x for name, x in ranges.tensors.items()}
    export(model, tmp_path / "out", ExportOptions(kv_bits=8), ranges=replace(ranges, tensors=tensors))
    message = (
        rf"calibration is too {found} in layer 2: [0-9.]+x the error of fitted scales \(limit 4x\); recalibrate on "
        rf"{text} \(diffquant calibrate, then export with scales\) or export with kv=16"
    )
    with pytest.raises(ToleranceError, match=message) as caught:
        verify(tmp_path / "out", model, threads=1)
    result = caught.value.result
    assert (result.cache_layer, result.scales.passed, result.cache.passed) == (2, True, False)
