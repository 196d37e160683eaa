"""Models that are spread over memory and disk: the cells of one place, under the same addresses."""

import json
from dataclasses import replace

import accelerate.utils
import pytest
import torch

import diffquant
from diffquant.checkpoints.places import OffloadPlan
from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.sweep.subject import CheckpointSubject
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint

ON_DISK = {"": "cpu", "lm_head": "disk", "model.layers.1": "disk"}
OPTIONS = SweepOptions(
    tasks=("hellaswag", "perplexity"),
    bits=(16, 4),
    targets=("logits", "weights"),
    task_options={"limit": 3, "characters": 400, "window": 64, "stride": 32},
    dtype="float32",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint whose head is no second use of the embedding, so that it can lie on disk."""
    tokenizer = tiny_lm.tokenizer()
    folder = tmp_path_factory.mktemp("models") / "diff"
    write_checkpoint(folder, "diffllama", vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def little_memory(model, monkeypatch):
    """A machine whose memory holds some of the model."""
    nbytes = sum(parameter.nbytes for parameter in diffquant.load(model).parameters())
    monkeypatch.setattr(accelerate.utils, "get_balanced_memory", lambda *_, **__: {"cpu": nbytes // 2})


def test_a_sweep_from_disk_has_the_cells_of_a_sweep_in_memory(model, tmp_path, on_disk):
    spread = replace(OPTIONS, device_map=ON_DISK, offload_folder=tmp_path / "offload")
    results = [run_sweep([model], options, tmp_path / name) for name, options in (("a", OPTIONS), ("b", spread))]
    assert {"lm_head.weight", "model.layers.1.self_attn.q_proj.weight"} < set(on_disk)
    for result in results:
        result.require_complete()
    assert [cell.result for cell in results[0].cells] == [cell.result for cell in results[1].cells]
    cells = [{file.name for file in (tmp_path / name / "cells").iterdir()} for name in "ab"]
    assert cells[0] == cells[1]
    on_disk.clear()
    run_sweep([model], spread, tmp_path / "a")
    assert not on_disk


def test_sweep_eval_and_generate_spread_a_model_larger_than_memory(model, tmp_path, on_disk, little_memory, run):
    options = ["--dtype", "float32", "--json"]
    perplexity = ["--task", "perplexity", "--characters", 300, "--window", 64, "--stride", 32, *options]
    for command in (
        ["eval", model, *perplexity],
        ["generate", model, "--prompt", "the city", "--max-new-tokens", 4, *options],
    ):
        whole = run(*command)
        assert whole[0] == 0
        assert not on_disk
        assert run(*command, "--device-map", "auto", "--offload-folder", tmp_path / "offload")[:2] == whole[:2]
        assert on_disk
        on_disk.clear()
    places = ["--device-map", "auto", "--offload-folder", tmp_path / "offload"]
    assert run("sweep", model, "-o", tmp_path / "out", "--bits", 4, *perplexity, *places)[0] == 0
    assert on_disk
    written = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert written["settings"]["options"]["device_map"] == "auto"


def test_what_cannot_be_spread_is_refused_before_any_cell(model, tmp_path, little_memory):
    with pytest.raises(UsageError, match="leave out device or device_map"):
        SweepOptions(device="cpu", device_map="auto")
    with pytest.raises(UsageError, match="give device_map='auto' too"):
        SweepOptions(offload_folder=tmp_path)
    with pytest.raises(UsageError, match="give offload_folder"):
        run_sweep([model], replace(OPTIONS, device_map="auto"), tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to the offload folder"):
        run_sweep([model], replace(OPTIONS, device_map="auto", offload_folder=tmp_path / "file"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cells_key_has_places_only_where_packed_weights_are_expanded_for_them(model, tmp_path):
    diffquant.quantize(model, tmp_path / "low", "4:g32")
    plain, packed = open_source(model), open_source(tmp_path / "low")

    def has_same_key(source, dtype, device):
        keys = [
            CheckpointSubject(source, dtype, device, places=places).key(Recipe())
            for places in (None, OffloadPlan("auto"))
        ]
        return keys[0] == keys[1]

    assert has_same_key(plain, torch.bfloat16, "cuda")
    assert has_same_key(packed, torch.bfloat16, "cpu")
    assert has_same_key(packed, torch.float32, "cuda")
    assert not has_same_key(packed, torch.bfloat16, "cuda")
