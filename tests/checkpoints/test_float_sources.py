"""Folders of floats, and of integers that are not read packed, as other libraries write them.

Expected values are what compressed-tensors and transformers make of the same bytes; ModelOpt, whose library has an
environment of its own, is held to its readers in test_dequantized_peers.py, and here to products in NumPy.
"""

import json

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformLocation, TransformScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import diffquant
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.weight_source import open_weights
from diffquant.errors import CheckpointError
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import MOTIF3, edit_json, write_checkpoint, write_random
from tests.support.models import random_ids
from tests.support.oracles import agrees
from tests.support.packed_folders import edit_entry, edit_tensors
from tests.support.tables import in_one_test

UP = "model.layers.0.mlp.up_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
ROUNDED = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def weights(strategy="channel", bits=8, kind="float", **others):
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, **others}


def uneven(strategy, bits, **others):
    return weights(strategy, bits, "int", symmetric=False, **others)


E4M3, E8M0 = "torch.float8_e4m3fn", "torch.uint8"
# The folder's format, its weights, its inputs, and the kind that people are told.
FOLDERS = {
    "fp8 of tensors": ("float-quantized", weights("tensor"), ROUNDED, "FP8"),
    "fp8 of channels": ("float-quantized", weights(), ROUNDED, "FP8"),
    "fp8 of blocks": ("float-quantized", weights("block", block_structure=[24, 40]), ROUNDED, "FP8"),
    "fp8 of groups": ("naive-quantized", weights("group", group_size=32), None, "FP8"),
    "nvfp4": ("nvfp4-pack-quantized", weights("tensor_group", 4, group_size=16, scale_dtype=E4M3), STATIC4, "NVFP4"),
    "mxfp4": ("mxfp4-pack-quantized", weights("group", 4, group_size=32, scale_dtype=E8M0), ROUNDED, "MXFP4"),
    "mxfp8": ("mxfp8-quantized", weights("group", group_size=32, scale_dtype=E8M0), ROUNDED, "MXFP8"),
    "int8": ("int-quantized", weights(kind="int"), ROUNDED, "int8 per channel"),
    "int8 with zero points": ("int-quantized", uneven("channel", 8), ROUNDED, "int8 per channel"),
    "int4 with zero points": ("pack-quantized", uneven("group", 4, group_size=32), None, "int4 per group of 32"),
    "int3 with zero points": ("pack-quantized", uneven("channel", 3), None, "int3 per channel"),
    "int4 of tensors with zero points": ("pack-quantized", uneven("tensor", 4), None, "int4 per tensor"),
}


