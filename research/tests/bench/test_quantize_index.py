"""The bench of an index that no disk holds: names and shapes that take no room, and a plan of the whole."""

import json

import torch

from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.model.adapters import adapter_for
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import Recipe
from research.bench.programs.quantize_index import plan_once
from tests.support.checkpoints import MOTIF3
from tests.support.synthetic import preset, write_holes


def test_holes_have_names_and_shapes_and_read_as_zeros(tmp_path):
    write_holes(tmp_path / "holes", MOTIF3, 3)
    checkpoint = open_checkpoint(tmp_path / "holes")
    assert len(checkpoint.weight_files()) == 3
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    assert shapes == adapter_for(MOTIF3).source_shapes()
    experts = checkpoint.read("model.layers.1.moe.experts.down_proj")
    assert experts.dtype == torch.bfloat16
    assert not experts.any()


def test_the_whole_index_takes_no_disk_and_its_plan_little_memory(tmp_path):
    write_holes(tmp_path / "index", preset("motif-3"), 155)
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "index").iterdir()) < 10e6
    run = plan_once(tmp_path / "index", "4:g128")
    assert (run["tensors"], run["parameters"]) == (2236, 314_841_775_750)
    assert run["bytes_before"] == 2 * run["parameters"]
    # Five matrices of each attention, three of each dense network, five of each layer with experts.
    assert run["packed"] == 53 * 5 + 2 * 3 + 51 * 5
    assert run["peak_anonymous"] < 1e9
    source = open_source(tmp_path / "index")
    assert run["bytes_after"] == plan_quantization(source, Recipe.of(weights="4:g128")).bytes_after
    config = json.loads((tmp_path / "index" / "config.json").read_text())
    assert config["num_hidden_layers"] == 53
