"""Folders that other libraries quantized. Expected values are made of the codes in float64, never of packed bytes.

The libraries themselves are held to these readers in test_dequantized_peers.py.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import diffquant
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError
from diffquant.quantization.conversion import convert
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.models import random_ids
from tests.support.packed_folders import edit_entry, edit_tensors, pack_gptq, write_packed
from tests.support.tables import in_one_test

UP = "model.layers.0.mlp.up_proj"
KINDS = {
    "gptq": {"method": "gptq", "sym": False},
    "gptq, two bits": {"method": "gptq", "bits": 2},
    "gptq, three bits": {"method": "gptq", "bits": 3, "size": -1},
    "gptq, eight bits": {"method": "gptq", "bits": 8, "desc_act": True},
    "gptq, any order": {"method": "gptq", "size": 16, "desc_act": True, "checkpoint_format": "gptq"},
    "gptq_v2": {"method": "gptq", "checkpoint_format": "gptq_v2", "desc_act": True},
    "gptq_v2, newer key": {"method": "gptq", "format": "gptq_v2"},
    "awq": {"method": "awq", "version": "gemm", "zero_point": True},
    "awq, one group": {"method": "awq", "size": -1},
}


@pytest.fixture(params=["gptq, any order", "awq"])
def folder(request, tmp_path):
    write_packed(tmp_path / "packed", **KINDS[request.param])
    return tmp_path / "packed"


@in_one_test("kind", KINDS)
def test_a_weight_is_scale_times_code_less_zero_point(tmp_path, kind):
    expected = write_packed(tmp_path / "packed", **KINDS[kind])
    checkpoint = open_checkpoint(tmp_path / "packed")
    assert len(expected) == 14
    for name, values in expected.items():
        assert checkpoint.tensors[name].shape == values.shape
        # A 16-bit scale times a code of eight bits is exact in float32.
        assert np.array_equal(checkpoint.read(name).numpy().astype(np.float64), values)


def test_rows_are_those_of_the_whole_tensor(folder, monkeypatch):
    checkpoint = open_checkpoint(folder)
    picked = torch.tensor([5, 0, 5, 31])
    wholes = {name: checkpoint.read(name) for name in checkpoint.tensors}
    monkeypatch.setattr("diffquant.checkpoints.dequantized._AT_A_TIME", 200)
    for name, whole in wholes.items():
        assert torch.equal(checkpoint.read_rows(name, slice(3, 17)), whole[3:17])
        assert torch.equal(checkpoint.read_rows(name, picked), whole[picked])
        assert torch.equal(checkpoint.read(name), whole)


@pytest.mark.parametrize("source", ["llama", "diffllama", "unilm-v2", "motif"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_model_computes_what_it_computes_of_the_floats(tmp_path, method, source):
    expected = write_packed(tmp_path / "packed", method, source)
    write_floats(tmp_path / "floats", tmp_path / "packed", expected)
    ids = random_ids()
    ours = load(tmp_path / "packed", dtype=torch.float32)(ids).logits
    assert torch.equal(ours, load(tmp_path / "floats", dtype=torch.float32)(ids).logits)


def write_floats(folder, packed, matrices):
    """A plain folder of a packed one's floats."""
    folder.mkdir()
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    parts = (".qweight", ".qzeros", ".scales", ".g_idx")
    tensors = {n: t for n, t in load_file(packed / "model.safetensors").items() if not n.endswith(parts)}
    tensors |= {name: torch.from_numpy(values).float().contiguous() for name, values in matrices.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_bits_are_lost_only_to_the_dtype_that_is_asked_for(folder, tmp_path):
    """A folder of 16 bits, which engines serve, has the float16 numbers that the library's own kernels multiply by."""
    diffquant.quantize(folder, tmp_path / "plain", {"weights": "16"})
    plain, packed = open_checkpoint(tmp_path / "plain"), open_checkpoint(folder)
    assert "quantization_config" not in plain.config
    assert plain.tensors.keys() == packed.tensors.keys()
    assert plain.earlier_format == packed.earlier_format
    assert all(torch.equal(plain.read(name), packed.read(name).half()) for name in packed.tensors)
    assert torch.equal(load(tmp_path / "plain")(random_ids()).logits, load(folder)(random_ids()).logits)


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "quantization_config.json"])
def test_no_file_says_of_plain_weights_that_they_are_packed(folder, tmp_path, file):
    (folder / file).write_text('{"bits": 4}')
    (folder / "vocab.json").write_text("{}")
    diffquant.quantize(folder, tmp_path / "plain", {"weights": "16"})
    written = {each.name for each in (tmp_path / "plain").iterdir()}
    assert "vocab.json" in written
    assert file not in written


