"""Calibrated scales in an export: the right channel of the right head, and only of the same checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")

from diffquant.calib.calibration.calibrate import CalibrationOptions, observe
from diffquant.calib.calibration.observers import Observer
from diffquant.errors import CheckpointError, UsageError
from diffquant.export.exporter import export
from diffquant.export.graph.external import load_graph
from diffquant.export.options import ExportOptions
from diffquant.export.verification.reference import cache_scales
from diffquant.export.verification.verify import verify
from diffquant.loading import load
from diffquant.source.ranges import Ranges, write_ranges
from diffquant.source.source import open_source
from tests.support.checkpoints import SOURCES, write_checkpoint
from tests.support.models import random_ids

IDS = random_ids(3, 40).numpy()


def calibrated(source: Path, file: Path, observer: Observer, targets=("k", "v")) -> Path:
    options = CalibrationOptions(targets=targets, observer=observer)
    tensors, _ = observe(load(source, dtype=torch.float32), torch.tensor(IDS), torch.tensor(IDS), options)
    bits = observer.bits if observer.kind == "mse" else None
    write_ranges(file, Ranges(open_source(source).fingerprint, {}, bits, tensors))
    return file


@pytest.mark.parametrize("name", SOURCES)
def test_absmax_ranges_give_the_scales_that_the_exported_model_finds_itself(tmp_path, name):
    source = write_checkpoint(tmp_path / "source", name)
    options = ExportOptions.parse(kv_bits=8)
    export(source, tmp_path / "run", options, calibration=IDS.tolist())
    scales = calibrated(source, tmp_path / "s.safetensors", Observer("absmax"))
    export(source, tmp_path / "file", options, scales=scales)
    found, wanted = (cache_scales(load_graph(tmp_path / each)) for each in ("file", "run"))
    assert found.keys() == wanted.keys()
    for layer, pair in wanted.items():
        for ours, theirs in zip(found[layer], pair, strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    assert verify(tmp_path / "file", source).passed


def test_scales_of_another_checkpoint_are_refused_and_nothing_is_left(tmp_path):
    source = write_checkpoint(tmp_path / "source", "llama")
    other = write_checkpoint(tmp_path / "other", "diffllama")
    scales = calibrated(other, tmp_path / "s.safetensors", Observer("absmax"))
    with pytest.raises(CheckpointError, match=r"calibrated on another model.*diffquant calibrate"):
        export(source, tmp_path / "out", ExportOptions.parse(kv_bits=8), scales=scales)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kv_bits", "observer", "targets", "message"),
    [
        (16, Observer("absmax"), ("k", "v"), "give --kv 8"),
        (4, Observer("mse", bits=8), ("k", "v"), "clipped for 8 bits"),
        (8, Observer("absmax"), ("k",), "hold none of v"),
    ],
)
def test_scales_that_do_not_fit_the_options_are_refused(tmp_path, kv_bits, observer, targets, message):
    source = write_checkpoint(tmp_path / "source", "llama")
    scales = calibrated(source, tmp_path / "s.safetensors", observer, targets)
    with pytest.raises(UsageError, match=message):
        export(source, tmp_path / "out", ExportOptions.parse(kv_bits=kv_bits), scales=scales)
