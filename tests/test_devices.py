"""`--device auto`: CUDA where it is there, the processor elsewhere, and what says so."""

import logging
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
import torch

from diffquant import load
from diffquant.checkpoints.building import build_model
from diffquant.errors import UsageError
from diffquant.measure.sweep.exported import ExportedSubject
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.plan import plan_sweep
from diffquant.onnx import export
from diffquant.onnx.native import attention_instruction_set
from diffquant.onnx.runtime.device import CUDA, RuntimeDevice, _starts_on_cuda
from diffquant.onnx.targets import runtime_of
from diffquant.support.devices import check_device, is_bfloat16_native, resolve_device
from diffquant.verbs.notes import choose_device
from tests.support import tiny_lm


def test_a_device_beyond_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(UsageError, match="no device 'cuda:2': torch finds 2 CUDA devices"):
        check_device("cuda:2")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("devices")
    source = tiny_lm.write_diff_v2(root / "model")
    export(source, root / "exported")
    return source, root / "exported"


@pytest.fixture
def other_device(monkeypatch):
    """A device that every torch has, in place of CUDA."""
    monkeypatch.setattr("diffquant.support.devices._fastest_device", lambda: "meta")
    return "meta"


@pytest.mark.parametrize(("is_available", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_cuda_where_torch_finds_a_device(monkeypatch, is_available, device):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    assert resolve_device("auto") == device
    assert resolve_device("cpu") == "cpu"


def test_bfloat16_is_asked_of_the_named_device(monkeypatch):
    asked = []

    @contextmanager
    def device(one):
        asked.append(one)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bool(asked))
    assert is_bfloat16_native("cuda:1")
    assert asked == [torch.device("cuda", 1)]


def test_an_unknown_device_is_refused():
    with pytest.raises(UsageError, match="use auto, cpu, cuda or cuda:N"):
        resolve_device("gpu")


def test_load_puts_a_model_on_the_device_that_was_found(models, other_device, monkeypatch):
    devices = []

    def recording(source, dtype, device, *rest):
        devices.append(device)
        return build_model(source, dtype, "cpu", *rest)

    monkeypatch.setattr("diffquant.quantization.loading.build_model", recording)
    load(models[0])
    load(models[0], device="cpu")
    assert devices == [other_device, "cpu"]


def test_an_exported_folder_runs_where_its_runtime_can_and_checkpoints_on_the_device(models, other_device):
    run, settings = plan_sweep(models, SweepOptions(tasks=("perplexity",)), Path("cells"), runtime_of)
    assert settings["options"]["device"] == other_device
    subjects = run.subjects
    subject = subjects[models[1]]
    assert isinstance(subject, ExportedSubject)
    assert subject.model.identity["kernel"] == attention_instruction_set()
    # A worker that compares it with its checkpoint holds both.
    assert replace(subject, compared_with=None).peak_weight_bytes == subject.model.weight_bytes
    both = replace(subject, compared_with=subjects[models[0]])
    assert both.peak_weight_bytes == subject.model.weight_bytes + both.compared_with.peak_weight_bytes
    assert runtime_of(models[1]).open(models[1], subject.device).runtime.device.kind == "cpu"


@pytest.mark.skipif(CUDA in onnxruntime.get_available_providers(), reason="this onnxruntime runs on CUDA")
def test_a_runtime_whose_cuda_does_not_start_falls_back_to_the_processor(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    _starts_on_cuda.cache_clear()
    assert RuntimeDevice.parse("auto") == RuntimeDevice("cpu")
    _starts_on_cuda.cache_clear()


@pytest.mark.parametrize(("device", "said"), [("auto", ["runs on meta"]), ("cpu", [])])
def test_the_device_is_said_where_auto_found_another_than_the_processor(caplog, other_device, device, said):
    with caplog.at_level(logging.INFO, logger="diffquant.verbs"):
        choose_device(device)
    assert caplog.messages == said
