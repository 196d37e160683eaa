"""Calibrated ranges in an export: the right channel of the right head, and only of the same checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.calib.calibration.observe import observe_ranges
from diffquant.calib.calibration.observers import Observer
from diffquant.checkpoints.ranges import Ranges, write_ranges
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, UsageError
from diffquant.onnx.exporter import export
from diffquant.onnx.options import ExportOptions
from diffquant.onnx.runtime.interface import load_graph
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.onnx.verification.caches import read_cache_scales
from diffquant.onnx.verifier import verify
from diffquant.quantization.loading import load
from tests.support.checkpoints import SOURCES, write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

IDS = random_ids(3, 40).numpy()


def calibrated(source: Path, file: Path, observer: Observer, targets=("k", "v")) -> Path:
    tensors = observe_ranges(load(source, dtype=torch.float32), torch.tensor(IDS), targets, observer)
    bits = observer.bits if observer.kind == "mse" else None
    write_ranges(file, Ranges(open_source(source).fingerprint, {}, bits, tensors))
    return file


def bounds_of(key: np.ndarray, spec) -> np.ndarray:
    """What no position exceeds in exported keys [B, h_kv, S, dk]: lengths of channels that rotate into each other."""
    if spec.rope == "half" and (spec.maps == 1 or spec.shared_k):
        first, second = np.split(key, 2, -1)
        return np.tile(np.hypot(first, second), 2)
    return np.repeat(np.hypot(key[..., 0::2], key[..., 1::2]), 2, -1)


@pytest.mark.parametrize("name", sampled(SOURCES, 3))
def test_scales_are_those_of_the_cache_that_the_exported_model_fills_itself(tmp_path, name):
    source = write_checkpoint(tmp_path / "source", name)
    export(source, tmp_path / "float")
    model = OnnxModel(tmp_path / "float", 1)
    _, cache = model.run(IDS, np.ones_like(IDS), model.allocate_cache(len(IDS)), outputs=())
    spec = open_source(source).spec
    export(source, tmp_path / "out", ExportOptions(kv_bits=8), ranges=calibrate_cache(source, ids=torch.tensor(IDS)))
    scales = read_cache_scales(load_graph(tmp_path / "out"))
    assert scales.keys() == {0, 1}
    for layer, (k_scale, v_scale) in scales.items():
        key, value = (value.numpy() for value in cache[2 * layer : 2 * layer + 2])
        np.testing.assert_allclose(k_scale, 1.1 * bounds_of(key, spec).max((0, 2), keepdims=True) / 127, rtol=2e-4)
        np.testing.assert_allclose(v_scale, 1.1 * np.abs(value).max((0, 2), keepdims=True) / 127, rtol=2e-4)
    assert verify(tmp_path / "out", source).passed


@in_one_test(
    ("observer", "bits"),
    [
        (Observer("mse", bits=4), 4),
        (Observer("percentile", percentile=99.0), 4),
        # At 99 % it depends on the weights: of five random ones one costs more than verify grants.
        (Observer("percentile", percentile=99.9), 8),
    ],
)
def test_ranges_that_clip_are_within_what_verify_grants_the_cache(tmp_path, observer, bits):
    source = write_checkpoint(tmp_path / "source", "unilm-v1")
    scales = calibrated(source, tmp_path / "scales.safetensors", observer)
    export(source, tmp_path / "out", ExportOptions(kv_bits=bits), ranges=scales)
    assert verify(tmp_path / "out", source).passed


def test_a_file_of_ranges_gives_the_model_that_the_ranges_give(tmp_path):
    source = write_checkpoint(tmp_path / "source", "diffllama")
    ranges = calibrate_cache(source, ids=torch.tensor(IDS))
    write_ranges(tmp_path / "scales.safetensors", ranges)
    for name, given in (("object", ranges), ("file", tmp_path / "scales.safetensors")):
        export(source, tmp_path / name, ExportOptions(kv_bits=4), ranges=given)
    assert (tmp_path / "object" / "model.onnx").read_bytes() == (tmp_path / "file" / "model.onnx").read_bytes()


def test_ranges_of_another_checkpoint_are_refused_and_nothing_is_left(tmp_path):
    source = write_checkpoint(tmp_path / "source", "llama")
    other = write_checkpoint(tmp_path / "other", "diffllama")
    file = calibrated(other, tmp_path / "s.safetensors", Observer("absmax"))
    for given in (file, calibrate_cache(other, ids=torch.tensor(IDS))):
        with pytest.raises(CheckpointError, match=r"calibrated on another model.*diffquant calibrate"):
            export(source, tmp_path / "out", ExportOptions.parse(kv_bits=8), ranges=given)
    assert not (tmp_path / "out").exists()


@in_one_test(
    ("kv_bits", "observer", "targets", "message"),
    [
        (16, Observer("absmax"), ("k", "v"), "give kv=8"),
        (4, Observer("mse", bits=8), ("k", "v"), "clipped for 8 bits"),
        (8, Observer("absmax"), ("k",), "do not include v"),
    ],
)
def test_ranges_that_do_not_fit_the_options_are_refused(tmp_path, kv_bits, observer, targets, message):
    source = write_checkpoint(tmp_path / "source", "llama")
    file = calibrated(source, tmp_path / "s.safetensors", observer, targets)
    with pytest.raises(UsageError, match=message):
        export(source, tmp_path / "out", ExportOptions.parse(kv_bits=kv_bits), ranges=file)
