"""Models quantized by name whose head is tied, as stock transformers opens them."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from diffquant.checkpoints.weight_source import PackingRules, modules_to_ignore, open_weights
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.tables import in_one_test

WIDE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
SEQ2SEQ = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
MODELS = {
    "WhisperForConditionalGeneration": SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 32},
    "BertForMaskedLM": WIDE,
    "RobertaForMaskedLM": WIDE,
    "DistilBertForMaskedLM": {"vocab_size": 96, "dim": 64, "hidden_dim": 96, "n_layers": 1, "n_heads": 2},
    "XLMWithLMHeadModel": {"vocab_size": 96, "emb_dim": 64, "n_layers": 1, "n_heads": 2, "n_langs": 1},
    "CTRLLMHeadModel": {"vocab_size": 96, "n_embd": 64, "dff": 96, "n_layer": 1, "n_head": 2},
}  # fmt: skip
VISION = {key: value for key, value in WIDE.items() if key != "vocab_size"} | {"image_size": 28, "patch_size": 14}
GEMMA = "Gemma3ForConditionalGeneration", {
    "text_config": WIDE | {"num_key_value_heads": 1, "head_dim": 32}, "vision_config": VISION,
    "mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92,
}  # fmt: skip
FUYU = "FuyuForCausalLM", VISION | {"vocab_size": 96, "text_config": WIDE | {"model_type": "persimmon"}}
# Tensors of no Linear, and layers that are shared as a whole.
NO_HEADS = re.compile(
    r".*embed_tokens.*|.*word_embeddings|.*tokens_embed|.*relative_attention_bias|.*positional_embedding"
    r"|.*embed_patches\.proj|encoder\.language_model\..*|audio_model.*|video_model.*|audio_video_encoder.*"
)


def written(folder, name, sizes, keep=()):
    """A random model, and the folder of it with its weights packed."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).to(torch.bfloat16)
    model.save_pretrained(folder / "plain")
    rules = PackingRules.read(keep=keep)
    quantize(open_weights(folder / "plain", rules), folder / "low", Recipe.of(weights="8:row", rounding="nearest"))
    return model


def opened(model, folder, **options):
    found, loading = type(model).from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )  # fmt: skip
    assert not any(loading.values())
    return found


@in_one_test(("name", "sizes"), MODELS.items())
def test_stock_transformers_opens_a_folder_whose_head_is_tied(tmp_path, name, sizes):
    model = written(tmp_path, name, sizes)
    assert model.all_tied_weights_keys
    found = opened(model, tmp_path / "low")
    for head, embedding in model.all_tied_weights_keys.items():
        assert torch.equal(found.get_parameter(head), model.get_parameter(embedding))


def tied_names():
    """Names of the tied tensors of every model of transformers, without importing it."""
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for block in re.findall(r"_tied_weights_keys = \{(.*?)\}", file.read_text(encoding="utf-8"), re.DOTALL):
            yield from re.findall(r"[\"']([^\"']+)[\"']:", block)


def test_every_tied_head_of_transformers_is_left_alone():
    heads = modules_to_ignore(PackingRules.read())
    names = {name.removesuffix(".weight") for name in tied_names() if not name.endswith(".bias")}
    assert len(names) > 20
    # A number in an expression of theirs.
    names = {name.replace("(?![0])\\d+", "1") for name in names}
    unknown = [n for n in names if not NO_HEADS.fullmatch(n) and not any(re.fullmatch(head, n) for head in heads)]
    assert unknown == []


@in_one_test(
    ("kind", "sizes", "keep", "name"),
    [
        (*GEMMA, ("vision_tower.*",), "model.vision_tower.encoder.layers.0.mlp.fc1.weight"),
        (*GEMMA, ("*vision_tower*",), "model.vision_tower.encoder.layers.0.mlp.fc1.weight"),
        (*FUYU, (), "model.vision_embed_tokens.weight"),
    ],
)
def test_what_is_kept_is_left_alone_under_the_longer_name_that_it_has_in_the_model(tmp_path, kind, sizes, keep, name):
    model = written(tmp_path, kind, sizes, keep)
    found = opened(model, tmp_path / "low")
    assert torch.equal(found.get_parameter(name), model.get_parameter(name))


def test_a_model_that_initializes_weights_itself_opens_dequantized(tmp_path):
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 1, "num_heads": 2}
    model = written(tmp_path, "T5ForConditionalGeneration", sizes)
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
        opened(model, tmp_path / "low")
    found = opened(
        model, tmp_path / "low", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )  # fmt: skip
    name = "encoder.block.0.layer.1.DenseReluDense.wi.weight"
    expected = model.get_parameter(name).float()
    step = expected.abs().amax(1, keepdim=True) / 127
    # Half a step, and bfloat16's rounding of the scale and of the product.
    assert ((found.get_parameter(name).float() - expected).abs() <= step * 0.51 + expected.abs() * 2**-7).all()
