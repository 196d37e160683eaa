"""Weights as floats: what stock transformers and compressed-tensors read of them, and what vLLM takes for granted."""

import json
import re
from itertools import product

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from diffquant.checkpoints.compressed_tensors import decode_codes
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, GroupSizeError, NonFiniteError, UsageError
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.quantization.roundings.gptq import descent
from diffquant.quantization.roundings.gptq.compensation import InputStatistics, compensate, damp
from diffquant.quantization.roundings.nearest import round_to_nearest
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json
from tests.support.oracles import agrees
from tests.support.packed_folders import edit_tensors
from tests.support.tables import in_one_test

# Scheme, layout, names of a module's tensors, and stored bits of a weight [64, 96].
LAYOUTS = [
    ("e4m3:channel", "float-quantized", ("weight", "weight_scale"), 8 + 16 / 96),
    ("e4m3:tensor", "float-quantized", ("weight", "weight_scale"), 8 + 16 / (64 * 96)),
    ("e4m3:g32", "float-quantized", ("weight", "weight_scale"), 8.5),
    ("e4m3:b32", "float-quantized", ("weight", "weight_scale"), 8 + 16 / 32**2),
    # Blocks that end beyond both edges.
    ("e4m3:b40", "float-quantized", ("weight", "weight_scale"), 8 + 2 * 3 * 16 / (64 * 96)),
    ("nvfp4", "nvfp4-pack-quantized", ("weight_packed", "weight_scale", "weight_global_scale"), 4.5 + 32 / (64 * 96)),
    ("nvfp4_4over6", "nvfp4-pack-quantized", ("weight_packed", "weight_scale", "weight_global_scale"), 4.5 + 1 / 192),
    ("mxfp4", "mxfp4-pack-quantized", ("weight_packed", "weight_scale"), 4.25),
    ("mxfp4_up", "mxfp4-pack-quantized", ("weight_packed", "weight_scale"), 4.25),
    ("mxfp6", "mxfp6-pack-quantized", ("weight_packed", "weight_scale"), 6.25),
    ("mxfp8", "mxfp8-quantized", ("weight", "weight_scale"), 8.25),
]
OWN = ["e5m2:channel", "e5m2:b32", "mxfp8_e5m2", "mxfp6_e3m2"]
MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "bf16"
    tiny_lm.llama(**tiny_lm.WIDER).to(torch.bfloat16).save_pretrained(folder)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


