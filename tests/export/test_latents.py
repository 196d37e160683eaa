"""Motif-3's export: latents that are keys and values, experts that tokens choose, residual streams."""

import numpy as np
import pytest
import torch
from onnx import helper

import diffquant
from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.errors import CheckpointError, ToleranceError
from diffquant.onnx import ExportOptions, export, verify
from diffquant.onnx.manifest import read_manifest
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_to
from tests.support.models import random_ids
from tests.support.planted import PlantedExport
from tests.support.thorough import sampled

CONTEXT = 96


@pytest.fixture(scope="module")
def motif3(made):
    return made("motif3", CONTEXT)[0]


FORMS = [{"weights": "4:row", "kv_bits": 8, "embed_bits": 8}, {"weights": "8:row", "accuracy_level": 1, "kv_bits": 4}]
FORMS += [{"weights": "6:row", "kv_bits": 8}, {"portable": True, "weights": "4:row"}, {"cache": False}]
FORMS += [{"dtype": "float16"}, {"logits": "6:row"}, {"logits": "6:tensor"}]


@pytest.mark.parametrize("options", sampled(FORMS, 4), ids=str)
def test_other_forms_are_proved(options, motif3, made):
    assert verify(made("motif3", CONTEXT, **options)[1], motif3).passed


def test_ranges_are_of_what_the_models_cache_keeps(motif3):
    ids = random_ids(2, 30)
    ranges = calibrate_cache(motif3, ids=ids)
    margin = ranges.settings["margin"]
    assert margin == 1.1
    model = diffquant.load(motif3, dtype=torch.float32)
    cache = model.model.new_cache()
    model(ids, past_key_values=cache)
    # Layers without a window keep every token.
    for layer in (0, 2, 4):
        latents = cache.layers[layer].stored_values.read()
        torch.testing.assert_close(ranges.tensors[f"layers.{layer}.v"], margin * latents.abs().amax((0, 2)))
        turned = cache.layers[layer].stored_keys.read().unflatten(-1, (2, -1))
        lengths = turned.norm(dim=-2).amax((0, 2)).repeat(1, 2)
        torch.testing.assert_close(ranges.tensors[f"layers.{layer}.k"], margin * lengths)


def test_a_quantized_expert_needs_a_runtime_that_gathers_codes(made):
    for options, floor in (({}, ">=1.18"), ({"weights": "4:row"}, ">=1.23")):
        assert read_manifest(made("motif3", CONTEXT, portable=True, **options)[1]).floor == floor


def test_what_a_graph_cannot_say_is_refused_with_its_reason(motif3, tmp_path):
    with pytest.raises(CheckpointError, match=r"draws whole maps"):
        export(motif3, tmp_path / "out", ExportOptions.parse(web=True))
    odd = write_checkpoint(tmp_path / "odd", "motif3", kv_lora_rank=11)
    with pytest.raises(CheckpointError, match=r"its latents have 11 channels"):
        export(odd, tmp_path / "out", ExportOptions.parse(kv_bits=4))


def test_experts_in_the_makers_nvfp4_are_exported_as_the_floats_of_their_codes(tmp_path):
    wide = write_checkpoint(
        tmp_path / "wide", "motif3", hidden_size=32, moe_intermediate_size=32, max_position_embeddings=CONTEXT
    )
    low = tmp_path / "low"
    diffquant.quantize(wide, low, Recipe.of(weights="16", overrides={"*.experts.*": "nvfp4"}))
    model = OnnxModel(export_to(tmp_path / "out", low), 1, every_position=True)
    ids = random_ids(1, 15)
    (logits,), _ = model.run(ids.numpy(), np.ones((1, 15), np.int64), model.allocate_cache(1))
    wanted = diffquant.load(low, dtype=torch.float32)(ids).logits
    assert (wanted - diffquant.load(wide, dtype=torch.float32)(ids).logits).abs().max() > 0.01
    torch.testing.assert_close(torch.from_numpy(logits), wanted, rtol=0, atol=2e-4)


def body(planted, layer, op, number=0):
    """A node of an expert's body."""
    loop = next(n for n in planted.model.graph.node if n.op_type == "Loop" and n.name.startswith(f"layers.{layer}."))
    graph = next(a.g for a in loop.attribute if a.name == "body")
    return [node for node in graph.node if node.op_type == op][number]


def rounds_once(planted):
    streams = next(f for f in planted.model.functions if f.name == "ReadStreams")
    node = next(n for n in streams.node if "rounds" in n.output)
    node.attribute[0].CopyFrom(helper.make_attribute("value_int", 1))


def exchanged(x):
    return x[::-1].copy()


def rewired(planted, output, place, name):
    planted.node(output).input[place] = name


FAULTS = {
    "a window of one token less": lambda e: e.set_attribute("local_window_size", 2, [e.node("layers.1.attention")]),
    "a window where there is none": lambda e: e.set_attribute("local_window_size", 9, [e.node("layers.2.attention")]),
    "angles that are not stretched": lambda e: e.change("frequencies.0", lambda x: x * np.float32(1.01)),
    "angles of the other layers": lambda e: e.change("frequencies.1", exchanged),
    "a scale of rows over latents": lambda e: e.set_attribute("scale", 14**-0.5),
    "keys of another group": lambda e: e.change("model.layers.1.self_attn.wkv_b.keys", exchanged),
    "values of another group": lambda e: e.change("model.layers.2.self_attn.wkv_b.values", exchanged),
    "another layer's latents": lambda e: rewired(e, "layers.2.attention", 4, "past_key_values.4.key"),
    "a share for another expert": lambda e: e.change(
        "model.layers.3.moe.router.gate.weight", lambda x: x[:, ::-1].copy()
    ),
    "a bias that takes no part": lambda e: e.change("model.layers.1.moe.expert_bias", lambda x: x * 0),
    "another expert's norm": lambda e: e.change("model.layers.1.moe.experts.act_fn.weight", exchanged),
    "experts in another order": lambda e: e.change("model.layers.4.moe.experts.down_proj.weight", exchanged),
    "the last expert alone": lambda e: (
        body(e, 2, "ScatterND").attribute[0].CopyFrom(helper.make_attribute("reduction", "none"))
    ),
    "streams that are balanced once": rounds_once,
    "streams in another order": lambda e: e.change("model.layers.3.mhc_ffn.bias", exchanged),
    "a stream that is written twice": lambda e: e.change("model.layers.0.mhc_attn.alpha", lambda x: x * np.float32(2)),
}


@pytest.mark.parametrize("fault", sampled(FAULTS, 4))
def test_a_fault_of_latents_experts_and_streams_is_refused(fault, motif3, made, tmp_path):
    planted = PlantedExport.copy(made("motif3", CONTEXT)[1], tmp_path / "planted")
    FAULTS[fault](planted)
    planted.save()
    with pytest.raises(ToleranceError):
        verify(planted.folder, motif3)