def test_rounding_again_says_so(folder, tmp_path):
    kind = "GPTQ 4:g16" if "gptq" in (folder / "config.json").read_text() else "AWQ 4:g32"
    result = quantize(folder, tmp_path / "again", Recipe.from_dict({"weights": "4:g32"}))
    assert f"the source's weights were rounded to {kind} before" in " ".join(result.notes)
    assert open_source(tmp_path / "again").packed


def test_a_conversion_computes_the_same_and_remembers(folder, tmp_path):
    convert(folder, tmp_path / "diff", "diff-v2", dtype=torch.float32)
    ids = random_ids()
    wanted = load(folder, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(load(tmp_path / "diff")(ids).logits, wanted, rtol=0, atol=1e-4)
    assert open_checkpoint(tmp_path / "diff").earlier_format == open_checkpoint(folder).earlier_format


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({UP + ".scales": None}, rf"{UP}\.scales is missing"),
        ({UP + ".qzeros": None}, rf"{UP}\.qzeros is missing"),
        ({UP + ".scales": torch.ones(3, 160)}, rf"{UP}\.scales is \[3, 160\], not \[\d, 160\]"),
        ({UP + ".scales": torch.ones(160)}, rf"{UP}\.scales is \[160\], expected 2 axes"),
        ({UP + ".qzeros": torch.zeros(4, 20)}, rf"{UP}\.qzeros is torch\.float32, expected torch\.int32"),
        ({UP + ".qweight": torch.zeros(9, 160, dtype=torch.int32)}, rf"{UP}\.(qweight|scales|qzeros) is \["),
        ({UP + ".qweight": None}, rf"missing {UP}\.weight"),
    ],
)
def test_damaged_tensors_are_named(folder, changes, problem):
    edit_tensors(folder, changes)
    with pytest.raises(CheckpointError, match=problem):
        open_source(folder)


@in_one_test(("group", "shown"), [(4, 4), (-1, -1)])
def test_a_group_that_is_not_there_is_named(tmp_path, group, shown):
    write_packed(tmp_path / "packed", **KINDS["gptq, any order"])
    order = torch.zeros(64, dtype=torch.int32)
    order[9] = group
    edit_tensors(tmp_path / "packed", {UP + ".g_idx": order})
    with pytest.raises(CheckpointError, match=rf"{UP}\.g_idx refers to group {shown} of only 4"):
        open_checkpoint(tmp_path / "packed")