def stock(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


@in_one_test(("scheme", "layout", "names", "bits"), LAYOUTS)
def test_stock_transformers_opens_it_and_gives_the_same_logits(llama, tmp_path, scheme, layout, names, bits):
    report = quantize(llama, tmp_path / "low", scheme)
    config = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    assert config["format"] == layout
    stored = {name: x for name, x in tensors_of(tmp_path / "low").items() if name.startswith(f"{MODULE}.")}
    assert stored.keys() == {f"{MODULE}.{name}" for name in names}
    assert sum(x.nbytes for x in stored.values()) * 8 / (64 * 96) == pytest.approx(bits, abs=1e-6)
    account = json.loads((tmp_path / "low" / "diffquant.json").read_text())["tensors"][f"{MODULE}.weight"]
    assert account["stored_bits"] == pytest.approx(bits, abs=1e-3)
    looked_at = inspect_checkpoint(tmp_path / "low")
    assert looked_at.packed_bits["as it is"] == pytest.approx(report.packed_bits)
    ours, simulated = load(tmp_path / "low"), load(llama, scheme)
    theirs, ids = stock(tmp_path / "low"), torch.arange(3, 60)[None]
    for name, weight in ours.named_parameters():
        assert torch.equal(simulated.get_parameter(name), weight)
    # It decodes weights once it runs.
    agrees("transformers", f"{layout}: logits", ours(ids).logits, theirs(ids).logits)
    weights = (each.get_parameter(f"{MODULE}.weight") for each in (ours, theirs))
    agrees("transformers", f"{layout}: weights", *weights)
    card = (tmp_path / "low" / "README.md").read_text()
    assert f"compressed-tensors' {layout}" in card
    assert "- compressed-tensors" in card


@in_one_test(("scheme", "layout"), [each[:2] for each in LAYOUTS])
def test_compressed_tensors_decodes_a_module_to_what_float32_gives_once_rounded(llama, tmp_path, scheme, layout):
    quantize(llama, tmp_path / "low", scheme)
    source = open_source(tmp_path / "low")
    config = QuantizationConfig.model_validate(source.checkpoint.config["quantization_config"])
    group = config.config_groups["group_0"]
    state = {
        name.removeprefix(f"{MODULE}."): x
        for name, x in tensors_of(tmp_path / "low").items()
        if name.startswith(f"{MODULE}.")
    }
    theirs = BaseCompressor.get_value_from_registry(layout).decompress(state, group)["weight"]
    ours = load(tmp_path / "low", dtype=torch.float32).get_parameter(f"{MODULE}.weight")
    assert theirs.dtype == torch.bfloat16
    agrees("compressed-tensors", f"{layout}: written weights", ours.bfloat16(), theirs)
    # Products in float32 have more digits where two scales are multiplied.
    assert torch.equal(ours, theirs.float()) == (not scheme.startswith(("nvfp4", "e4m3")))


@in_one_test("scheme", OWN)
def test_floats_that_compressed_tensors_lacks_are_read_back_here_and_refused_there(llama, tmp_path, scheme):
    quantize(llama, tmp_path / "low", scheme)
    stored, simulated = load(tmp_path / "low"), load(llama, scheme)
    assert torch.equal(stored.get_parameter(f"{MODULE}.weight"), simulated.get_parameter(f"{MODULE}.weight"))
    with pytest.raises(ValueError, match="is not a valid QuantizationType"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "low")


def test_formats_mix_in_a_folder_and_every_group_names_its_own(llama, tmp_path):
    recipe = Recipe.of(weights="nvfp4", overrides={"*.o_proj": "e4m3:channel", "*.down_proj": "4:g32"})
    quantize(llama, tmp_path / "low", recipe)
    config = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {
        *("nvfp4-pack-quantized", "float-quantized", "pack-quantized")
    }
    ids = torch.arange(3, 60)[None]
    assert torch.equal(stock(tmp_path / "low")(ids).logits, load(tmp_path / "low")(ids).logits)


def test_weights_that_vllm_joins_have_one_tensor_scale(llama, tmp_path):
    quantize(llama, tmp_path / "low", Recipe.of(weights="nvfp4", overrides={"*.1.self_attn.v_proj": "8:row"}))
    written, plain = tensors_of(tmp_path / "low"), tensors_of(llama)
    joined = [
        [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"],
        [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")],
        ["model.layers.0.self_attn.o_proj"],
        # The other one of these has another format, and an engine joins it with nothing.
        [f"model.layers.1.self_attn.{name}_proj" for name in "qk"],
    ]
    for modules in joined:
        largest = max(float(plain[f"{module}.weight"].abs().max()) for module in modules)
        for module in modules:
            assert written[f"{module}.weight_global_scale"].tolist() == [pytest.approx(448 * 6 / largest)]


def test_a_minus_of_zero_and_fp8_that_others_wrote_are_read(llama, tmp_path):
    quantize(llama, tmp_path / "low", "mxfp4")
    before = load(tmp_path / "low").get_parameter(f"{MODULE}.weight").clone()

    packed = tensors_of(tmp_path / "low")[f"{MODULE}.weight_packed"]
    signs = torch.where(packed & 0x07 == 0, 0x08, 0).to(torch.uint8)
    edit_tensors(tmp_path / "low", {f"{MODULE}.weight_packed": packed | signs})
    assert torch.equal(load(tmp_path / "low").get_parameter(f"{MODULE}.weight"), before)


@in_one_test(
    ("scheme", "part", "byte"),
    [("mxfp4", "weight_scale", 255), ("nvfp4", "weight_scale", 127), ("e4m3:channel", "weight", 255)],
)
def test_bytes_that_mean_nan_are_refused_by_name(llama, tmp_path, scheme, part, byte):
    quantize(llama, tmp_path / "low", scheme)

    spoilt = tensors_of(tmp_path / "low")[f"{MODULE}.{part}"]
    spoilt.view(torch.uint8)[1, 1] = byte
    edit_tensors(tmp_path / "low", {f"{MODULE}.{part}": spoilt})
    with pytest.raises(NonFiniteError, match=re.escape(MODULE)):
        load(tmp_path / "low")


def test_missing_and_mistyped_parts_are_named(llama, tmp_path):
    quantize(llama, tmp_path / "low", "nvfp4")
    tensors = tensors_of(tmp_path / "low")
    edit_tensors(tmp_path / "low", {f"{MODULE}.weight_global_scale": None})
    with pytest.raises(CheckpointError, match=rf"missing {re.escape(MODULE)}\.weight_global_scale \[1\]"):
        load(tmp_path / "low")
    edit_tensors(tmp_path / "low", tensors | {f"{MODULE}.weight_scale": tensors[f"{MODULE}.weight_scale"].bfloat16()})
    with pytest.raises(CheckpointError, match=rf"wrong type: {re.escape(MODULE)}\.weight_scale is torch.bfloat16"):
        load(tmp_path / "low")


def test_blocks_that_do_not_divide_a_width_are_refused_with_the_way_out(tmp_path):
    narrow = tiny_lm.write_llama(tmp_path / "narrow")
    with pytest.raises(GroupSizeError, match=r"group size 32 does not divide .*down_proj.weight \[32, 48\]"):
        quantize(narrow, tmp_path / "low", "mxfp4")
    assert quantize(narrow, tmp_path / "low", "nvfp4").packed_bits < 4.6


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "e4m3:channel"])
@pytest.mark.parametrize(
    "rounding",
    ["mse", *({"name": name, "tokens": 256, "window": 64} for name in ("gptq", "tuned"))],
    ids=["mse", "gptq", "tuned"],
)
def test_roundings_fit_scales_that_the_format_can_store(llama, tmp_path, scheme, rounding, monkeypatch):
    monkeypatch.setattr(descent, "_STEPS", 20)
    near = quantize(llama, tmp_path / "near", scheme)
    recipe = Recipe.of(weights=scheme, rounding=rounding)
    fitted = quantize(llama, tmp_path / "fitted", recipe)
    stored, simulated = load(tmp_path / "fitted"), load(llama, recipe)
    assert torch.equal(stored.get_parameter(f"{MODULE}.weight"), simulated.get_parameter(f"{MODULE}.weight"))
    if rounding == "mse":
        assert sum(e.error for e in fitted.errors) < sum(e.error for e in near.errors)
    ids = torch.arange(3, 60)[None]
    assert torch.equal(stock(tmp_path / "fitted")(ids).logits, stored(ids).logits)


@in_one_test("text", ["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp6", "e4m3:row"])
def test_gptq_lowers_the_error_at_the_output_of_correlated_inputs(text):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=generator)
    x = torch.randn(512, 24, generator=generator) @ torch.randn(24, 96, generator=generator)
    x += 0.1 * torch.randn(512, 96, generator=generator)
    scheme = Scheme.parse(text).with_tensor_scale(weight.abs().amax())
    near = decode_codes(*round_to_nearest("", weight, scheme, torch.float32), scheme)
    compensated = decode_codes(
        *compensate(weight, InputStatistics.factorize(damp(x.mT @ x)), scheme, torch.float32), scheme
    )
    errors = [float((x @ (weight - each).mT).square().mean()) for each in (near, compensated)]
    assert errors[1] < 0.6 * errors[0]


