"""Rounded inputs of Linears: compressed-tensors' rounding, folders in stock transformers, and what is refused."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import diffquant
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, DiffQuantError, GroupSizeError, UsageError
from diffquant.model.inputs import round_inputs
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.modeling_diffquant import DiffForCausalLM
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.export.test_gguf import write_llama
from tests.support.checkpoints import PHI4FLASH, edit_json, write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test

# What a scheme is in compressed-tensors.
ARGUMENTS = {
    "8:token": {"num_bits": 8, "type": "int", "strategy": "token"},
    "4:token": {"num_bits": 4, "type": "int", "strategy": "token"},
    "3:token": {"num_bits": 3, "type": "int", "strategy": "token"},
    "8:g16": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "token"},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    | {"scale_dtype": torch.float8_e4m3fn},
    "e4m3:g8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 8},
}
# Sources, weights and activations of folders, and the layout of their weights.
FOLDERS = [
    ("llama", "8:channel", "8", "int-quantized"),
    ("llama", "e4m3:channel", "fp8", "float-quantized"),
    ("llama", "4:g8", "8", "pack-quantized"),
    ("llama", "8:tensor", "8", "int-quantized"),
    ("llama", "6:g8", "8:g8", "pack-quantized"),
    ("diffllama", "8:channel", "8", "int-quantized"),
    ("diffllama", "e4m3:channel", "fp8", "float-quantized"),
    ("diffllama", "4:g8", "8", "pack-quantized"),
    ("unilm-v2", "8:channel", "8", "int-quantized"),
    ("unilm-v2", "e4m3:channel", "fp8", "float-quantized"),
    ("unilm-v2", "4:g8", "4", "pack-quantized"),
]


def rows(dtype):
    """Tokens with outliers, one of zeros, and values halfway between two codes."""
    x = (
        torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 40.0, 1.0, 1.0])[:, None]
    )
    x[0, 3], x[1, 4, :4] = 0, torch.tensor([127.5, -127.5, 0.5, 1.5])
    x[1, 2, 7] = 3e3
    return x.to(dtype)


@in_one_test("text, dtype", [(text, dtype) for text in ARGUMENTS for dtype in (torch.float32, torch.bfloat16)])
def test_inputs_are_rounded_as_compressed_tensors_rounds_them_to_the_bit(text, dtype):
    scheme, x = Scheme.parse(text, target="activations"), rows(dtype)
    arguments = QuantizationArgs(**{"symmetric": True, "dynamic": True} | ARGUMENTS[text])
    module = nn.Linear(48, 3)
    module.input_global_scale = torch.ones(1) if text == "nvfp4" else None
    module.quantization_status = QuantizationStatus.FROZEN
    torch.testing.assert_close(round_inputs(x, scheme), forward_quantize(module, x, "input", arguments), rtol=0, atol=0)


def open_stock(folder, source):
    """Stock transformers' model, by the folder's modelling file where it has one."""
    opens = DiffForCausalLM if source.startswith("unilm") else AutoModelForCausalLM
    model, info = opens.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def assert_alike(ours, theirs, ids):
    """Check that two models compute the same, whose Linears round the same inputs.

    A difference in a sum's last bit sends a value now and then to another code, and then all that follows differs. So
    what reaches each of their Linears is compared with what reaches ours, and then replaced by it.
    """
    reached = {}
    hooks = [
        ours.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: reached.__setitem__(name, inputs[0]), prepend=True
        )
        for name in ours.input_roundings
    ]
    wanted = ours(ids).logits
    for hook in hooks:
        hook.remove()

    def replace(name):
        def by_ours(_, inputs):
            assert largest_difference(inputs[0], reached[name]) < 1e-5, name
            return (reached[name],)

        return by_ours

    hooks = [theirs.get_submodule(name).register_forward_pre_hook(replace(name)) for name in reached]
    assert largest_difference(theirs(ids).logits, wanted) < 1e-5
    for hook in hooks:
        hook.remove()
    rounded = [name for name, each in theirs.named_modules() if getattr(each, "quantization_scheme", None)]
    assert {name for name in rounded if theirs.get_submodule(name).quantization_scheme.input_activations} == set(
        reached
    )


def largest_difference(ours, theirs):
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


@in_one_test("source, weights, activations, layout", FOLDERS)
def test_a_folder_computes_in_stock_transformers_as_here(tmp_path, source, weights, activations, layout):
    recipe, ids = Recipe.of(weights=weights, activations=activations), random_ids(batch=2, length=21)
    plain = write_checkpoint(tmp_path / "plain", source)
    diffquant.quantize(plain, tmp_path / "low", recipe)
    entry = json.loads((tmp_path / "low/config.json").read_text())["quantization_config"]
    assert entry["format"] == layout
    assert all(group.input_activations.dynamic for group in QuantizationConfig(**entry).config_groups.values())
    ours = diffquant.load(tmp_path / "low")
    assert_alike(ours, open_stock(tmp_path / "low", source), ids)
    # It is the rounding of inputs that they share, and that `load` simulates on the 16-bit checkpoint.
    rounded = ours(ids).logits
    torch.testing.assert_close(diffquant.load(plain, recipe)(ids).logits, rounded, rtol=0, atol=0)
    ours.check_quantizers_ran()
    ours.apply_recipe(Recipe())
    assert largest_difference(ours(ids).logits, rounded) > 1e-3


def test_nvfp4_beside_nvfp4_computes_as_in_stock_transformers_but_for_bfloat16(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "llama", torch.bfloat16)
    diffquant.quantize(plain, tmp_path / "low", Recipe.of(weights="nvfp4", activations="nvfp4"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "low", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids, ours = random_ids(batch=2, length=21), diffquant.load(tmp_path / "low")
    theirs = model(ids).logits.float()
    near = largest_difference(ours(ids).logits.float(), theirs)
    ours.apply_recipe(Recipe())
    assert near < 0.2 * largest_difference(ours(ids).logits.float(), theirs)


def test_overrides_choose_the_inputs_and_split_the_groups_of_the_folder(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "llama")
    overrides = {"*.q_proj.activations": "16", "*.mlp.*.activations": "fp8", "lm_head": "8:channel"}
    recipe = Recipe.of(weights="8:channel", activations=8, overrides=overrides)
    diffquant.quantize(plain, tmp_path / "low", recipe)
    ours = diffquant.load(tmp_path / "low")
    assert_alike(ours, open_stock(tmp_path / "low", "llama"), random_ids(batch=2, length=21))
    rounded = {name.split(".", 3)[-1]: str(each.scheme) for name, each in ours.input_roundings.items()}
    assert rounded["self_attn.k_proj"] == rounded["lm_head"] == "8:row"
    assert rounded["mlp.down_proj"] == "e4m3:row"
    assert "self_attn.q_proj" not in rounded
    # Without rounded inputs codes stay packed, as engines expect of 16-bit activations.
    assert "model.layers.0.self_attn.q_proj.weight_packed" in load_file(tmp_path / "low/model.safetensors")
    assert open_source(tmp_path / "low").recipe == recipe


def test_bytes_hold_the_codes_that_words_hold(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "unilm-v1")
    for name, activations in (("words", 16), ("bytes", 8)):
        diffquant.quantize(plain, tmp_path / name, Recipe.of(weights="8:channel", activations=activations))
    words, bytes_ = (open_source(tmp_path / name) for name in ("words", "bytes"))
    module = "model.layers.1.self_attn.q_proj"
    assert bytes_.checkpoint.tensors[f"{module}.weight"].dtype == torch.int8
    assert bytes_.checkpoint.nbytes < words.checkpoint.nbytes
    models = [diffquant.load(each, Recipe()) for each in (words, bytes_)]
    torch.testing.assert_close(*(model.get_parameter(f"{module}.weight") for model in models), rtol=0, atol=0)


def test_a_plan_a_card_and_inspect_name_the_activations(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "llama")
    recipe = Recipe.of(weights="8:channel", activations=8)
    assert "8:row, inputs 8:row" in plan_quantization(open_source(plain), recipe).table()
    assert "activations 8:row" in str(diffquant.plan(plain, recipe, memory="1G"))
    diffquant.quantize(plain, tmp_path / "low", recipe)
    assert "| inputs of these layers | 8:row |" in (tmp_path / "low/README.md").read_text()
    assert "activations 8:row" in str(inspect_checkpoint(tmp_path / "low"))
    grouped = plan_quantization(open_source(plain), Recipe.of(weights="8:g8", activations=8))
    assert any("give --weights 8:channel" in note or "weights='8:channel'" in note for note in grouped.notes)


def test_what_rounds_no_input_is_refused(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "llama")
    for recipe, error, message in (
        ({"activations": 8}, UsageError, "no weight of .* is quantized"),
        ({"weights": 8, "activations": "mxfp4"}, UsageError, "not to mxfp4"),
        ({"weights": 8, "activations": "8:tensor"}, UsageError, "cannot be quantized per tensor"),
        ({"weights": "8:row", "activations": "8:g7"}, GroupSizeError, "group size 7 does not divide"),
        ({"weights": 8, "overrides": {"*.qkv.activations": "8"}}, UsageError, "match no input of a Linear"),
    ):
        with pytest.raises(error, match=message):
            diffquant.load(plain, {"weights": "16", **recipe})
    with pytest.raises(UsageError, match="this model has none"):
        diffquant.load(plain).apply_recipe({"activations": 8})


def test_weights_that_no_linear_multiplies_are_named(tmp_path):
    folder = write_checkpoint(tmp_path / "plain", "motif3")
    recipe = {"weights": "8:row", "activations": 8}
    with pytest.raises(UsageError, match=r"wkv_b.*weights belong to no Linear"):
        diffquant.load(folder, recipe)


def test_every_linear_of_a_hybrid_rounds_its_input(tmp_path):
    model = diffquant.load(
        write_checkpoint(tmp_path / "plain", next(iter(PHI4FLASH))), {"weights": "8:row", "activations": 8}
    )
    with pytest.raises(DiffQuantError, match="activations"):
        model.check_quantizers_ran()
    model(random_ids())
    model.check_quantizers_ran()


def test_activations_that_no_recipe_records_are_still_dequantized_with_a_note(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "llama")
    diffquant.quantize(plain, tmp_path / "low", Recipe.of(weights="8:channel", activations=8))
    edit_json(tmp_path / "low/config.json", diffquant_config=None)
    checkpoint = open_checkpoint(tmp_path / "low")
    assert "also round inputs" in checkpoint.earlier_rounding_clause
    edit_json(tmp_path / "low/config.json", diffquant_config={"recipe": {"activations": "8:row"}, "version": 1})
    entry = json.loads((tmp_path / "low/config.json").read_text())["quantization_config"]
    entry["config_groups"]["group_0"]["output_activations"] = entry["config_groups"]["group_0"]["input_activations"]
    edit_json(tmp_path / "low/config.json", quantization_config=entry)
    with pytest.raises(CheckpointError, match="quantizes activations"):
        open_source(tmp_path / "low")


def test_exports_say_what_their_engines_round_or_refuse(tmp_path):
    plain = write_llama(tmp_path / "plain", torch.float32)
    for name, recipe in (("w8a8", "w8a8"), ("w8a4", {"weights": "8:row", "activations": 4})):
        diffquant.quantize(plain, tmp_path / name, recipe)
    report = diffquant.export(tmp_path / "w8a8", tmp_path / "onnx")
    assert any("in place of the recipe's activations 8:row" in note for note in report.notes)
    diffquant.verify(tmp_path / "onnx", tmp_path / "w8a8")
    with pytest.raises(CheckpointError, match="rounds activations to 4:row"):
        diffquant.export(tmp_path / "w8a4", tmp_path / "refused")
    with pytest.raises(CheckpointError, match="leave out accuracy_level"):
        diffquant.export(tmp_path / "w8a8", tmp_path / "refused", accuracy_level=1)
    report = diffquant.export(tmp_path / "w8a8", tmp_path / "low.gguf", to="gguf")
    assert any("in blocks, in place of 8:row" in note for note in report.notes)
