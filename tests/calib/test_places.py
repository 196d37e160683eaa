"""Outliers and ranges of models that are spread over memory and disk are those of models in memory."""

import json

import accelerate.utils
import pytest
import torch
from safetensors.torch import load_file

import diffquant
from diffquant.errors import UsageError
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint


@pytest.fixture(scope="module", params=["diffllama", "unilm-v2"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    write_checkpoint(folder, request.param, vocab_size=len(tiny_lm.tokenizer()), max_position_embeddings=512)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


def test_the_command_line_spreads_a_model_larger_than_memory(model, tmp_path, on_disk, run, monkeypatch):
    nbytes = sum(parameter.nbytes for parameter in diffquant.load(model).parameters())
    monkeypatch.setattr(accelerate.utils, "get_balanced_memory", lambda *_, **__: {"cpu": nbytes // 2})
    reading = ["--tokens", 128, "--window", 32, "--dtype", "float32", "--json"]

    def read(*arguments):
        code, out, err = run(*arguments, *reading)
        assert code == 0, err
        return json.loads(out)

    spread = ["--device-map", "auto", "--offload-folder", tmp_path / "offload"]
    whole = read("outliers", model)
    assert not on_disk
    assert read("outliers", model, *spread)["models"] == whole["models"]
    assert on_disk
    on_disk.clear()
    read("calibrate", model, "-o", tmp_path / "whole.safetensors")
    assert not on_disk
    read("calibrate", model, "-o", tmp_path / "spread.safetensors", *spread)
    assert on_disk
    whole, from_disk = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "spread"))
    torch.testing.assert_close(from_disk, whole, rtol=0, atol=0)


def test_places_are_checked_before_the_model_is_read(model, tmp_path):
    with pytest.raises(UsageError, match="leave out device or device_map"):
        diffquant.calibrate(model, tmp_path / "out.safetensors", device="cpu", device_map="auto")
    with pytest.raises(UsageError, match="give device_map='auto' too"):
        diffquant.calibrate(model, tmp_path / "out.safetensors", offload_folder=tmp_path)