def write_folder(folder, kind, source="llama"):
    """A random checkpoint whose matrices compressed-tensors compressed; what it decompresses each to, in float32."""
    layout, stated, inputs, _ = FOLDERS[kind]
    write_checkpoint(folder, source, torch.float16)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    codec = BaseCompressor.get_value_from_registry(layout)
    scheme = QuantizationScheme(targets=["Linear"], weights=stated, input_activations=inputs)
    generator = torch.Generator().manual_seed(3)
    for name in [n for n in tensors if n.endswith("_proj.weight") and "lambda" not in n]:
        module = name.removesuffix(".weight")
        state = codec.compress(random_state(tensors.pop(name).float(), stated, generator), scheme)
        if "int" in layout or "naive" in layout or "float" in layout:
            # compressed-tensors computes in the scale's dtype.
            state["weight_scale"] = state["weight_scale"].float()
        expected[name] = codec.decompress(dict(state), scheme)["weight"]
        if inputs and inputs.get("dynamic") is not True:
            state["input_global_scale"] = torch.ones(1)
        tensors |= {f"{module}.{part}": data.contiguous() for part, data in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": stated, "input_activations": inputs, "format": layout}
    entry = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    edit_json(folder / "config.json", quantization_config=entry, dtype="float16")
    return expected


def random_state(weight, stated, generator):
    """A weight with scales, and zero points where it has them, of the shapes that compressed-tensors observes."""
    rows, width = weight.shape
    block = stated.get("block_structure", [1, 1])
    shape = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // block[0]), -(-width // block[1]))}.get(
        stated["strategy"], (rows, width // stated.get("group_size", width))
    )
    state = {"weight": weight}
    scale = torch.rand(shape, generator=generator) * 0.01 + 0.002
    if stated.get("scale_dtype") == "torch.uint8":
        scale = 2.0 ** torch.randint(-9, -5, shape, generator=generator)
    if stated["strategy"] == "tensor_group":
        state["weight_global_scale"] = torch.full((1,), 900.0)
        scale = (scale * 900).to(torch.float8_e4m3fn).float()
    if stated["symmetric"] is False:
        limit = 2 ** (stated["num_bits"] - 1)
        zeros = torch.randint(-limit, limit, shape, generator=generator, dtype=torch.int8)
        state["weight_zero_point"] = zeros
    return state | {"weight_scale": scale}


@in_one_test("kind", FOLDERS)
def test_a_weight_is_what_compressed_tensors_decompresses(tmp_path, kind):
    expected = write_folder(tmp_path / "packed", kind)
    checkpoint = open_checkpoint(tmp_path / "packed")
    assert len(expected) == 14
    for name, values in expected.items():
        agrees("compressed-tensors", f"{kind}: weights read", checkpoint.read(name).to(values.dtype), values)
        assert checkpoint.output_dtype(name) == torch.float16
    assert checkpoint.earlier_format == f"compressed-tensors {FOLDERS[kind][3]}"
    assert ("also round inputs" in checkpoint.engine_difference_note) == bool(FOLDERS[kind][2])


@in_one_test("source", ["llama", "diffllama", "unilm-v2"])
def test_an_fp8_folder_of_a_known_model_is_opened_scored_and_written_again(tmp_path, source):
    write_folder(tmp_path / "packed", "fp8 of channels", source)
    assert "rounded to compressed-tensors FP8 before" in str(inspect_checkpoint(tmp_path / "packed"))
    logits = load(tmp_path / "packed", dtype=torch.float32)(random_ids()).logits
    diffquant.quantize(tmp_path / "packed", tmp_path / "plain", {"weights": "16"}, dtype=torch.float32)
    assert torch.equal(load(tmp_path / "plain", dtype=torch.float32)(random_ids()).logits, logits)
    result = quantize(tmp_path / "packed", tmp_path / "again", Recipe.of(weights="nvfp4"))
    assert "which diffquant does not compute" in " ".join(result.notes)
    assert len(open_source(tmp_path / "again").packed) == len(result.errors)
    assert open_weights(tmp_path / "packed").checkpoint.tensors[f"{UP}.weight"].dtype == torch.float32


def test_what_is_quantized_in_weights_alone_stays_packed(tmp_path):
    write_folder(tmp_path / "packed", "mxfp8")
    edit_entry(
        tmp_path / "packed",
        config_groups={"group_0": {"targets": ["Linear"], "weights": FOLDERS["mxfp8"][1], "format": "mxfp8-quantized"}},
    )
    assert len(open_source(tmp_path / "packed").packed) == 14


@pytest.mark.parametrize("location", TransformLocation)
@pytest.mark.parametrize("kind", ["mxfp8", "int8"])
def test_transforms_that_engines_compute_are_refused(tmp_path, kind, location):
    """Those of weights alone were made before they were stored: it is compressed-tensors that says which they are."""
    write_folder(tmp_path / "packed", kind)
    applied = TransformArgs(targets=["re:.*down_proj$"], location=location)
    transform = TransformScheme(type="hadamard", apply=[applied], head_dim=16)
    edit_entry(tmp_path / "packed", transform_config=TransformConfig(config_groups={"R4": transform}).model_dump())
    if applied.is_online():
        with pytest.raises(CheckpointError, match=r"rotates activations while the model runs \(R4\)"):
            open_source(tmp_path / "packed")
    else:
        open_source(tmp_path / "packed")


@in_one_test("config", [{"config_groups": ["R4"]}, "hadamard", {"config_groups": {"R4": {"apply": {}}}}])
def test_transforms_of_another_form_are_refused(tmp_path, config):
    write_folder(tmp_path / "packed", "int8")
    edit_entry(tmp_path / "packed", transform_config=config)
    with pytest.raises(CheckpointError, match="rotates activations while the model runs"):
        open_source(tmp_path / "packed")


def test_integers_in_groups_of_any_order_follow_their_index(tmp_path):
    expected = write_folder(tmp_path / "packed", "int4 with zero points")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)) // 32
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    edit_tensors(tmp_path / "packed", {f"{UP}.weight_g_idx": order.int()})
    read = open_checkpoint(tmp_path / "packed").read(f"{UP}.weight")
    shape = torch.Size(stored[f"{UP}.weight_shape"].tolist())
    codes = unpack_from_int32(stored[f"{UP}.weight_packed"], 4, shape).float()
    zeros = unpack_from_int32(stored[f"{UP}.weight_zero_point"], 4, (shape[0], 2), packed_dim=0).float()
    scale = stored[f"{UP}.weight_scale"].float()
    assert torch.equal(read, (codes - zeros[:, order]) * scale[:, order])
    assert not torch.equal(read, expected[f"{UP}.weight"].float())
    edit_tensors(tmp_path / "packed", {f"{UP}.weight_g_idx": torch.full((64,), -1, dtype=torch.int32)})
    assert torch.equal(open_checkpoint(tmp_path / "packed").read(f"{UP}.weight"), expected[f"{UP}.weight"].float())
    for group in (2, -1):
        order[9] = group
        edit_tensors(tmp_path / "packed", {f"{UP}.weight_g_idx": order.int()})
        with pytest.raises(CheckpointError, match=rf"{UP}\.weight_g_idx refers to group {group} of only 2"):
            open_checkpoint(tmp_path / "packed")


