"""Folders that an earlier commit wrote: they open, and a sweep's cells keep their addresses."""

import json

import torch

import diffquant
from diffquant.recipe import Recipe
from tests.golden.sources import POCKET, WRITTEN, write_source


def test_an_old_quantized_folder_keeps_its_recipe(tmp_path):
    model = diffquant.load(write_source(tmp_path, "quantized"), dtype="float32")
    assert model.recipe == Recipe.of(weights="4:g32", k="4:c32", v="4:row:rotated", residual=64, logits="6:row:shift")
    assert model(torch.arange(3, 90)[None]).logits.isfinite().all()


def test_cells_keep_all_of_their_address_but_code_and_versions(tmp_path):
    models = [POCKET / "needle-diff-v1", POCKET / "needle-transformer"]
    options = {"bits": "4", "targets": "logits", "granularities": "tensor,row:shift", "limit": 8, "lengths": "96"}
    diffquant.sweep(models, tmp_path / "swept", "needle", **options, dtype="float32", device="cpu")
    assert _addresses(tmp_path / "swept") == _addresses(WRITTEN / "swept")


def _addresses(folder):
    keys = [json.loads(file.read_text())["key"] for file in (folder / "cells").iterdir()]
    return {json.dumps({name: key[name] for name in sorted(key.keys() - {"code", "versions"})}) for key in keys}
