"""What a checkpoint of a stranger may not do: run code, reach outside its folder, hang, or pass damage on."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffquant.checkpoints.folder import INDEX
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import CheckpointError, NonFiniteError, OutputExistsError
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_checkpoint, write_diffllama
from tests.support.tables import in_one_test

CODE = "from pathlib import Path\nPath({!r}).touch()\nfrom transformers import LlamaTokenizer as Evil\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def copied(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def test_a_checkpoints_python_is_not_run_though_someone_would_say_yes(copied, tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    (copied / "tokenizer.json").unlink()
    (copied / "evil.py").write_text(CODE.format(str(marker)))
    edit_json(
        copied / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, tokenizer_class="Evil"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(CheckpointError, match=r"cannot read a tokenizer.*the checkpoint's Python code"):
        load_tokenizer(copied)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["config.json", "LICENSE", "notes.txt", "tokenizer.json", "README.md"])
def test_a_link_out_of_the_folder_is_not_followed(copied, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (copied / name).unlink(missing_ok=True)
    (copied / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=rf"links to files outside it.*{name} -> .*secret"):
        quantize(copied, tmp_path / "out", Recipe.of(weights="8:row"))
    assert not (tmp_path / "out").exists()


def test_a_link_within_the_folder_is_followed(copied, tmp_path):
    (copied / "LICENSE.txt").write_text("free")
    (copied / "LICENSE").symlink_to("LICENSE.txt")
    quantize(copied, tmp_path / "out", Recipe.of(weights="8:row"))
    assert (tmp_path / "out/LICENSE").read_text() == "free"
    assert not (tmp_path / "out/LICENSE").is_symlink()


@in_one_test("place", ["./{}", "{}/", "a/../{}", "..", "a\0b"])
def test_an_index_names_plain_files_alone(tmp_path, place):
    folder = write_diffllama(tmp_path / "model", shard_size="150KB")
    shard = sorted(file.name for file in folder.glob("*.safetensors"))[0]
    weight_map = dict.fromkeys(load_file(folder / shard), shard)
    name = next(iter(weight_map))
    edit_json(folder / INDEX, weight_map=weight_map | {name: place.format(shard)})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_source(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"model_type": "llama", "model_type": "diffllama"}', "'model_type' twice"),
        ('{"model_type": ["llama"]}', r"model_type \['llama'\] is not supported"),
        (f'{{"hidden_size": {"9" * 5000}}}', "cannot read"),
    ],
    ids=["deep", "twice", "a list", "a long number"],
)
def test_an_odd_config_is_refused_in_a_line(copied, text, message):
    (copied / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_source(copied)


def test_a_billion_layers_are_refused_before_a_name_is_made_of_each(copied):
    edit_json(copied / "config.json", num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="1000000000 layers, but there are"):
        open_source(copied)


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads"])
@pytest.mark.parametrize("source", ["unilm-v1", "unilm-v1-plain", "unilm-v2", "motif", "motif-grouped"])
def test_a_size_of_a_billion_is_refused_before_anything_is_made_of_that_size(tmp_path, source, size):
    folder = write_checkpoint(tmp_path / "model", source)
    edit_json(folder / "config.json", **{size: 10**9})
    started = time.monotonic()
    with pytest.raises(CheckpointError):
        open_source(folder)
    assert time.monotonic() - started < 5


def damage(folder, suffix, change):
    """Change the first tensor of a suffix in a checkpoint of one file; its name."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith(suffix))
    change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return name


@pytest.fixture
def packed(model, tmp_path):
    quantize(model, tmp_path / "packed", Recipe.of(weights="4:g16"))
    return tmp_path / "packed"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("as_codes", [False, True], ids=["expanded", "packed"])
def test_a_scale_that_is_not_finite_is_named(packed, value, as_codes):
    name = damage(packed, "weight_scale", lambda scale: scale.view(-1)[3:4].fill_(value))
    with pytest.raises(NonFiniteError, match=name):
        load(packed, dtype=torch.float32, packed=as_codes)


def test_a_weight_beyond_the_runs_dtype_is_named(copied):
    name = damage(copied, "up_proj.weight", lambda weight: weight[0, :1].fill_(1e6))
    load(copied, dtype=torch.float32)
    with pytest.raises(NonFiniteError, match=rf"{name} reaches 1e\+06, beyond torch.float16"):
        load(copied, dtype=torch.float16)


@pytest.mark.parametrize("shape", [[32, 128], [64, 2**40], [31, 32]])
def test_a_packed_weight_says_its_own_shape(packed, shape):
    damage(packed, "weight_shape", lambda stored: stored.copy_(torch.tensor(shape)))
    with pytest.raises(CheckpointError, match=r"wrong packed shape: .* not \["):
        open_source(packed)


@pytest.mark.parametrize(
    "change",
    [{"num_bits": [4]}, {"num_bits": True}, {"group_size": "x"}, {"group_size": [16]}, {"strategy": ["group"]}],
    ids=str,
)
def test_a_quantization_config_of_other_types_is_refused(packed, change):
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= change
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config is not supported: group_0 has"):
        open_source(packed)


@in_one_test("stranger", ["thesis.txt", "runs/log.txt"])
def test_overwrite_spares_what_diffquant_did_not_write(model, tmp_path, stranger):
    output = tmp_path / "out"
    quantize(model, output, Recipe.of(weights="8:row"))
    (output / stranger).parent.mkdir(exist_ok=True)
    (output / stranger).write_text("mine")
    before = {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}
    with pytest.raises(OutputExistsError, match=f"holds {stranger}, which diffquant did not write"):
        quantize(model, output, Recipe.of(weights="4:g16"), overwrite=True)
    assert {file: file.read_bytes() for file in output.rglob("*") if file.is_file()} == before


def test_a_folder_of_anothers_checkpoint_is_not_overwritten(model, copied, tmp_path):
    with pytest.raises(OutputExistsError, match="which diffquant did not write"):
        quantize(model, copied, Recipe.of(weights="8:row"), overwrite=True)