@in_one_test("targets", ["Linear", [7], None])
def test_targets_that_are_no_list_of_names_are_refused(tmp_path, targets):
    write_folder(tmp_path / "packed", "int8")
    edit_entry(tmp_path / "packed", config_groups={"group_0": {"targets": targets, "weights": weights(kind="int")}})
    with pytest.raises(CheckpointError, match="group_0 has no list of targets"):
        open_checkpoint(tmp_path / "packed")


def test_zero_points_are_subtracted_wherever_they_are(tmp_path):
    """As compressed-tensors does, whatever the group says of symmetry."""
    expected = write_folder(tmp_path / "packed", "int8 with zero points")
    stated = {"targets": ["Linear"], "weights": weights(kind="int"), "input_activations": ROUNDED}
    edit_entry(tmp_path / "packed", config_groups={"group_0": stated}, transform_config={})
    assert torch.equal(open_source(tmp_path / "packed").checkpoint.read(f"{UP}.weight"), expected[f"{UP}.weight"])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (160,), (159, 2), (1, 2, 2)])
@pytest.mark.parametrize("kind", ["int4 with zero points", "int4 of tensors with zero points"])
def test_zero_points_of_scales_of_another_shape_are_refused_or_read(tmp_path, kind, shape):
    write_folder(tmp_path / "packed", kind)
    edit_tensors(tmp_path / "packed", {f"{UP}.weight_scale": torch.ones(shape)})
    if "tensors" in kind and shape in ((), (1,)):
        edit_tensors(tmp_path / "packed", {f"{UP}.weight_zero_point": torch.ones(shape, dtype=torch.int8)})
        assert open_checkpoint(tmp_path / "packed").read(f"{UP}.weight").shape == (160, 64)
    else:
        with pytest.raises(CheckpointError, match=UP):
            open_checkpoint(tmp_path / "packed")


@in_one_test("name", ["group", "dynamic"])
def test_an_order_of_groups_is_read_by_either_name(tmp_path, name):
    write_folder(tmp_path / "packed", "int4 with zero points")
    order = (torch.arange(64) % 2).int()
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    without = {part: None for part in stored if part.endswith("zero_point")}
    edit_tensors(tmp_path / "packed", without | {f"{UP}.weight_g_idx": order})
    stated = weights("group", 4, "int", group_size=32, actorder=name)
    edit_entry(tmp_path / "packed", config_groups={"group_0": {"targets": ["Linear"], "weights": stated}})
    read = open_source(tmp_path / "packed").checkpoint.read(f"{UP}.weight")
    codes = unpack_from_int32(stored[f"{UP}.weight_packed"], 4, read.shape).float()
    assert torch.equal(read, codes * stored[f"{UP}.weight_scale"].float()[:, order])


