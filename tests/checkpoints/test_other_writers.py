"""Folders as other tools write them: read where transformers reads them, and otherwise named for what they are."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.weight_source import open_weights
from diffquant.errors import CheckpointError, NonFiniteError
from diffquant.quantization.inspection import inspect_weights
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import edit_json, write_llama
from tests.support.models import random_ids
from tests.support.packed_folders import edit_tensors, write_packed
from tests.support.tables import in_one_test
from tests.support.unknown_model import write_unknown

ATTENTION = "model.layers.0.self_attn."
IDS = random_ids(length=9)


def logits_of(folder):
    """The logits of stock transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


def agrees(folder, expected):
    torch.testing.assert_close(load(folder, dtype="float32")(IDS).logits, expected, rtol=0, atol=2e-5)


SURPLUS = {
    "zeros": {f"{ATTENTION}q_proj.bias": torch.zeros(64), "model.layers.1.mlp.down_proj.bias": -torch.zeros(64)},
    "rotary tables": {f"{ATTENTION}rotary_emb.{x}": torch.ones(1, 1, 8, 16) for x in ("cos_cached", "sin_cached")},
    "masks": {f"{ATTENTION}masked_bias": torch.tensor(-math.inf), f"{ATTENTION}bias": torch.ones(1, 1, 8, 8).bool()},
}  # fmt: skip


@in_one_test("surplus", SURPLUS.values())
def test_what_transformers_leaves_out_without_a_change_is_left_out(tmp_path, surplus):
    folder = write_llama(tmp_path / "model")
    expected = logits_of(folder)
    edit_tensors(folder, surplus)
    assert torch.equal(logits_of(folder), expected)
    agrees(folder, expected)
    quantize(open_source(folder), tmp_path / "out", Recipe.of(weights="8:row"))
    assert not surplus.keys() & open_checkpoint(tmp_path / "out").tensors.keys()


@pytest.mark.parametrize("value", [1e-3, math.nan])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gptq"])
def test_a_bias_that_is_not_zero_is_refused_and_zeros_of_a_gptq_folder_are_not(tmp_path, packed, value):
    folder = write_llama(tmp_path / "model")
    if packed:
        write_packed(folder, "gptq")
    bias = torch.zeros(64)
    edit_tensors(folder, {f"{ATTENTION}q_proj.bias": bias})
    assert open_source(folder)
    bias[-1] = value
    edit_tensors(folder, {f"{ATTENTION}q_proj.bias": bias})
    with pytest.raises(CheckpointError, match=r"not part of the model: model\.layers\.0\.self_attn\.q_proj\.bias"):
        open_source(folder)


def test_a_bias_of_zeros_that_belongs_to_no_matrix_is_refused(tmp_path):
    folder = write_llama(tmp_path / "model")
    edit_tensors(folder, {"model.norm.bias": torch.zeros(64)})
    with pytest.raises(CheckpointError, match=r"not part of the model: model\.norm\.bias"):
        open_source(folder)


def test_a_tied_embedding_under_the_heads_name_alone_is_read_and_written_under_its_own(tmp_path):
    folder = write_llama(tmp_path / "model", tie_word_embeddings=True)
    expected = logits_of(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, {"lm_head.weight": embedding, "model.embed_tokens.weight": None})
    assert torch.equal(logits_of(folder), expected)
    agrees(folder, expected)
    quantize(open_source(folder), tmp_path / "out", Recipe.of(weights="8:row"))
    written = load_file(tmp_path / "out/model.safetensors")
    assert "model.embed_tokens.weight" in written
    assert "lm_head.weight" not in written
    agrees(tmp_path / "out", logits_of(tmp_path / "out"))
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing model\.embed_tokens\.weight"):
        open_source(folder)


def test_minus_infinity_in_a_mask_is_carried_over_and_in_a_weight_refused(tmp_path):
    write_unknown(tmp_path / "model")
    mask = torch.full((5, 7), -math.inf).triu(1)
    edit_tensors(tmp_path / "model", {"text.attn_mask": mask, "final_logits_bias": mask[:1].half()})
    quantize(open_weights(tmp_path / "model"), tmp_path / "out", Recipe.of(weights="4:g32"))
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written["text.attn_mask"], mask)
    assert torch.equal(written["final_logits_bias"], mask[:1].half())


