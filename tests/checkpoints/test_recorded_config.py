"""What `quantize` records in config.json, read again: the recipe, its version and the dtype that the model runs in."""

import json

import pytest
from safetensors.torch import load_file

import diffquant
from diffquant.checkpoints.compressed_config import read_schemes
from diffquant.checkpoints.compressed_tensors import PACKED
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError
from diffquant.support.installation import CONFIG_VERSION
from tests.support.checkpoints import edit_json, write_diffllama


@pytest.fixture
def quantized(tmp_path):
    source = write_diffllama(tmp_path / "source")
    diffquant.quantize(source, tmp_path / "out", {"weights": "4:g16", "kv": 8})
    return tmp_path / "out"


def recorded(folder):
    return json.loads((folder / "config.json").read_text())["diffquant_config"]


@pytest.mark.parametrize("version", [CONFIG_VERSION + 1, CONFIG_VERSION + 10])
def test_what_a_newer_diffquant_recorded_is_refused(quantized, version):
    edit_json(quantized / "config.json", diffquant_config=recorded(quantized) | {"version": version})
    with pytest.raises(
        CheckpointError, match=rf"version {version}, but this diffquant reads {CONFIG_VERSION}; install"
    ):
        diffquant.load(quantized)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "malformed"),
        ({"version": "2"}, "malformed"),
        ({"recipe": {"weights": "4:nothing"}}, "malformed"),
        ({"recipe": {"wights": "4"}}, "malformed"),
        ({"dtype": "float3"}, "has dtype 'float3'; choose from"),
        ({"dtype": 32}, "has dtype 32; choose from"),
    ],
)
def test_what_cannot_be_read_is_refused(quantized, entry, message):
    edit_json(quantized / "config.json", diffquant_config=entry)
    with pytest.raises(CheckpointError, match=message):
        diffquant.load(quantized)


def test_the_index_says_the_size_of_all_tensors_and_where_each_lies(tmp_path):
    source = write_diffllama(tmp_path / "source", shard_size="150KB")
    diffquant.quantize(source, tmp_path / "out", {"weights": "4:g16"})
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 1
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = [tensor.nbytes for tensors in files.values() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_an_expression_of_a_target_has_to_match_from_the_start(quantized):
    entry = json.loads((quantized / "config.json").read_text())["quantization_config"]
    modules = [name.removesuffix(PACKED) for name in open_source(quantized).checkpoint.tensors if name.endswith(PACKED)]
    (group,) = entry["config_groups"].values()
    for target, covers in ((r"re:model\..*", True), (r"re:layers\..*", False)):
        config = {"quantization_config": entry | {"config_groups": {"group_0": group | {"targets": [target]}}}}
        if covers:
            assert read_schemes(config, modules)
        else:
            with pytest.raises(CheckpointError, match="no group of quantization_config covers"):
                read_schemes(config, modules)
