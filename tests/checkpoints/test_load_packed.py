"""Checkpoints loaded with their weights packed, against the same expanded."""

import pytest
import torch
from safetensors.torch import save_file

from diffquant import Recipe, load, quantize
from diffquant.kernels.linear.repack import dequantize_weight
from diffquant.model.linears import QuantizedLinear
from tests.support.checkpoints import TWO_LAYERS, write_diffllama, write_random
from tests.support.models import random_ids
from tests.support.tables import in_one_test

IDS = random_ids(length=23)


def packed_layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@in_one_test("weights", ["4:g32", "3:g16", "5:row", "6:g32", "7:tensor", "8:row"])
def test_packed_weights_compute_as_expanded_ones(tmp_path, weights):
    overrides = {"*.mlp.up_proj": "8:g32", "lm_head": "8:row"}
    source = write_diffllama(tmp_path / "source", attention_bias=True)
    quantize(source, tmp_path / "low", Recipe.of(weights=weights, overrides=overrides))
    packed = load(tmp_path / "low", packed=True)
    assert len(packed_layers(packed)) == 3 * 7
    assert torch.equal(packed(IDS).logits, load(tmp_path / "low")(IDS).logits)


@in_one_test("weights", ["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp4_up"])
def test_weights_of_floats_stay_packed(tmp_path, weights):
    config = TWO_LAYERS | {"model_type": "diff_v1", "num_key_value_heads": 4, "gqa_pairing": "plain"}
    write_random(tmp_path / "source", config, torch.float32)
    quantize(tmp_path / "source", tmp_path / "low", Recipe.of(weights=weights))
    packed, expanded = load(tmp_path / "low", packed=True), load(tmp_path / "low")
    layers = packed_layers(packed)
    assert layers
    assert all(layer.packed.has_float_codes for layer in layers.values())
    # The tensor's scale multiplies what the reader's divides.
    torch.testing.assert_close(packed(IDS).logits, expanded(IDS).logits, rtol=1e-5, atol=1e-5)
    layer = layers["model.layers.0.self_attn.q_proj"].packed
    assert 8 * (layer.low.nbytes + layer.scales.nbytes) == (4 + 8 / layer.group) * layer.shape[0] * layer.shape[1]


@in_one_test(
    ("weights", "overrides", "inner", "is_one"),
    [
        ("4:g32", {}, 96, True),
        ("6:row", {}, 96, True),
        ("8:tensor", {}, 96, True),
        ("4:g32", {"*.up_proj": "6:g32"}, 96, False),
        ("4:g32", {"*.up_proj": "4:g16"}, 96, False),
        # 104 rows end within a block of 16.
        ("6:g32", {"*.down_proj": "8:row"}, 104, False),
    ],
)
def test_gate_and_up_are_one_layer_where_they_are_packed_alike(tmp_path, weights, overrides, inner, is_one):
    source = tmp_path / "source"
    config = TWO_LAYERS | {"model_type": "diff_v2", "num_key_value_heads": 2, "mlp_bias": True}
    write_random(source, config | {"intermediate_size": inner}, torch.float32)
    quantize(source, tmp_path / "low", Recipe.of(weights=weights, overrides=overrides))
    packed = load(tmp_path / "low", packed=True)
    mlps = {name.rsplit(".", 1)[-1] for name in packed_layers(packed) if ".mlp." in name}
    assert mlps == {"down_proj"} | ({"gate_up_proj"} if is_one else {"gate_proj", "up_proj"})
    assert torch.equal(packed(IDS).logits, load(tmp_path / "low")(IDS).logits)


def test_what_no_kernel_reads_is_expanded(tmp_path):
    source = write_diffllama(tmp_path / "source")
    quantize(source, tmp_path / "low", Recipe.of(weights="4:g8", overrides={"*.o_proj": "8:row"}))
    packed = load(tmp_path / "low", packed=True)
    assert {name.rsplit(".", 1)[-1] for name in packed_layers(packed)} == {"o_proj"}
    assert not packed_layers(load(tmp_path / "low"))
    assert not packed_layers(load(source, packed=True))


def test_stored_bytes_are_those_of_codes_and_scales(tmp_path):
    source = write_diffllama(tmp_path / "source", dtype=torch.float16, hidden_size=128, intermediate_size=256)
    for weights, bits in (("4:g32", 4.5), ("6:g64", 6.25), ("8:g64", 8.25)):
        quantize(source, tmp_path / "low", Recipe.of(weights=weights), overwrite=True)
        layers = packed_layers(load(tmp_path / "low", packed=True))
        assert layers
        for name, layer in layers.items():
            unit = layer.row_scale.nbytes
            assert 8 * (layer.packed.nbytes - unit) == bits * layer.in_features * layer.out_features, name


def test_a_packed_model_keeps_its_state(tmp_path):
    source = write_diffllama(tmp_path / "source")
    quantize(source, tmp_path / "low", Recipe.of(weights="6:g32"))
    model, other = load(tmp_path / "low", packed=True), load(tmp_path / "low", packed=True)
    expected = model(IDS).logits
    for layer in packed_layers(other).values():
        layer.low.zero_()
    assert not torch.equal(other(IDS).logits, expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IDS).logits, expected)


def test_another_dtype_scales_alike(tmp_path):
    config = TWO_LAYERS | {"model_type": "diff_v2", "num_key_value_heads": 2}
    tensors = write_random(tmp_path / "v2", config, torch.float32)
    # Weights whose scales float16 would hold with few bits, had they no common unit.
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1e-5
    save_file(tensors, tmp_path / "v2" / "model.safetensors", metadata={"format": "pt"})
    quantize(tmp_path / "v2", tmp_path / "low", Recipe.of(weights="8:g32"))
    layer = load(tmp_path / "low", dtype=torch.float16, packed=True).model.layers[0].mlp.down_proj
    exact = load(tmp_path / "low").model.layers[0].mlp.down_proj
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    w = dequantize_weight(layer.packed, torch.float32)
    error = (x @ w.T - x @ exact.weight.T).norm() / (x @ exact.weight.T).norm()
    assert error < 5e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_weights_stay_packed_by_default(tmp_path):
    source = write_diffllama(tmp_path / "source", dtype=torch.bfloat16, hidden_size=512, intermediate_size=1024)
    quantize(source, tmp_path / "low", Recipe.of(weights="4:g64"))
    before = torch.cuda.memory_allocated()
    packed = load(tmp_path / "low", device="cuda")
    taken = torch.cuda.memory_allocated() - before
    expanded = load(tmp_path / "low", device="cuda", packed=False)
    assert packed_layers(packed)
    assert not packed_layers(expanded)
    assert not packed_layers(load(tmp_path / "low", dtype=torch.float32, device="cuda"))
    assert taken < 0.4 * (torch.cuda.memory_allocated() - before - taken)
    logits, expected = (model(IDS.cuda()).logits.double() for model in (packed, expanded))
    assert (logits - expected).norm() / expected.norm() < 2e-2
