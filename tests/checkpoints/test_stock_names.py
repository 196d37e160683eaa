"""Models quantized by name whose tensors stock transformers renames or converts while it loads them."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import ConversionOps

from diffquant.checkpoints.compressed_tensors import packed_shapes, unpack_parts
from diffquant.checkpoints.weight_source import PackingRules, open_weights
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import edit_json
from tests.support.oracles import agrees
from tests.support.tables import in_one_test

IDS = torch.arange(3, 30)[None]
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_experts": 4}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
# Their modules have other names than their tensors: those of towers, shared experts, a kept norm's matrices and a head.
RENAMED = {
    "LlavaForConditionalGeneration": {
        "text_config": SIZES | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "patch_size": 14},
        "image_token_index": 95,
    },
    "HYV3ForCausalLM": SIZES | EXPERTS | {"mlp_layer_types": ["dense", "sparse"]},
    "AXK2ForCausalLM": SIZES | EXPERTS | LATENT | {
        "mlp_layer_types": ["dense", "sparse"], "index_head_dim": 16,
    },
    "UltrabertForMaskedLM": SIZES | {"layer_types": ["sliding_attention"] * 2},
}  # fmt: skip
# Weights that it splits, and experts that it has in one tensor.
CONVERTED = {"NomicBertForMaskedLM": SIZES, "Mistral4ForCausalLM": SIZES | EXPERTS | LATENT | {"head_dim": 32}}
MIXTURE = "Qwen3MoeForCausalLM", SIZES | EXPERTS | {"decoder_sparse_step": 1}


def written(folder, name, sizes):
    """The class of a random model, and the folder that it is saved in."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).to(torch.bfloat16)
    model.save_pretrained(folder / "plain")
    return kind


def packed(folder, recipe, keep=()):
    source = open_weights(folder / "plain", PackingRules.read(keep=keep))
    return quantize(source, folder / "low", recipe, overwrite=True).notes


def opened(kind, folder):
    model, loading = kind.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(loading.values())
    return model.eval()


def of_decoded(kind, folder):
    """The plain model of what a quantized folder's codes say."""
    plain, stored = load_file(folder / "plain/model.safetensors"), load_file(folder / "low/model.safetensors")
    for module, scheme in open_weights(folder / "low").packed.items():
        shape = plain[f"{module}.weight"].shape
        parts = {suffix: stored[module + suffix] for suffix in packed_shapes(shape, scheme)}
        plain[f"{module}.weight"] = unpack_parts(parts, shape, scheme).bfloat16()
    (folder / "decoded").mkdir(exist_ok=True)
    (folder / "decoded/config.json").write_bytes((folder / "plain/config.json").read_bytes())
    save_file(plain, folder / "decoded/model.safetensors", metadata={"format": "pt"})
    return opened(kind, folder / "decoded")


def compare_logits(kind, folder):
    theirs, ours = opened(kind, folder / "low"), of_decoded(kind, folder)
    agrees("transformers", f"{kind.__name__}: logits", theirs(IDS).logits, ours(IDS).logits)


def half_of(folder):
    """Overrides for every second Linear, of every kind, but for routed experts, which transformers unpacks alike."""
    linears = [name for name in open_weights(folder / "plain").linears if not re.search(r"experts\.\d", name)]
    return dict.fromkeys(sorted(linears)[::2], "8:row")


@in_one_test(("name", "sizes"), [case for case in RENAMED.items() if hasattr(transformers, case[0])])
def test_stock_transformers_finds_modules_that_it_renames(tmp_path, name, sizes):
    kind = written(tmp_path, name, sizes)
    for recipe in (Recipe.of(weights="8:row"), Recipe.of(weights="4:g32", overrides=half_of(tmp_path))):
        assert not packed(tmp_path, recipe)
        compare_logits(kind, tmp_path)


