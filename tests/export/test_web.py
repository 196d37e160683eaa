"""Exports for pages in a browser: the outputs that attention maps are computed of, against DiffTransformer's own."""

import json

import numpy as np
import pytest
import torch

import diffquant
from diffquant.errors import CheckpointError, UsageError
from diffquant.onnx import ExportOptions, export
from diffquant.onnx.runtime.session import OnnxModel
from tests.support.checkpoints import write_llama
from tests.support.models import random_ids

SOURCES = ["diffllama", "unilm-v1", "unilm-v2-half", "motif-grouped", "gated"]


@pytest.fixture(scope="module", params=SOURCES)
def pages(request, made):
    checkpoint, folder = made(request.param, web=True)
    return diffquant.load(checkpoint), folder


def outputs_of(folder, ids, past=()):
    """Every output of one call by its name."""
    model = OnnxModel(folder, threads=1)
    length = past[0].shape[2] if past else 0
    caches = past or [np.zeros((1, model.cache.kv_pairs, 0, model.cache.width), np.float32)] * len(model.cache.inputs)
    feed = {"input_ids": ids, "attention_mask": np.ones((1, length + ids.shape[1]), np.int64)}
    feed |= dict(zip(model.cache.inputs, caches, strict=True))
    names = [output.name for output in model.session.get_outputs()]
    return dict(zip(names, model.session.run(names, feed), strict=True)), model.cache


@torch.inference_mode()
def test_queries_keys_and_lambda_are_those_of_the_model(pages):
    model, folder = pages
    ids = random_ids(1, 19)
    outputs, _ = outputs_of(folder, ids.numpy())
    entry = json.loads((folder / "web.json").read_text())
    spec = model.config.diff_spec
    runner = model.new_layer_runner(19)
    x = runner.embed(ids)
    assert entry["layers"] == len(runner.layers)
    for number, layer in enumerate(runner.layers):
        q, k, _ = runner.project(layer, x)
        lam = layer.self_attn.compute_lam(layer.input_layernorm(x))
        logits = [a @ b.repeat_interleave(a.shape[1] // b.shape[1], 1).mT for a, b in both_maps(spec, q, k)]
        heads = torch.from_numpy(outputs[f"maps.{number}.query"]).unflatten(-1, (-1, entry["head_dim"])).transpose(1, 2)
        rows = torch.from_numpy(outputs[f"present.{number}.key"])
        exported = exported_logits(entry, heads, rows)
        for ours, theirs in zip(logits, exported, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-5 * float(ours.abs().max()))
        wanted = lam.reshape(1) if spec.lam == "exp" else lam.squeeze(-1).transpose(1, 2)
        torch.testing.assert_close(torch.from_numpy(outputs[f"maps.{number}.lambda"]), wanted, rtol=0, atol=1e-5)
        if (gate := layer.self_attn.compute_signal_gate(layer.input_layernorm(x))) is not None:
            exported_gate = torch.from_numpy(outputs[f"maps.{number}.signal_gate"])
            torch.testing.assert_close(exported_gate, gate.squeeze(-1).transpose(1, 2), rtol=0, atol=1e-5)
        x = runner.run_layer(layer, x)


def test_a_later_token_is_rotated_by_its_own_position(pages):
    _, folder = pages
    ids = random_ids(1, 19).numpy()
    whole, _ = outputs_of(folder, ids)
    first, cache = outputs_of(folder, ids[:, :16])
    rest, _ = outputs_of(folder, ids[:, 16:], [first[name] for name in cache.outputs])
    for name in (name for name in whole if name.endswith(".query")):
        np.testing.assert_allclose(rest[name], whole[name][:, 16:], rtol=0, atol=2e-5 * np.abs(whole[name]).max())


def test_what_a_page_cannot_read_is_refused_all_at_once():
    with pytest.raises(UsageError, match=r"float32 KV cache.*is float32.*rounds logits in the page"):
        ExportOptions.parse(web=True, kv_bits=8, dtype="float16", logits="4:row")


def test_a_transformer_has_no_maps_to_subtract(tmp_path):
    checkpoint = write_llama(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="no second map to show"):
        export(checkpoint, tmp_path / "out", ExportOptions(web=True))
    assert not (tmp_path / "out").exists()


def both_maps(spec, q, k):
    return zip(spec.layout.split_query_maps(q), spec.layout.split_key_maps(k), strict=True)


def exported_logits(entry, heads, rows):
    """Q·Kᵀ of signal and noise heads [1, heads, T, T], by the op's order of heads and key rows."""
    signals, d = entry["signals_per_noise"], entry["head_dim"]
    groups = heads.unflatten(1, (-1, signals + 1))
    queries = groups[:, :, :signals].flatten(1, 2), groups[:, :, signals]
    keys = (rows, rows) if entry["shares_keys"] else (rows[..., :d], rows[..., d:])
    return [a @ b.repeat_interleave(a.shape[1] // b.shape[1], 1).mT for a, b in zip(queries, keys, strict=True)]
