"""Export targets: who knows a folder, and a toy one that is added through the registry alone."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from diffquant.checkpoints.atomic_folder import check_output, stage_output
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.measure.sweep.exported import ExportedDescription
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.torch_model import TorchModel
from diffquant.model.adapters import adapter_for
from diffquant.onnx import targets
from diffquant.onnx.targets import runtime_of
from diffquant.quantization.loading import load
from tests.support import tiny_lm


class ArrayRuntime:
    """Opens what `write_arrays` wrote: DiffTransformer's parameters as numpy arrays in one file."""

    batch_tokens = 512

    def describe(self, folder, device):
        size = (folder / "model.npz").stat().st_size
        return ExportedDescription(16, "16", {"bytes": size}, (), size, 0)

    def open(self, folder, device):
        model = adapter_for(json.loads((folder / "config.json").read_text())).architecture.new_model()
        with np.load(folder / "model.npz") as arrays:
            state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        model.load_state_dict(state)
        return TorchModel(model.eval().requires_grad_(False), load_tokenizer(folder))


def write_arrays(source, destination):
    """What a verb of the target's own would do."""
    opened = open_source(source)
    check_output(opened.path, destination, False)
    state = load(opened, dtype=torch.float32).state_dict()
    with stage_output(destination, {"time": time.time()}, opened.checkpoint.nbytes, False) as staging:
        opened.checkpoint.write_side_files(staging.folder)
        np.savez(staging.folder / "model.npz", **{name: tensor.numpy() for name, tensor in state.items()})
        (staging.folder / "config.json").write_text(json.dumps(opened.checkpoint.config))


@pytest.fixture
def npz(monkeypatch):
    runtime = ArrayRuntime()
    known = [*targets.TARGETS, lambda folder: runtime if (folder / "model.npz").is_file() else None]
    monkeypatch.setattr(targets, "TARGETS", known)
    return runtime


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("tiny") / "diff-v2")


def test_a_target_is_added_through_the_registry_alone(npz, source, tmp_path):
    folder = tmp_path / "out"
    write_arrays(source, folder)
    assert (runtime_of(folder), runtime_of(source)) == (npz, None)
    options = SweepOptions(
        tasks=("perplexity",), bits=(), task_options={"characters": 1500, "window": 64, "stride": 32}
    )
    ours = row_of(folder, options, tmp_path / "npz")
    full = row_of(source, replace(options, dtype="float32"), tmp_path / "checkpoint")
    assert ours["perplexity"] == pytest.approx(full["perplexity"], rel=1e-6)
    assert ours["weight_bytes"] == (folder / "model.npz").stat().st_size


def row_of(model, options, output):
    """The row of a model that is swept alone."""
    (row,) = json_rows(run_sweep([model], options, output, runtime_of=runtime_of))
    return row


def test_knowing_a_folder_needs_no_onnx():
    code = """
import sys
from pathlib import Path
from diffquant.onnx.targets import runtime_of
assert runtime_of(Path(".")) is None
print(*sys.modules)
"""
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert modules.returncode == 0, modules.stderr
    assert not set(modules.stdout.split()) & {"onnx", "onnxruntime"}
