"""Tuning of the kernels."""

import numpy as np
import pytest

from diffquant.errors import OutputExistsError, UsageError
from diffquant.kernels.configs import make_attention_config
from research.bench.gpu import tune


def test_without_a_gpu_nothing_is_tuned(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="torch finds none"):
        tune.tune(tmp_path / "tuned.json")


def test_tuning_leaves_somebodys_file_as_it_is(tmp_path, monkeypatch):
    file = tmp_path / "tuned.json"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for content in (b"somebody's own\n", b'{"mine": 1}'):
        file.write_bytes(content)
        with pytest.raises(OutputExistsError, match=r"holds tuned\.json, which diffquant did not write"):
            tune.tune(file)
        assert file.read_bytes() == content


def test_every_kernel_with_configurations_is_tuned():
    pytest.importorskip("triton")
    kernels = {"prefill_v1", "prefill_v2", "prefill_int8", "simulated", "decode", "gemv", "gemm"}
    assert {key.split("/")[0] for key in tune.active_configs()} == kernels


def test_tuning_takes_the_fastest_neighbour_that_is_right(monkeypatch):
    times = {"keys": {128: 1.0, 32: 3.0}, "stages": {3: 0.5}}
    current = {}

    def milliseconds(work):
        entry = current["entry"]
        if entry.get("warps") == 16:
            raise RuntimeError("out of resources")
        return 2.0 / np.prod([2.0 / times.get(name, {}).get(value, 2.0) for name, value in entry.items()])

    def override_configs(entries):
        current["entry"] = {k: v for k, v in next(iter(entries.values())).items() if v != shipped[k]}
        return memory_of()

    class memory_of:
        def __enter__(self):
            return self

        def __exit__(self, *raised):
            current["entry"] = {}

    shipped = make_attention_config(128, 64, 8, 2)
    current["entry"] = {}
    monkeypatch.setattr(tune, "_milliseconds", milliseconds)
    monkeypatch.setattr(tune, "override_configs", override_configs)
    before, now, changed = tune.tune_config("k/sm_90/128", shipped, lambda: None, lambda: True)
    assert (before, changed) == (2.0, {"keys": 128, "stages": 3})
    assert now == pytest.approx(0.25 * 1.0)
    assert tune.tune_config("k/sm_90/128", shipped, lambda: None, lambda: False)[2] == {}
