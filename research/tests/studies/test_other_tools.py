"""What is recorded of a tool that quantizes a part of a model, and of one that refuses it."""

import json

import torch

from research.studies import other_tools, other_tools_probe
from tests.support.checkpoints import write_checkpoint

PART = "changes some weights"


def _changing(folder, trust, out):
    model = other_tools_probe._open(folder, trust)
    yield "opened", model
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(1.02)
            layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight.bfloat16())
    yield "quantized", model
    model.save_pretrained(out)
    yield "written", model


def test_a_row_counts_the_changed_linears_and_what_opens_again(tmp_path, monkeypatch):
    monkeypatch.setitem(other_tools_probe.TOOLS, PART, _changing)
    folder = write_checkpoint(tmp_path / "model", "diffllama")
    row = other_tools_probe.quantize(PART, "DiffLlama", str(folder), False, tmp_path / "out")
    assert (row["reached"], row["linears"]) == ("written", [2, 14])
    assert 0 < row["kl"] < 0.1
    row |= other_tools_probe.reopen(PART, "DiffLlama", str(folder), False, tmp_path / "out")
    assert (row["reached"], row["linears_reopened"]) == ("reopened", [2, 14])
    assert abs(row["kl_reopened"] - row["kl"]) < 1e-9
    rows = [row | {"model": name} for name in other_tools.MODELS]
    assert set(other_tools.table_cells(rows, PART)) == {f"reopened 2 of 14, {row['kl']:.1e}"}


def test_a_model_that_transformers_does_not_know_is_refused_by_the_first_line_of_its_error(tmp_path, monkeypatch):
    monkeypatch.setitem(other_tools_probe.TOOLS, PART, _changing)
    folder = write_checkpoint(tmp_path / "model", "diffllama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "never_seen"}))
    row = other_tools_probe.quantize(PART, "unknown", str(folder), False, tmp_path / "out")
    assert row["reached"] is None
    assert "never_seen" in row["error"]
    assert "\n" not in row["error"]
    assert other_tools._cell(row) == "refused"
