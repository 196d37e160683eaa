"""Arguments that only Python can give."""

import math
import random
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch

import diffquant
from diffquant.errors import UsageError
from diffquant.verbs.arguments import parse_bits, parse_widths, read_task_options
from tests.support import tiny_lm
from tests.support.tables import in_one_test


def test_a_model_in_memory_is_refused_in_words(tmp_path):
    with pytest.raises(UsageError, match="from disk, not a Linear in memory; write a folder"):
        diffquant.quantize(torch.nn.Linear(8, 8), tmp_path / "out", {"weights": "8:row"})
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_there_is_not_hears_of_the_nearest(tmp_path):
    with pytest.raises(UsageError, match="no task has an option granularity; did you mean 'granularities'"):
        diffquant.sweep("model", tmp_path / "out", granularity="row")


@in_one_test(
    ("verb", "arguments", "message"),
    [
        ("run", {"prompt": "x", "temperature": math.nan}, "temperature must be 0 or more, got nan"),
        ("run", {"prompt": "x", "threads": 100_000}, "threads must be 1024 or less, got 100000"),
        ("verify", {"model": "model", "tolerance": math.nan}, "tolerance must be 0 or more, got nan"),
        ("verify", {"model": "model", "tolerance": -1.0}, "tolerance must be 0 or more, got -1"),
        ("generate", {"prompt": "x", "seed": 2**32}, "seed must be 4294967295 or less, got 4294967296"),
    ],
)
def test_a_number_beyond_its_bounds_is_refused_and_so_is_one_that_is_none(verb, arguments, message):
    with pytest.raises(UsageError, match=message):
        getattr(diffquant, verb)("folder", **arguments)


@in_one_test("given", [4, "4", [4]])
def test_one_width_is_given_as_a_number_too(given):
    assert parse_bits(given) == (4,)


@in_one_test(
    ("verb", "arguments", "message"),
    [
        ("quantize", {"model": "model", "text": []}, r"text is \[\]; give at least one"),
        ("quantize", {"model": "model", "text": ""}, "text is ''; it must be a path"),
        ("calibrate", {"model": "model", "output": "out", "text": ()}, r"text is \(\); give at least one"),
        ("generate", {"model": "model", "prompt": "x", "scales": ""}, "scales is ''; it must be a path"),
        ("inspect", {"model": ""}, "model is ''; it must be a checkpoint folder"),
        ("report", {"runs": []}, r"runs is \[\]; give at least one"),
        ("outliers", {"models": []}, r"models is \[\]; give at least one"),
        ("sweep", {"models": "model", "output": "out", "bits": ["8"]}, "bits is '8'; it must be a whole number"),
        ("sweep", {"models": "model", "output": "out", "bits": [8.0]}, "bits is 8.0; it must be a whole number"),
        ("evaluate", {"model": "model", "characters": 64.0}, "characters is 64.0; it must be a whole number"),
        ("evaluate", {"model": "model", "trust_task": "no"}, "trust_task is 'no'; it must be True or False"),
        ("evaluate", {"model": "model", "lengths": [64.0]}, "cannot read lengths '64.0'"),
        ("evaluate", {"model": "model", "text": ["a.txt"]}, r"text is \['a.txt'\]; it must be a path"),
        ("evaluate", {"model": "model", "items": 5}, "items is 5; it must be a path"),
        ("plan", {"model": "model", "memory": 1e9}, "memory is 1000000000.0; it must be text or a whole number"),
        ("fidelity", {"reference": 5, "candidate": "model"}, "reference is 5; it must be a path$"),
        ("generate", {"model": "model", "prompt": "\ud800"}, r"prompt is '\\ud800', which is not UTF-8; correct it"),
    ],
)
def test_what_would_not_be_read_as_given_is_refused(verb, arguments, message):
    with pytest.raises(UsageError, match=message):
        getattr(diffquant, verb)(**arguments)


def test_none_is_the_default_of_a_tasks_option_too():
    assert read_task_options({"window": None, "limit": 4}, diffquant.evaluate) == {"limit": 4}


def test_numbers_of_numpy_are_numbers(tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    given = {"tokens": np.int64(64), "window": np.int64(32)}
    diffquant.quantize(model, tmp_path / "out", "4:g16", rounding="gptq", **given)
    sizes = {"characters": np.int64(600), "window": np.int32(64), "stride": np.int64(32)}
    for bits in (np.array([8])[0], 8):  # the second time nothing is measured
        found = diffquant.sweep(model, tmp_path / "sweep", "perplexity", bits=[bits], **sizes)
        assert not found.failed_cells
    said = {diffquant.generate(model, "x", temperature=1.0, seed=seed, max_new_tokens=4) for seed in (np.int64(7), 7)}
    assert len(said) == 1
    options = read_task_options({"lengths": [np.int64(64)], "characters": np.int64(0)}, diffquant.sweep)
    assert options == {"lengths": (64,), "characters": None}
    assert parse_widths([np.int64(8), "4", "nvfp4"]) == (8, 4, "nvfp4")


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# A default device of meta stands for CUDA: nothing may be created on it.
SETTINGS = {
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float64": partial(default_dtype, torch.float64),
    "device": partial(torch.device, "meta"),
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


@in_one_test("setting", SETTINGS)
def test_what_the_callers_program_sets_in_torch_changes_nothing(tmp_path, setting):
    model, given = tiny_lm.write_diff_v2(tmp_path / "model"), {"effort": "balanced", "tokens": 512, "window": 64}
    for name, context in (("plain", nullcontext), ("set", SETTINGS[setting])):
        with context():
            before = torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu")
            diffquant.quantize(model, tmp_path / name, {"weights": "4:row", "kv": 8}, **given)
            diffquant.export(tmp_path / name, tmp_path / f"{name}-onnx")
            loaded = diffquant.load(tmp_path / name)
            assert (torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu")) == before
        assert loaded.dtype == torch.float32
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "set")]
    assert weights[0] == weights[1]


def test_sampling_leaves_the_callers_random_numbers_alone(tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    drawn = []
    for _ in range(2):
        diffquant.generate(model, "x", temperature=1.0, max_new_tokens=4)
        drawn.append((torch.rand(1), np.random.rand(), random.random()))
    assert all(first != second for first, second in zip(*drawn, strict=True))


def test_the_number_in_the_example_of_evaluate_is_there(tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    sizes = {"characters": 600, "window": 64, "stride": 32}
    assert diffquant.evaluate(model, "perplexity", {"kv": 8}, **sizes)["perplexity"].details["perplexity"] > 1