@in_one_test(
    ("name", "value"),
    [
        ("text.attn_mask", math.nan),
        ("text.attn_mask", math.inf),
        ("model.norm.weight", -math.inf),
        ("layers.0.self_attn.lambda_q1", -math.inf),
    ],
)
def test_other_values_that_are_not_finite_are_refused_wherever_they_are(tmp_path, name, value):
    write_unknown(tmp_path / "model")
    edit_tensors(tmp_path / "model", {name: torch.tensor([1, value, 1])})
    with pytest.raises(NonFiniteError, match=name):
        quantize(open_weights(tmp_path / "model"), tmp_path / "out", Recipe.of(weights="4:g32"))


@in_one_test("method", ["gptq", "awq"])
def test_settings_in_the_librarys_own_file_are_those_of_config_json(tmp_path, method):
    folder = tmp_path / "model"
    write_packed(folder, method)
    expected = load(folder, dtype="float32")(IDS).logits
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    file = "quantize_config.json"
    if method == "awq":
        # AutoAWQ's first releases.
        settings = {"w_bit": settings.pop("bits"), "q_group_size": settings.pop("group_size")} | settings
        file = "quant_config.json"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps(settings))
    assert torch.equal(load(folder, dtype="float32")(IDS).logits, expected)
    edit_json(folder / "config.json", model_type="of-no-name")
    assert method.upper() in str(inspect_weights(folder))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("open_it", [open_source, open_weights])
def test_one_prefix_before_every_name_is_said(tmp_path, prefix, open_it):
    folder = write_llama(tmp_path / "model")
    save_file({prefix + k: v for k, v in load_file(folder / "model.safetensors").items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"every tensor's name begins with '{prefix}'"):
        open_it(folder)


def test_mlx_and_types_that_are_not_read_are_said_and_no_download_is_advised(tmp_path):
    folder = write_llama(tmp_path / "model")
    edit_tensors(folder, {"model.norm.weight": torch.ones(8, dtype=torch.uint32)})
    with pytest.raises(CheckpointError, match=r"unsupported types: model\.norm\.weight of type U32") as refusal:
        open_checkpoint(folder)
    assert "download" not in str(refusal.value)
    edit_json(folder / "config.json", quantization={"group_size": 64, "bits": 4})
    with pytest.raises(CheckpointError, match=r"quantized by MLX.*mlx_lm\.convert --dequantize") as refusal:
        open_checkpoint(folder)
    assert "download" not in str(refusal.value)


@in_one_test(
    ("names", "advice"),
    [
        (["model-00001-of-00002.safetensors"], "model.safetensors.index.json, .* is missing: download it"),
        (["consolidated.safetensors"], "download the model\\* files instead"),
        (["model.fp16.safetensors"], "rename the model's file to model.safetensors$"),
        (["gptq_model-4bit-128g.safetensors"], "rename the model's file to model.safetensors$"),
        (["a.safetensors", "b.safetensors"], "rename .*, and remove the others"),
        (["model.safetensors.incomplete"], "the download is incomplete"),
    ],
)
def test_files_of_weights_under_other_names_are_named(tmp_path, names, advice):
    (tmp_path / "config.json").write_text("{}")
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"holds {', '.join(names)}: .*{advice}"):
        open_checkpoint(tmp_path)


def test_gguf_files_are_known_by_their_suffix_in_any_case_and_folders_are_not(tmp_path):
    folder = write_llama(tmp_path / "model.gguf")
    agrees(folder, logits_of(folder))
    (tmp_path / "two").mkdir()
    for name in ("M.GGUF", "m-Q8_0.gguf"):
        (tmp_path / "two" / name).write_bytes(b"GGUF but no more")
        with pytest.raises(CheckpointError, match=f"cannot read .*{name}"):
            open_checkpoint(tmp_path / "two" / name)
    with pytest.raises(CheckpointError, match=r"has no config\.json; give one of .*M\.GGUF, .*m-Q8_0\.gguf"):
        open_checkpoint(tmp_path / "two")
