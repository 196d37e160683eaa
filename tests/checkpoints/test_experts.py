"""Quantized experts as others read them: stock transformers from a Linear each, Motif-3's makers from their layout."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, JetMoeConfig, MixtralConfig, PhimoeConfig, Qwen3MoeConfig

from diffquant.checkpoints.compressed_tensors import packed_shapes, unpack_parts
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.weight_source import PackingRules, open_weights
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import MOTIF3, write_random
from tests.support.oracles import agrees
from tests.support.tables import in_one_test

EXPERTS, IDS = 3, torch.arange(3, 30)[None]
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 2, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, intermediate_size=96, moe_intermediate_size=96, num_experts=EXPERTS, decoder_sparse_step=1
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=EXPERTS),
    # Its router is a Linear, and has another name in the checkpoint.
    "phimoe": lambda: PhimoeConfig(**SIZES, intermediate_size=96, num_local_experts=EXPERTS),
    "jetmoe": lambda: JetMoeConfig(**SIZES, intermediate_size=96, kv_channels=16, num_local_experts=EXPERTS),
}
# What transformers' conversion of experts reads right.
READ = ["4:g32", "3:g32", "6:row", "8:row", "e4m3:channel", "mxfp4", "mxfp6"]


def write_mixture(folder, kind, stacked=False):
    """A random model in the layout that its releases have, or with all experts of a layer in one tensor."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(torch.bfloat16)
    model.save_pretrained(folder)
    if stacked:
        save_file({n: x.contiguous() for n, x in model.state_dict().items()}, folder / "model.safetensors")
    return model


def opened(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def decoded(folder):
    """The weights of a quantized folder, each as its codes say, by the names that they have in a plain one."""
    stored, packed = load_file(folder / "model.safetensors"), open_weights(folder).packed
    weights = {}
    for module, scheme in packed.items():
        parts = {suffix: stored[module + suffix] for suffix in packed_shapes((32, 96), scheme)}
        rows = next(iter(parts.values())).shape[0]
        width = stored[f"{module}.weight_shape"][1] if scheme.format.has_stored_shape else None
        width = int(width) if width is not None else (96 if "down" in module or module.endswith("w2") else 64)
        weights[f"{module}.weight"] = unpack_parts(parts, (rows, width), scheme).bfloat16()
    prefixes = tuple(f"{module}." for module in packed)
    return weights | {name: x for name, x in stored.items() if not name.startswith(prefixes)}


def of_decoded(folder, kind):
    """The plain model of what a quantized folder's codes say, which stock transformers reads from a Linear each."""
    plain = folder.with_name("decoded")
    AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(torch.bfloat16).save_pretrained(plain)
    save_file({n: x.contiguous() for n, x in decoded(folder).items()}, plain / "model.safetensors")
    return opened(plain)


@pytest.mark.parametrize("text", READ)
@pytest.mark.parametrize(
    ("kind", "stacked"), [("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", False), ("phimoe", False)]
)
def test_stock_transformers_reads_quantized_experts(tmp_path, kind, stacked, text):
    write_mixture(tmp_path / "source", kind, stacked)
    quantize(open_weights(tmp_path / "source"), tmp_path / "low", Recipe.of(weights=text))
    stored = load_file(tmp_path / "low" / "model.safetensors")
    assert not [name for name, x in stored.items() if x.ndim > 2]
    theirs, ours = opened(tmp_path / "low"), of_decoded(tmp_path / "low", kind)
    for name, weight in ours.named_parameters():
        if ".experts." in name:
            agrees("transformers", f"experts at {text}: weights", theirs.get_parameter(name), weight)
    agrees("transformers", f"experts at {text}: logits", theirs(IDS).logits, ours(IDS).logits)


def test_experts_of_one_tensor_have_the_bytes_of_experts_that_lie_apart(tmp_path, monkeypatch):
    write_mixture(tmp_path / "apart", "qwen3_moe")
    write_mixture(tmp_path / "stacked", "qwen3_moe", stacked=True)
    # Blocks of rows that begin and end inside experts.
    monkeypatch.setattr("diffquant.checkpoints.row_stream.BLOCK_ELEMENTS", 7 * 64)
    for text in ("4:g32", "e4m3:b32", "mxfp8"):
        for source in ("apart", "stacked"):
            recipe = Recipe.of(weights=text)
            quantize(open_weights(tmp_path / source), tmp_path / f"low {source}", recipe, overwrite=True)
        apart, stacked = (
            load_file(tmp_path / f"low {source}" / "model.safetensors") for source in ("apart", "stacked")
        )
        assert apart.keys() == stacked.keys()
        assert all(torch.equal(x.float(), stacked[name].float()) for name, x in apart.items())


def test_a_note_names_experts_that_transformers_fills_with_random_numbers(tmp_path):
    write_mixture(tmp_path / "source", "jetmoe")
    said = r"one tensor \(model\.layers\.0\.self_attention\.experts\.input_linear"
    for keep in ((), ("*experts*",)):
        source = open_weights(tmp_path / "source", PackingRules.read(keep=keep))
        notes = quantize(source, tmp_path / "low", Recipe.of(weights="8:row"), overwrite=True).notes
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "low", output_loading_info=True)
        assert bool(info["missing_keys"]) == bool(re.search(said, " ".join(notes))) == (not keep)