def write_fp8(folder, block=(32, 16)):
    """A Llama in blocks as DeepSeek has them; what transformers dequantizes each matrix to."""
    write_checkpoint(folder, "llama", torch.bfloat16)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        codes = tensors[name].float().mul(50).to(torch.float8_e4m3fn)
        scale = torch.rand(codes.shape[0] // block[0], codes.shape[1] // block[1], generator=torch.Generator()) + 0.1
        expected[name] = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
        tensors |= {name: codes, f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    edit_json(folder / "config.json", quantization_config=entry)
    return expected


def test_fp8_in_blocks_is_what_transformers_dequantizes(tmp_path):
    expected = write_fp8(tmp_path / "packed")
    checkpoint = open_checkpoint(tmp_path / "packed")
    assert len(expected) == 14
    for name, values in expected.items():
        agrees("transformers", "fp8 of blocks: weights read", checkpoint.read(name), values)
    assert checkpoint.earlier_format == "FP8 in blocks of 32x16"
    assert torch.isfinite(load(tmp_path / "packed", dtype=torch.float32)(random_ids()).logits).all()


def test_fp8_under_autofp8_s_names_is_code_times_scale(tmp_path):
    expected = write_fp8(tmp_path / "packed")
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    changes = {f"{name}_scale_inv": None for name in expected}
    changes |= {f"{name}_scale": torch.tensor(0.5) for name in expected}
    changes |= {f"{name.removesuffix('weight')}input_scale": torch.tensor(0.25) for name in expected}
    edit_tensors(tmp_path / "packed", changes)
    entry = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    edit_json(tmp_path / "packed" / "config.json", quantization_config=entry)
    checkpoint = open_source(tmp_path / "packed").checkpoint
    assert all(torch.equal(checkpoint.read(name), stored[name].float() / 2) for name in expected)


@in_one_test(
    ("changes", "problem"),
    [
        ({f"{UP}.weight_scale_inv": None}, rf"{UP}\.weight is torch\.float8_e4m3fn, and its scales are missing"),
        ({f"{UP}.weight": None}, rf"{UP}\.weight_scale_inv exists, but {UP}\.weight"),
        (
            {f"{UP}.weight_scale_inv": torch.ones(3, 3)},
            rf"{UP}\.weight is .* does not fit the scale torch.float32 \[3, 3\]",
        ),
    ],
)
def test_damaged_tensors_of_fp8_are_named(tmp_path, changes, problem):
    write_fp8(tmp_path / "packed")
    edit_tensors(tmp_path / "packed", changes)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(tmp_path / "packed")


def nvfp4(shape, experts, generator):
    """Codes, e4m3 scales and one float32 multiplier an expert, with what they stand for in NumPy."""
    *lead, rows, width = shape
    nibbles = generator.integers(0, 16, shape, dtype=np.uint8)
    scales = torch.from_numpy(generator.uniform(1, 400, (*lead, rows, width // 16)).astype(np.float32))
    scales = scales.to(torch.float8_e4m3fn)
    above = generator.uniform(1e-4, 1e-3, experts).astype(np.float32)
    product = scales.float().numpy() * above.reshape((-1,) + (1,) * (len(shape) - 1) if experts else ())
    values = E2M1[nibbles] * product.repeat(16, -1)
    packed = torch.from_numpy(nibbles[..., ::2] | nibbles[..., 1::2] << 4)
    return packed, scales, torch.from_numpy(np.asarray(above)), values


def write_vendors_motif3(folder):
    """Motif-3 as its vendor's tool packs it: the experts alone, one multiplier an expert; the experts' values."""
    tensors = write_random(folder, MOTIF3 | {"moe_intermediate_size": 16, "hidden_size": 32}, torch.bfloat16)
    generator, expected = np.random.default_rng(0), {}
    for name in [n for n in tensors if ".experts." in n and n.endswith("_proj")]:
        packed, scales, above, expected[name] = nvfp4(tuple(tensors[name].shape), tensors[name].shape[0], generator)
        tensors |= {name: packed, f"{name}_weight_scale": scales, f"{name}_weight_scale_2": above}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": "modelopt_nvfp4", "group_size": 16, "produced_by": "motif_nvfp4_quantize_ckpt.py"}
    edit_json(folder / "config.json", quantization_config=entry)
    return expected


def test_the_vendors_nvfp4_release_of_motif_3_opens_generates_and_is_quantized_again(tmp_path):
    expected = write_vendors_motif3(tmp_path / "vendor")
    source = open_source(tmp_path / "vendor")
    assert source.checkpoint.earlier_format == "ModelOpt NVFP4"
    assert expected
    for name, values in expected.items():
        assert np.array_equal(source.checkpoint.read(name).numpy(), values)
        assert torch.equal(source.checkpoint.read_rows(name, slice(1, 3)), torch.from_numpy(values[1:3]))
        flat = torch.from_numpy(values).flatten(0, 1)
        assert torch.equal(source.checkpoint.read_matrix_rows(name, 5, 40), flat[5:40])
    diffquant.quantize(tmp_path / "vendor", tmp_path / "plain", {"weights": "16"}, dtype=torch.float32)
    stored = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(np.array_equal(stored[name].numpy(), values) for name, values in expected.items())
    logits = load(tmp_path / "vendor", dtype=torch.float32)(random_ids()).logits
    assert torch.equal(load(tmp_path / "plain", dtype=torch.float32)(random_ids()).logits, logits)
    result = quantize(tmp_path / "vendor", tmp_path / "again", Recipe.of(weights="8:row"))
    assert "rounded to ModelOpt NVFP4 before" in " ".join(result.notes)
    assert all(source.checkpoint.read(name).ndim == 3 for name in expected)


def write_modelopt(folder, beside=False):
    """A Llama with an NVFP4, an FP8 and an MXFP8 matrix, their inputs' scales and those of an FP8 cache."""
    write_checkpoint(folder, "llama", torch.bfloat16)
    tensors, generator = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    rows, width = tensors[f"{UP}.weight"].shape
    packed, scales, above, values = nvfp4((rows, width), (), generator)
    tensors |= {f"{UP}.weight": packed, f"{UP}.weight_scale": scales, f"{UP}.weight_scale_2": above}
    attention = "model.layers.0.self_attn"
    codes = tensors[f"{attention}.k_proj.weight"].to(torch.float8_e4m3fn)
    tensors |= {
        f"{UP}.input_scale": torch.tensor(0.5),
        f"{attention}.k_proj.weight": codes,
        f"{attention}.k_proj.weight_scale": torch.tensor(0.25),
        f"{attention}.k_proj.k_scale": torch.tensor(1.0),
        f"{attention}.v_proj.v_scale": torch.tensor(1.0),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if beside:
        producer = {"name": "modelopt", "version": "0.29.0"}
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": stated}))
    else:
        edit_json(folder / "config.json", quantization_config={"quant_method": "modelopt", **stated})
    return {f"{UP}.weight": values, f"{attention}.k_proj.weight": codes.float().numpy() / 4}


@in_one_test("beside", [False, True])
def test_a_modelopt_folder_may_mix_formats_and_says_so_in_either_file(tmp_path, beside):
    expected = write_modelopt(tmp_path / "packed", beside)
    checkpoint = open_source(tmp_path / "packed").checkpoint
    for name, values in expected.items():
        assert np.array_equal(checkpoint.read(name).numpy(), values)
    assert checkpoint.earlier_format in ("ModelOpt NVFP4/FP8", "ModelOpt FP8/NVFP4")
    assert "whose 3 scales are not used here" in checkpoint.engine_difference_note
    diffquant.quantize(tmp_path / "packed", tmp_path / "plain", {"weights": "16"})
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    ids = random_ids()
    plain, packed = (load(tmp_path / each, dtype=torch.bfloat16)(ids).logits for each in ("plain", "packed"))
    assert torch.equal(plain, packed)


def test_a_folder_with_scales_of_a_cache_alone_is_told_apart_from_a_plain_one(tmp_path):
    write_checkpoint(tmp_path / "packed", "llama", torch.bfloat16)
    edit_tensors(tmp_path / "packed", {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())})
    entry = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    edit_json(tmp_path / "packed" / "config.json", quantization_config=entry)
    with pytest.raises(CheckpointError, match=r"scales of activations or caches, .*k_proj\.k_scale: open the 16-bit"):
        open_checkpoint(tmp_path / "packed")


@in_one_test(
    ("entry", "changes", "problem"),
    [
        ({"quant_algo": "W4A16_AWQ"}, {}, "quant_algo of quantization_config is 'W4A16_AWQ'"),
        ({}, {f"{UP}.weight_scale_2": None}, rf"{UP}\.weight is torch\.uint8 .* without a scale per tensor"),
        ({}, {f"{UP}.weight_scale_2": torch.ones(7)}, r"weight_scale_2 is \[7\], expected one number, or one per exp"),
        ({}, {f"{UP}.pre_quant_scale": torch.ones(64)}, rf"{UP}\.weight has a pre_quant_scale, which is not supported"),
        ({}, {f"{UP}.weight_scale": None}, rf"{UP}\.weight is torch\.uint8, and its scales are missing"),
    ],
)
def test_what_of_modelopt_is_not_read_is_named(tmp_path, entry, changes, problem):
    write_modelopt(tmp_path / "packed")
    edit_entry(tmp_path / "packed", **entry)
    edit_tensors(tmp_path / "packed", changes)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(tmp_path / "packed")
