"""A checkpoint is opened once, whatever a command does with it."""

from collections import Counter

import pytest

from diffquant.checkpoints.folder import FolderCheckpoint
from diffquant.checkpoints.gguf import GgufCheckpoint
from tests.support import tiny_lm

PROSE = ("--tokens", 256, "--window", 64)
MEASURED = ("--window", 64, "--windows", 1, "--characters", 1500)
SHORT = ("--task", "perplexity", "--characters", 1500, "--window", 64, "--stride", 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_lm.write_llama(folder / "llama"), tiny_lm.write_diff_v2(folder / "diff-v2")


@pytest.fixture
def openings(monkeypatch):
    """How often each checkpoint was opened, by its path."""
    counts = Counter()
    for reader in (FolderCheckpoint, GgufCheckpoint):

        def counting(self, path, opened=reader.__init__):
            counts[path] += 1
            opened(self, path)

        monkeypatch.setattr(reader, "__init__", counting)
    return counts


def test_a_sweep_opens_each_of_its_models_once(run, models, openings, tmp_path):
    targets = ("--target", "weights,logits", "--granularity", "row", "--bits", "8", "--dtype", "float32")
    assert run("sweep", *models, "-o", tmp_path / "sweep", *targets, *SHORT)[0] == 0
    assert openings == dict.fromkeys(models, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "MODEL"),
        ("quantize", "MODEL", "-o", "OUT", "--weights", "4:g16"),
        ("quantize", "MODEL", "-o", "OUT", "--weights", "4:g16", "--rounding", "gptq", "--tokens", 256),
        ("eval", "MODEL", "--logits", "8", *SHORT),
        ("generate", "MODEL", "--prompt", "It was", "--max-new-tokens", 2),
        ("calibrate", "MODEL", "-o", "OUT", *PROSE),
        ("outliers", "MODEL", *PROSE),
        ("search", "MODEL", "-o", "OUT", "--budget", "6", "--bits", "8,4", "--granularity", "g16", *MEASURED),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:1] + arguments[6:8] * (arguments[0] == "quantize"))),
)
def test_a_command_opens_its_checkpoint_once(run, models, openings, tmp_path, arguments):
    places = {"MODEL": models[1], "OUT": tmp_path / "out"}
    assert run(*(places.get(argument, argument) for argument in arguments))[0] == 0
    assert openings == {models[1]: 1}


def test_a_conversion_opens_its_source_once(run, models, openings, tmp_path):
    assert run("convert", models[0], "-o", tmp_path / "v2", "--to", "diff-v2")[0] == 0
    assert openings == {models[0]: 1}


def test_export_and_verify_open_their_checkpoint_once_each(run, models, openings, tmp_path):
    pytest.importorskip("onnxruntime")
    assert run("export", models[1], "-o", tmp_path / "onnx", "--kv", 8)[0] == 0
    assert openings == {models[1]: 1}
    assert run("verify", tmp_path / "onnx", models[1])[0] == 0
    assert openings == {models[1]: 2}