@in_one_test(("name", "sizes"), CONVERTED.items())
def test_a_note_names_weights_that_transformers_cannot_convert_if_they_are_packed(tmp_path, name, sizes):
    kind = written(tmp_path, name, sizes)
    (note,) = packed(tmp_path, Recipe.of(weights="8:row"))
    assert note[1:60] in (tmp_path / "low/README.md").read_text()
    with pytest.raises((RuntimeError, AssertionError)):
        opened(kind, tmp_path / "low")
    overrides = dict(re.findall("overrides='(.*?)=(.*?)'", note))
    assert not packed(
        tmp_path, Recipe.of(weights="8:row", overrides=overrides), tuple(re.findall("keep='(.*?)'", note))
    )
    compare_logits(kind, tmp_path)


def test_a_note_names_weights_that_transformers_takes_for_packed_ones(tmp_path):
    kind = written(tmp_path, *MIXTURE)
    (note,) = packed(tmp_path, Recipe.of(weights="8:row"), ("*experts*",))
    assert re.search(r"takes model\.layers\.\*\.mlp\.experts\.\*\.down_proj\.weight.*'e4m3:channel'", note)
    with pytest.raises((RuntimeError, AssertionError)):
        opened(kind, tmp_path / "low")
    assert not packed(tmp_path, Recipe.of(weights="e4m3:channel"), ("*experts*",))
    opened(kind, tmp_path / "low")


def test_a_note_says_that_transformers_refuses_packed_models_of_which_it_splits_a_weight(tmp_path):
    kind = written(tmp_path, "HrmTextForCausalLM", SIZES)
    (note,) = packed(tmp_path, Recipe.of(weights="e4m3:channel"), ("*.gqkv_proj.*", "*.gate_up_proj.*"))
    assert "refuses this folder: in a model with packed weights it can split mlp.gate_up_proj.weight" in note
    if hasattr(ConversionOps, "supports_many_to_many"):
        with pytest.raises(ValueError, match="you can only have one to many"):
            opened(kind, tmp_path / "low")


@in_one_test("other", ["6:g32", "4:g16", "8:row"])
def test_a_note_names_experts_of_several_schemes_which_transformers_unpacks_by_one(tmp_path, other):
    kind = written(tmp_path, *MIXTURE)
    (note,) = packed(tmp_path, Recipe.of(weights="4:g32", overrides={"*.down_proj": other}))
    first = rf"{other} \(model\.layers\.0\.mlp\.experts\.0\.down_proj\) and 4:g32 \(.*gate_proj\).*"
    assert re.search(first + rf"give overrides='\*\.experts\.\*={other}'", note)
    with pytest.raises((RuntimeError, AssertionError)):
        compare_logits(kind, tmp_path)
    alike = Recipe.of(weights="4:g32", overrides={"*.experts.*": other, "*.q_proj": "8:row"})
    assert not packed(tmp_path, alike)
    compare_logits(kind, tmp_path)


ENDLESS = {"text_config": SIZES | {"model_type": "llama", "num_hidden_layers": 10**9}}


@in_one_test("change", [{"model_type": "another"}, {"architectures": ["pipeline"]}, {"text_config": 1}, ENDLESS])
def test_names_are_those_of_the_checkpoint_if_transformers_does_not_have_the_model(tmp_path, change):
    assert has_stock_names(tmp_path, {})
    assert not has_stock_names(tmp_path, change)


@in_one_test("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_that_a_config_names_are_not_loaded_for_the_names(tmp_path, key):
    assert has_stock_names(tmp_path, {key: "organization/kernel"})


def has_stock_names(folder, change):
    written(folder, "LlavaForConditionalGeneration", RENAMED["LlavaForConditionalGeneration"])
    edit_json(folder / "plain/config.json", **change)
    packed(folder, Recipe.of(weights="4:g32", overrides=half_of(folder)))
    return r"re:model\\.language_model" in (folder / "low/config.json").read_text()