def test_transformers_leaves_out_the_tensor_scale_of_experts_and_a_note_says_so(tmp_path):
    """Once it reads them right this fails, and the note goes."""
    write_mixture(tmp_path / "source", "qwen3_moe")
    report = quantize(open_weights(tmp_path / "source"), tmp_path / "low", Recipe.of(weights="nvfp4"))
    assert re.search(r"ignores the tensor scale of experts in nvfp4", " ".join(report.notes))
    theirs, ours = opened(tmp_path / "low"), of_decoded(tmp_path / "low", "qwen3_moe")
    stored, at = load_file(tmp_path / "low" / "model.safetensors"), "model.layers.0.mlp.experts"
    scales = torch.cat([stored[f"{at}.{expert}.down_proj.weight_global_scale"] for expert in range(EXPERTS)])
    wrong, right = (model.get_parameter(f"{at}.down_proj").float() for model in (theirs, ours))
    torch.testing.assert_close(wrong / scales[:, None, None], right, rtol=0.02, atol=0)
    kept = quantize(
        open_weights(tmp_path / "source"),
        tmp_path / "mixed",
        Recipe.of(weights="nvfp4", overrides={"*.experts.*": "mxfp4"}),
    )
    assert not kept.notes
    groups = open_weights(tmp_path / "mixed").checkpoint.config["quantization_config"]["config_groups"].values()
    targets = [target for group in groups for target in group["targets"]]
    assert rf"re:model\.layers\.(0|1)\.mlp\.experts\.({'|'.join(map(str, range(EXPERTS)))})\.up_proj$" in targets
    ours = of_decoded(tmp_path / "mixed", "qwen3_moe")
    assert torch.equal(opened(tmp_path / "mixed")(IDS).logits, ours(IDS).logits)


@in_one_test("text", ["e4m3:b32", "e4m3:g32", "mxfp8"])
def test_transformers_refuses_experts_of_eight_bits_whose_scales_are_of_blocks(tmp_path, text):
    write_mixture(tmp_path / "source", "mixtral")
    quantize(open_weights(tmp_path / "source"), tmp_path / "low", Recipe.of(weights=text))
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
        opened(tmp_path / "low")