def test_four_over_six_loses_less_than_nvfp4_at_the_same_size(llama, tmp_path):
    reports = {name: quantize(llama, tmp_path / name, name) for name in ("nvfp4", "nvfp4_4over6")}
    errors = {name: sum(e.error for e in report.errors) for name, report in reports.items()}
    assert errors["nvfp4_4over6"] < 0.97 * errors["nvfp4"]
    assert reports["nvfp4"].bytes_after == reports["nvfp4_4over6"].bytes_after


@in_one_test("size", [16, 40, 128])
def test_codes_under_scales_of_blocks_are_those_of_compressed_tensors(llama, tmp_path, size, monkeypatch):
    quantize(llama, tmp_path / "low", f"e4m3:b{size}")
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[size, size])
    scheme, plain = QuantizationScheme(targets=["Linear"], weights=args), tensors_of(llama)
    codec = BaseCompressor.get_value_from_registry("float-quantized")
    written = tensors_of(tmp_path / "low")
    modules = [name.removesuffix(".weight_scale") for name in written if name.endswith("_scale")]
    assert len(modules) == 14
    for module in modules:
        scale, weight = written[f"{module}.weight_scale"], plain[f"{module}.weight"].float()
        assert tuple(scale.shape) == tuple(-(-length // size) for length in weight.shape)
        for row, column in product(*map(range, scale.shape)):
            tile = weight[row * size : (row + 1) * size, column * size : (column + 1) * size]
            assert float(scale[row, column]) == float((tile.abs().max() / 448).bfloat16())
        theirs = codec.compress({"weight": weight, "weight_scale": scale.float()}, scheme)["weight"]
        ours = written[f"{module}.weight"].float()
        agrees("compressed-tensors", "e4m3 in blocks: codes", ours, theirs.float())
    # A few rows at a time, blocks stay whole.
    monkeypatch.setattr("diffquant.checkpoints.row_stream.BLOCK_ELEMENTS", 7 * 64)
    quantize(llama, tmp_path / "pieces", f"e4m3:b{size}")
    assert all(torch.equal(x.float(), written[name].float()) for name, x in tensors_of(tmp_path / "pieces").items())


@in_one_test("rounding", ["mse", "gptq", "tuned"])
def test_blocks_are_for_roundings_that_do_not_work_row_by_row(llama, tmp_path, rounding):
    with pytest.raises(UsageError, match=rf"'{rounding}' rounds row by row, but .* have one scale per block"):
        quantize(llama, tmp_path / "low", Recipe.of(weights="e4m3:b32", rounding=rounding))


@in_one_test("text", ["4:b32", "8:b128"])
def test_integers_are_not_stored_in_blocks(llama, tmp_path, text):
    with pytest.raises(UsageError, match=r"cannot have one scale per block of a weight; e4m3:b\d+ and e5m2:b\d+ can"):
        quantize(llama, tmp_path / "low", text)


def test_a_float_weight_is_refused_by_export_before_anything_is_written(llama, tmp_path):
    from diffquant.onnx import export

    quantize(llama, tmp_path / "low", "nvfp4")
    with pytest.raises(UsageError, match="nvfp4 is not an integer format of 2 to 8 bits"):
        export(tmp_path / "low", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@in_one_test(
    ("scheme", "change", "said"),
    [
        *(("e4m3:b32", {"block_structure": each}, "block_structure") for each in (None, [32, 0], [32], "32")),
        ("mxfp4", {"num_bits": 5}, "group_0 has 5 bits"),
    ],
)
def test_a_group_with_other_blocks_or_codes_than_its_layout_has_is_refused(llama, tmp_path, scheme, change, said):
    quantize(llama, tmp_path / "low", scheme)
    config = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"] |= change
    edit_json(tmp_path / "low" / "config.json", quantization_config=config)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "low")