def test_a_gpt2_has_its_conv1d_back(tmp_path):
    """Libraries pack a Conv1D as the Linear that computes the same; transformers keeps it the other way round."""
    sizes = {"vocab_size": 90, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    model.save_pretrained(tmp_path / "packed")
    tensors, generator = load_file(tmp_path / "packed/model.safetensors"), np.random.default_rng(7)
    for name, layer in model.named_modules():
        if isinstance(layer, Conv1D):
            inputs, outputs = layer.weight.shape
            codes, zeros = generator.integers(0, 16, (inputs, outputs)), np.full((1, outputs), 8)
            scales = (generator.uniform(0.5, 1.5, (1, outputs)) * 2**-6).astype(np.float16)
            layer.weight.data = torch.from_numpy(scales.astype(np.float64) * (codes - 8)).float()
            del tensors[f"{name}.weight"]
            parts = pack_gptq(codes, zeros, np.zeros(inputs), 4, False) | {"scales": torch.from_numpy(scales)}
            tensors |= {f"{name}.{part}": data for part, data in parts.items()}
    save_file(tensors, tmp_path / "packed/model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}
    edit_json(tmp_path / "packed/config.json", quantization_config=entry)
    checkpoint = open_checkpoint(tmp_path / "packed")
    for name, parameter in model.transformer.named_parameters():
        read = checkpoint.read(f"transformer.{name}")
        assert torch.equal(read, parameter.float())
        assert torch.equal(checkpoint.read_rows(f"transformer.{name}", torch.tensor([3, 0])), read[[3, 0]])
    with pytest.raises(CheckpointError, match=r"stored \[in, out\]"):
        diffquant.quantize(tmp_path / "packed", tmp_path / "low", {"weights": "8:row"}, weights_only=True)


def test_without_g_idx_groups_are_of_neighbours(tmp_path):
    expected = write_packed(tmp_path / "packed", **KINDS["gptq"])
    edit_tensors(tmp_path / "packed", {UP + ".g_idx": None})
    read = open_checkpoint(tmp_path / "packed").read(UP + ".weight")
    assert np.array_equal(read.numpy(), expected[UP + ".weight"])


def test_bits_and_groups_of_one_module_are_those_that_dynamic_gives_it(tmp_path):
    expected = write_packed(tmp_path / "packed", "gptq", sym=True)
    other = write_packed(tmp_path / "other", "gptq", bits=8, size=16, desc_act=True)
    others = load_file(tmp_path / "other" / "model.safetensors")
    edit_tensors(tmp_path / "packed", {name: data for name, data in others.items() if name.startswith(UP)})
    # The first that fits holds, and one behind "-:" is of modules that stay plain.
    dynamic = {"-:.*lm_head": {}, r"+:.*\.0\.mlp\.up": {"bits": 8, "group_size": 16}, r".*\.0\.mlp\.up": {"bits": 3}}
    edit_entry(tmp_path / "packed", dynamic=dynamic)
    checkpoint = open_checkpoint(tmp_path / "packed")
    assert checkpoint.earlier_format == "GPTQ 4:g32/8:g16"
    for module, values in (expected | {f"{UP}.weight": other[f"{UP}.weight"]}).items():
        assert np.array_equal(checkpoint.read(module).numpy(), values)


@in_one_test("sym", [False, None, True])
def test_zero_points_that_version_1_has_no_place_for_are_refused(tmp_path, sym):
    write_packed(tmp_path / "packed", "gptq", sym=sym)
    edit_tensors(tmp_path / "packed", {UP + ".qzeros": torch.full((2, 20), -1, dtype=torch.int32)})
    if sym:
        # Codes of a symmetric folder are the same in every library.
        open_checkpoint(tmp_path / "packed")
        return
    with pytest.raises(CheckpointError, match=rf"{UP}\.qzeros has zero points of 0.*gptq_v2"):
        open_checkpoint(tmp_path / "packed")


@in_one_test(
    ("method", "changes", "problem"),
    [
        ("gptq", {"bits": 9}, "bits of quantization_config is 9, expected 2 to 8"),
        ("gptq", {"bits": True}, "bits of quantization_config is True"),
        ("gptq", {"bits": 8}, r"qweight is \[20, 64\], not \[40, 64\]: 160 inputs of 8 bits"),
        ("gptq", {"group_size": 0}, "group_size of quantization_config is 0"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format of quantization_config is 'marlin'"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype of quantization_config is 'int16'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format of quantization_config is True, expected False"),
        ("gptq", {"dynamic": ["lm_head"]}, "dynamic of quantization_config is not a mapping"),
        ("gptq", {"dynamic": {"+:(": {}}}, r"'\(' is not a regular expression"),
        ("awq", {"bits": 8}, "bits of quantization_config is 8, expected 4 to 4"),
        ("awq", {"version": "gemv"}, "version of quantization_config is 'gemv', expected 'gemm'"),
        ("awq", {"backend": "llm-awq"}, "'llm-awq', whose words have another order"),
        ("awq", {"group_size": 64}, r"gate_proj\.qzeros is \[2, 20\], not \[1, 20\]"),
        ("hqq", {}, "quantized by 'hqq'; diffquant reads .*awq, bitsandbytes, compressed-tensors, fp8, gptq, modelopt"),
    ],
)
def test_settings_that_are_not_read_are_named(tmp_path, method, changes, problem):
    write_packed(tmp_path / "packed", "awq" if method == "awq" else "gptq")
    edit_entry(tmp_path / "packed", quant_method=method, **changes)
    with pytest.raises(CheckpointError, match=problem):
        open_source(tmp_path / "packed")


def test_a_folder_that_is_not_packed_at_all_is_refused(tmp_path):
    expected = write_packed(tmp_path / "packed", "awq")
    write_floats(tmp_path / "floats", tmp_path / "packed", expected)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "floats" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has no weights packed by awq"):
        open_checkpoint(tmp_path / "floats")


def write_nf4(folder):
    """A Llama whose up_proj has nf4 codes, a scale for 64 of them and a map of sixteenths; the values."""
    write_checkpoint(folder, "llama", torch.float16)
    tensors, generator = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    rows, width = tensors[f"{UP}.weight"].shape
    codes, scales = generator.integers(0, 16, rows * width), generator.random(rows * width // 64, np.float32)
    levels = np.arange(-8, 8, dtype=np.float32) / 16
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, width]}
    tensors |= {
        f"{UP}.weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]),
        f"{UP}.weight.absmax": torch.from_numpy(scales),
        f"{UP}.weight.quant_map": torch.from_numpy(levels),
        f"{UP}.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    return (levels[codes] * scales.repeat(64)).reshape(rows, width)


def test_four_bits_of_bitsandbytes_are_a_map_times_a_block_s_scale(tmp_path):
    expected = write_nf4(tmp_path / "packed")
    checkpoint = open_checkpoint(tmp_path / "packed")
    assert np.array_equal(checkpoint.read(f"{UP}.weight").numpy(), expected)
    assert checkpoint.earlier_format == "bitsandbytes nf4"
    assert checkpoint.output_dtype(f"{UP}.weight") == torch.bfloat16
    assert torch.isfinite(load(tmp_path / "packed", dtype=torch.float32)(random_ids()).logits).all()


@in_one_test(
    ("part", "data", "problem"),
    [
        ("absmax", None, r"weight\.absmax is missing"),
        ("absmax", torch.ones(7), r"weight\.absmax is \[7\], not \[160\]"),
        ("quant_map", torch.ones(15), r"weight\.quant_map is \[15\], not \[16\]"),
        ("quant_state.bitsandbytes__nf4", None, r"weight is torch\.uint8, and its scales are missing"),
        (
            "quant_state.bitsandbytes__nf4",
            torch.tensor(list(b"[]"), dtype=torch.uint8),
            "bitsandbytes__nf4 lacks the shape",
        ),
    ],
)
def test_damaged_tensors_of_bitsandbytes_are_named(tmp_path, part, data, problem):
    write_nf4(tmp_path / "packed")
    edit_tensors(tmp_path / "packed", {f"{UP}.weight.{part}": data})
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(tmp_path / "packed")


def test_eight_bit_floats_of_bitsandbytes_need_scales_too(tmp_path):
    write_nf4(tmp_path / "packed")
    gate = UP.replace("up_proj", "gate_proj") + ".weight"
    codes = load_file(tmp_path / "packed" / "model.safetensors")[gate].to(torch.float8_e4m3fn)
    edit_tensors(tmp_path / "packed", {gate: codes})
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is torch\.float8_e4m3fn, and its scales are missing"):
        open_checkpoint(tmp_path / "packed")