def motif3_with_experts_at(tmp_path, text, **changes):
    """A Motif-3 whose experts are packed under a scheme, and its report; experts differ a thousandfold in size."""
    config = MOTIF3 | {"moe_intermediate_size": 32, "hidden_size": 64, "intermediate_size": 64}
    tensors = write_random(tmp_path / "plain", config | {"vocab_size": 64}, torch.bfloat16)
    stacks = {n: x for n, x in tensors.items() if ".experts." in n and n.endswith("_proj")}
    sizes = torch.logspace(-2, 1, MOTIF3["num_experts"], dtype=torch.bfloat16)[:, None, None]
    tensors |= {name: stack * sizes for name, stack in stacks.items()}
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    recipe = Recipe.of(weights="16", overrides={"*.experts.*": text} | changes)
    return tensors, quantize(tmp_path / "plain", tmp_path / "low", recipe)


def test_motif_3s_experts_in_nvfp4_lie_as_in_its_makers_release(tmp_path):
    """Decoded here as their tool's reader does, in NumPy."""
    tensors, report = motif3_with_experts_at(tmp_path, "nvfp4")
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    stated = config.pop("quantization_config")
    assert (stated["quant_method"], stated["group_size"]) == ("modelopt_nvfp4", 16)
    # Its makers' code runs it, by the names that their release has.
    assert not list((tmp_path / "low").glob("*.py"))
    assert config["architectures"] == MOTIF3["architectures"]
    assert "auto_map" not in config
    stored = load_file(tmp_path / "low" / "model.safetensors")
    packed = {name for name, x in tensors.items() if ".experts." in name and name.endswith("_proj")}
    assert len(packed) == 8
    scales_of = {name + part for name in packed for part in ("_weight_scale", "_weight_scale_2")}
    assert stored.keys() == tensors.keys() | scales_of
    source = open_source(tmp_path / "low")
    assert source.checkpoint.earlier_format == "ModelOpt NVFP4"
    simulated = load(tmp_path / "plain", Recipe.of(weights="16", overrides={"*.experts.*": "nvfp4"}))
    opened_again = load(tmp_path / "low")
    for name in packed:
        codes, scales, above = (stored[name + part] for part in ("", "_weight_scale", "_weight_scale_2"))
        experts, rows, width = tensors[name].shape
        assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (experts, rows, width // 2))
        assert (scales.dtype, tuple(scales.shape)) == (torch.float8_e4m3fn, (experts, rows, width // 16))
        assert (above.dtype, tuple(above.shape)) == (torch.float32, (experts,))
        nibbles = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(experts, rows, width)
        levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)[nibbles]
        product = scales.float().numpy() * above.numpy()[:, None, None]
        values = torch.from_numpy(levels * product.repeat(16, -1))
        assert torch.equal(source.checkpoint.read(name), values)
        for model in (simulated, opened_again):
            assert torch.equal(model.get_parameter(name), values.bfloat16())
        lost = (values - tensors[name].float()).square().sum((1, 2)) / tensors[name].float().square().sum((1, 2))
        # No expert loses by the multiplier that all of them have.
        assert 0.002 < lost.min() < lost.max() < 0.015
    for name in tensors.keys() - packed:
        assert torch.equal(stored[name], tensors[name])
    assert all(0.05 < each.error < 0.12 for each in report.errors)
    assert "authors' NVFP4 release" in (tmp_path / "low" / "README.md").read_text()


@in_one_test(("text", "changes"), [("4:g32", {}), ("mxfp4", {}), ("nvfp4", {"*.self_attn.wo": "8:row"})])
def test_other_experts_of_motif_3_lie_in_one_tensor_as_before(tmp_path, text, changes):
    motif3_with_experts_at(tmp_path, text, **changes)
    recipe = Recipe.of(weights="16", overrides={"*.experts.*": text} | changes)
    simulated, opened_again = load(tmp_path / "plain", recipe), load(tmp_path / "low")
    name = "model.layers.1.moe.experts.down_proj"
    assert f"{name}.weight_packed" in load_file(tmp_path / "low" / "model.safetensors")
    assert torch.equal(simulated.get_parameter(name), opened_again.get_parameter(name))
    assert open_source(tmp_path / "low").packed
