import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffquant.checkpoints.folder import INDEX
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError
from tests.support.checkpoints import edit_json, write_diffllama
from tests.support.tables import in_one_test


@pytest.fixture
def sharded(tmp_path):
    return write_diffllama(tmp_path / "model", shard_size="150KB")


def shards_of(folder):
    return sorted(file.name for file in folder.glob("*.safetensors"))


def rewrite(folder, shard, change):
    tensors = load_file(folder / shard)
    change(tensors)
    save_file(tensors, folder / shard, metadata={"format": "pt"})


def check(folder):
    return open_source(folder).packed


def test_every_tensor_of_a_sharded_checkpoint_reads_as_it_was_written(sharded):
    checkpoint = open_checkpoint(sharded)
    written = {name: t for shard in shards_of(sharded) for name, t in load_file(sharded / shard).items()}
    assert len(shards_of(sharded)) > 2
    assert set(checkpoint.tensors) == set(written)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in written.items())
    assert check(sharded) == {}


def test_missing_and_truncated_shards_are_all_named(sharded):
    missing, truncated, *_ = shards_of(sharded)
    (sharded / missing).unlink()
    (sharded / truncated).write_bytes((sharded / truncated).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{missing} is missing.*{truncated} \(\d+ bytes\) is truncated"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "place",
    ["../outside.safetensors", "/tmp/outside.safetensors", "link.safetensors", "loop.safetensors", "blob.safetensors"],
)
def test_a_shard_outside_the_folder_is_refused(sharded, tmp_path, place):
    shutil.copy(sharded / shards_of(sharded)[0], tmp_path / "outside.safetensors")
    (sharded / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (sharded / "loop.safetensors").symlink_to("loop.safetensors")
    # Another model's cache, which is laid out as this one's would be.
    other = tmp_path / "other/blobs/outside"
    other.parent.mkdir(parents=True)
    shutil.copy(sharded / shards_of(sharded)[0], other)
    (sharded / "blob.safetensors").symlink_to(other)
    index = json.loads((sharded / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    edit_json(sharded / INDEX, weight_map=index["weight_map"] | {name: place})
    with pytest.raises(CheckpointError, match="is outside the folder"):
        open_checkpoint(sharded)


def test_a_download_cache_of_links_is_read(sharded, tmp_path):
    blobs, snapshot = tmp_path / "cache/blobs", tmp_path / "cache/snapshots/main"
    snapshot.mkdir(parents=True)
    shutil.move(sharded, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert check(snapshot) == {}


def test_a_tensor_that_its_shard_lacks_is_named(sharded):
    shard = shards_of(sharded)[0]
    lost = next(iter(load_file(sharded / shard)))
    rewrite(sharded, shard, lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=f"{shard} lacks {lost}"):
        open_checkpoint(sharded)


def test_missing_lambda_wrong_shape_wrong_type_and_surplus_are_named_together(tmp_path):
    folder = write_diffllama(tmp_path / "model")

    def damage(tensors):
        del tensors["model.layers.1.self_attn.lambda_q1"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(160, 63)
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)

    rewrite(folder, "model.safetensors", damage)
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    for part in (
        "missing model.layers.1.self_attn.lambda_q1 [16]",
        "up_proj.weight is [160, 63], not [160, 64]",
        "model.norm.weight is torch.int8",
        "not part of the model: model.layers.0.self_attn.q_proj.bias",
    ):
        assert part in str(caught.value)


@in_one_test("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_weight_in_8_bits_without_its_scale_is_no_plain_weight(tmp_path, dtype):
    folder = write_diffllama(tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, "model.safetensors", lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"wrong type: {re.escape(name)} is {dtype}"):
        open_source(folder)


def test_old_buffers_and_a_tied_head_are_tolerated(tmp_path):
    folder = write_diffllama(tmp_path / "model", tie_word_embeddings=True)
    head = open_checkpoint(folder).read("model.embed_tokens.weight").clone()
    surplus = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": head}
    rewrite(folder, "model.safetensors", lambda tensors: tensors.update(surplus))
    assert check(folder) == {}


@in_one_test("place", [0, -1])
def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path, place):
    """transformers goes by the tensors and does not tie them."""
    folder = write_diffllama(tmp_path / "model", tie_word_embeddings=True)
    head = open_checkpoint(folder).read("model.embed_tokens.weight").clone()
    head[place, place] += 1
    rewrite(folder, "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": head}))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight differs from model"):
        open_source(folder)


@in_one_test("part", ["name", "entry"])
def test_a_header_that_gives_something_twice_is_refused_by_name(tmp_path, part):
    folder = write_diffllama(tmp_path / "model")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = "model.norm.weight"
    entry = json.dumps(header[name])
    again = f'"{name}": {entry}' if part == "name" else '"model.more": {"dtype": "F32", ' + entry[1:]
    text = (json.dumps(header)[:-1] + f", {again}}}").encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    # safetensors itself takes the last of two names.
    if part == "name":
        assert name in load_file(file)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors .*it gives '(model\.norm\.weight|dtype)' twice|damaged"
    ):
        open_checkpoint(folder)


def test_an_adapter_beside_the_weights_is_refused_and_not_left_out(sharded):
    """transformers opens such a folder as the model with its adapter."""
    (sharded / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')
    with pytest.raises(CheckpointError, match=r"does not apply adapters: merge it.* or, .* remove"):
        open_checkpoint(sharded)
    # What peft's save_pretrained writes, in a folder of its own.
    (sharded / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"merge it into the model .*, use the model it was trained on"):
        open_checkpoint(sharded)


def test_a_path_that_leads_nowhere_hears_of_what_is_called_nearly_so(tmp_path):
    (tmp_path / "needle-diff-v1").mkdir()
    with pytest.raises(CheckpointError, match=r"did you mean .*needle-diff-v1\? give the name of a model on the hub"):
        open_checkpoint(tmp_path / "needle-dif-v1")
    with pytest.raises(CheckpointError, match=r"a \.gguf file; give the name of a model on the hub"):
        open_checkpoint(tmp_path / "llama")


def test_an_exported_model_is_no_checkpoint_and_the_error_says_what_runs_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(CheckpointError, match="an exported model: `diffquant run`"):
        open_checkpoint(tmp_path)


def test_what_is_no_checkpoint_is_refused_clearly(tmp_path):
    with pytest.raises(CheckpointError, match="neither a checkpoint folder nor"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(CheckpointError, match="cannot read"):
        open_checkpoint(tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(CheckpointError, match=r"cannot read .*broken\.gguf"):
        open_checkpoint(tmp_path / "broken.gguf")


@in_one_test("sizes", [("5GB", "150KB"), ("150KB", "5GB")])
def test_a_folder_that_was_saved_to_in_shards_and_in_one_file_is_refused(tmp_path, sizes):
    for size in sizes:
        write_diffllama(tmp_path / "model", shard_size=size)
    with pytest.raises(CheckpointError, match=r"holds two models: transformers reads model\.safetensors, other"):
        open_checkpoint(tmp_path / "model")


def test_an_index_without_a_map_is_refused(sharded):
    edit_json(sharded / INDEX, weight_map={"model.norm.weight": 3})
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_checkpoint(sharded)
