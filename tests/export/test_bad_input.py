"""What an export, a verification or a run refuses, and that nothing half-written stays."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.helper import make_node, make_tensor_value_info
from typer.testing import CliRunner

import diffquant
from diffquant.calib.calibration import kv_cache
from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.errors import (
    CheckpointError,
    GroupSizeError,
    NonFiniteError,
    OutputExistsError,
    ToleranceError,
    UsageError,
)
from diffquant.onnx import ExportOptions, Generator, export, options, verify
from diffquant.onnx.files import DATA_FILE, MODEL_FILE
from diffquant.onnx.manifest import FILE as RECORD
from diffquant.onnx.manifest import read_manifest
from diffquant.onnx.runtime.session import InPlaceDecoder, OnnxModel
from diffquant.verbs import cli
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, set_number, write_checkpoint
from tests.support.exports import cache_ranges
from tests.support.models import random_ids
from tests.support.planted import PlantedExport
from tests.support.tables import in_one_test


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", "diffllama")


@pytest.fixture
def folder(source, tmp_path):
    export(source, tmp_path / "out")
    return tmp_path / "out"


@in_one_test(
    ("wrong", "message"),
    [
        ({"kv_bits": 6}, "no kernel reads a 6-bit KV cache"),
        ({"embed_bits": 4}, "no kernel reads 4-bit embeddings"),
        ({"dtype": "bfloat16"}, "unknown dtype"),
        ({"accuracy_level": 2}, "accuracy level 2"),
        ({"genai_device": "cuda:x"}, "genai_device takes cpu, cuda or cuda:N, not 'cuda:x'"),
        ({"genai_device": "cuda", "cache": False}, "leave out cache=False or genai_device"),
        ({"logits": "4:b16"}, "logits per block"),
        ({"logits": "4:map"}, "logits per map"),
        ({"logits": "4:row:alike"}, "the operator rounds each map separately"),
        ({"logits": "4:row:rotated"}, "logits: rotated is for k and v"),
        ({"weights": "4:g32:shift"}, "weights: shift is for logits"),
        ({"kv_bits": 8, "cache": False}, "contradict"),
        ({"kv_bits": 5, "embed_bits": 5}, "5-bit KV cache.*5-bit embeddings"),
    ],
)
def test_options_that_no_runtime_has_are_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        ExportOptions.parse(**wrong)


@in_one_test("wrong", [{"weights": "4:g32"}, {"logits": 6}])
def test_schemes_as_text_hear_how_they_are_read(wrong):
    with pytest.raises(UsageError, match=r"for text use ExportOptions\.parse"):
        ExportOptions(**wrong)


def test_a_runtime_that_is_too_old_for_the_model_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr(options.onnxruntime, "__version__", "1.24.1")
    with pytest.raises(UsageError, match=r"8-bit KV cache needs ONNX Runtime 1\.27; installed is 1\.24\.1"):
        export(source, tmp_path / "out", ExportOptions(kv_bits=8))
    assert not (tmp_path / "out").exists()


def test_groups_that_no_kernel_has_are_named(tmp_path):
    source = write_checkpoint(tmp_path / "source", "diffllama", hidden_size=72, intermediate_size=144, head_dim=18)
    with pytest.raises(GroupSizeError, match=r"q_proj.weight \[72, 72\] 4:g24.*and 9 more: ONNX"):
        export(source, tmp_path / "out", ExportOptions.parse(weights="4:g24"))


def test_groups_that_do_not_divide_a_row_are_named_with_those_that_do(tmp_path):
    source = write_checkpoint(tmp_path / "source", "diffllama", intermediate_size=176)
    named = r"0.mlp.down_proj.weight \[64, 176\] 4:g32, model.layers.1.mlp.down_proj.weight \[64, 176\] 4:g32: ONNX"
    with pytest.raises(GroupSizeError, match=f"no kernel reads model.layers.{named}.*; use g16 or row, or quantize"):
        export(source, tmp_path / "out", ExportOptions.parse(weights="4:g32"))
    export(source, tmp_path / "out", ExportOptions.parse(weights="4:g16"))


def test_what_the_graph_cannot_express_is_refused(tmp_path):
    config = {"hidden_act": "gelu", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    source = write_checkpoint(tmp_path / "source", "llama", **config)
    with pytest.raises(CheckpointError, match=r"'gelu' is not silu.*rope_type 'dynamic'.*leave out logits"):
        export(source, tmp_path / "out", ExportOptions.parse(logits="8:row"))


def test_more_positions_than_a_graph_has_room_for_are_refused_before_anything_is_written(tmp_path):
    model = write_checkpoint(tmp_path / "model", "diffllama", max_position_embeddings=2**24)
    with pytest.raises(CheckpointError, match=r"max_position_embeddings 16,777,216 need 2\.1 GB of angles"):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_transformers_heads_that_onnx_runtime_cannot_rotate_are_refused_before_anything_is_written(tmp_path):
    model = write_checkpoint(tmp_path / "model", "llama", head_dim=24)
    with pytest.raises(CheckpointError, match="key rows must have a multiple of 16 channels, not 24"):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantized_cache_needs_ranges(source, tmp_path):
    with pytest.raises(UsageError, match=r"8-bit KV cache needs calibrated ranges: pass ranges=.*calibrate_cache"):
        export(source, tmp_path / "out", ExportOptions(kv_bits=8))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 4}, "these ranges were clipped for 4 bits"),
        ({"tensors": {"layers.0.k": None, "layers.1.k": None}}, "these ranges do not include v; calibrate it too"),
    ],
)
def test_ranges_that_do_not_serve_the_cache_are_refused(source, tmp_path, changes, message):
    ranges = cache_ranges(source, ExportOptions(kv_bits=8))
    kept = {name: ranges.tensors[name] for name in changes.get("tensors", ranges.tensors)}
    with pytest.raises(UsageError, match=message):
        export(
            source, tmp_path / "out", ExportOptions(kv_bits=8), ranges=replace(ranges, **changes | {"tensors": kept})
        )
    assert not (tmp_path / "out").exists()


def test_calibration_on_prose_needs_a_tokenizer(source):
    with pytest.raises(UsageError, match=r"(?s)calibrated on text.*put tokenizer files into"):
        calibrate_cache(source)


def test_what_is_wrong_is_said_before_the_cache_is_calibrated(source, folder, monkeypatch):
    monkeypatch.setattr(kv_cache, "calibrate_cache", lambda *_, **__: pytest.fail("calibrated first"))
    run = CliRunner().invoke
    again = run(cli.app, ["export", str(source), "-o", str(folder), "--kv", "8"])
    assert isinstance(again.exception, OutputExistsError), again.output
    unread = run(cli.app, ["export", str(source), "-o", str(folder / "new"), "--kv", "8", "--weights", "4:g24"])
    assert isinstance(unread.exception, GroupSizeError), unread.output


def test_an_existing_folder_is_kept_unless_told_otherwise(source, folder):
    before = (folder / MODEL_FILE).read_bytes()
    with pytest.raises(OutputExistsError, match="pass overwrite=True"):
        export(source, folder)
    assert (folder / MODEL_FILE).read_bytes() == before
    export(source, folder, ExportOptions(cache=False), overwrite=True)
    assert OnnxModel(folder, 1).cache is None
    assert not (folder / "genai_config.json").exists()


@pytest.mark.parametrize(
    ("name", "place"), [("model.layers.1.mlp.up_proj.weight", (0, 5)), ("model.norm.weight", (5,))]
)
def test_a_checkpoint_with_nan_leaves_nothing_behind(source, tmp_path, name, place):
    set_number(source, name, place, float("nan"))
    with pytest.raises(NonFiniteError, match=name):
        export(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_values_beyond_float16_are_named(source, tmp_path):
    set_number(source, "model.layers.0.mlp.up_proj.weight", (3, 3), 1e6)
    with pytest.raises(diffquant.DiffQuantError, match=r"layers\.0\.mlp\.up_proj.*dtype='float32'"):
        export(source, tmp_path / "out", ExportOptions(dtype="float16"))


def test_a_truncated_data_file_is_refused(folder):
    data = (folder / DATA_FILE).read_bytes()
    for kept in (len(data) // 2, len(data) - 1):
        (folder / DATA_FILE).write_bytes(data[:kept])
        with pytest.raises(CheckpointError, match="truncated"):
            OnnxModel(folder)


@in_one_test(
    ("key", "value", "message"),
    [
        ("location", "../elsewhere", "lies outside"),
        ("location", "gone.data", "is missing"),
        ("offset", "x", "not a number of bytes"),
        ("offset", "-4096", "not a number of bytes"),
        ("length", "9" * 5000, "not a number of bytes"),
    ],
)
def test_data_elsewhere_or_at_a_place_that_is_no_number_are_refused(folder, key, value, message):
    content = (folder / MODEL_FILE).read_bytes()
    model = onnx.load_from_string(content)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    next(entry for entry in tensor.external_data if entry.key == key).value = value
    onnx.save(model, folder / MODEL_FILE)
    with pytest.raises(CheckpointError, match=message):
        OnnxModel(folder)
    (folder / MODEL_FILE).write_bytes(content)


def renamed(values, name, to):
    next(value for value in values if value.name == name).name = to


BROKEN = {
    "empty": (
        lambda graph: graph.Clear(),
        r"no input input_ids; it has no input attention_mask; it has no output logits",
    ),
    "no logits": (lambda graph: renamed(graph.output, "logits", "scores"), "no output logits"),
    "no mask": (lambda graph: graph.input.pop(1), "no input attention_mask"),
    "another input": (
        lambda graph: graph.input.add().CopyFrom(make_tensor_value_info("position_ids", TensorProto.INT64, ["b", "t"])),
        "it has unknown inputs position_ids",
    ),
    "no present": (lambda graph: renamed(graph.output, "present.1.value", "x"), r"no output present\.1\.value"),
    "one axis": (lambda graph: graph.output[0].type.tensor_type.shape.dim.pop(), r"not \[batch, sequence, vocabulary"),
    "integers": (lambda graph: setattr(graph.output[0].type.tensor_type, "elem_type", TensorProto.INT64), "not floats"),
    "a cache axis": (lambda graph: graph.input[3].type.tensor_type.shape.dim.pop(), "its caches are not"),
    "a cache type": (
        lambda graph: setattr(graph.input[3].type.tensor_type, "elem_type", TensorProto.INT8),
        "its caches are not",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_graph_with_another_interface_is_refused_by_file(folder, damage, message):
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    damage(model.graph)
    onnx.save(model, folder / MODEL_FILE)
    with pytest.raises(CheckpointError, match=f"{folder / MODEL_FILE} is not a model.*{message}.*export it again"):
        OnnxModel(folder)


def test_an_empty_model_is_refused_by_file(folder):
    (folder / MODEL_FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{folder / MODEL_FILE} is not a model that diffquant exported"):
        OnnxModel(folder)
    with pytest.raises(CheckpointError, match=f"{MODEL_FILE} changed since export"):
        Generator(folder)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, ids: model.run(ids, np.ones_like(ids), model.allocate_cache(1)),
        lambda model, ids: InPlaceDecoder(model, *ids.shape).step(ids),
    ],
    ids=["growing", "in place"],
)
def test_a_graph_that_fails_while_it_runs_is_refused_by_file(folder, tmp_path, call):
    planted = PlantedExport.copy(folder, tmp_path / "planted")
    planted.behind("logits", lambda before, after: [make_node("Reshape", [before, "shape"], [after])], shape=(7, -1, 5))
    planted.save()
    model, ids = OnnxModel(planted.folder, 1), random_ids(1, 3).numpy()
    with pytest.raises(CheckpointError, match=f"fails in {planted.folder / MODEL_FILE}"):
        call(model, ids)


@pytest.mark.parametrize("length", [None, "512", 3.5])
def test_a_context_that_is_no_number_is_refused_by_file(folder, length):
    tiny_lm.tokenizer().save_pretrained(folder)
    edit_json(folder / "config.json", max_position_embeddings=length)
    with pytest.raises(CheckpointError, match=r"config\.json: max_position_embeddings is"):
        Generator(folder)


def test_every_tensor_starts_on_a_page_of_the_data_file(folder):
    """A runtime maps the file, and uses such tensors where they lie."""
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    offsets = {int(entry.value) for t in model.graph.initializer for entry in t.external_data if entry.key == "offset"}
    assert len(offsets) > 5
    assert {offset % 4096 for offset in offsets} == {0}


@pytest.mark.parametrize("name", [MODEL_FILE, DATA_FILE])
def test_a_model_edited_after_export_is_not_verified(source, folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-9] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} changed since export"):
        verify(folder, source)


def test_a_folder_without_what_a_run_reads_beside_the_graph_is_not_verified(source, folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        verify(folder, source)


def test_another_checkpoint_is_not_verified(folder, tmp_path):
    other = write_checkpoint(tmp_path / "other", "diffllama", vocab_size=91)
    with pytest.raises(CheckpointError, match="exported from source"):
        verify(folder, other)


def test_a_missed_tolerance_says_where(source, tmp_path):
    export(source, tmp_path / "out", ExportOptions.parse(weights="4:g32"))
    with pytest.raises(ToleranceError, match="logits of whole runs are not: int8 activations, prefill") as caught:
        verify(tmp_path / "out", source, tolerance=1e-9)
    assert caught.value.exit_code == 4
    planted = PlantedExport.copy(tmp_path / "out", tmp_path / "planted")
    planted.change("model.layers.0.mlp.up_proj.weight_scale", lambda scales: scales * 2)
    planted.save()
    with pytest.raises(ToleranceError, match="diverges first in layer 0"):
        verify(planted.folder, source)


def test_a_folder_that_is_no_export_is_refused(source, tmp_path):
    for call in (lambda: verify(source, source), lambda: Generator(source)):
        with pytest.raises(CheckpointError, match="diffquant export"):
            call()


def test_a_record_that_was_not_written_by_export_is_refused(source, folder):
    (folder / "diffquant.json").write_text(json.dumps({"options": {"colour": "red"}}))
    with pytest.raises(CheckpointError, match="not an export's record"):
        verify(folder, source)


@pytest.mark.parametrize("options", [{"pure": True}, {"op": "flex"}])
def test_a_form_that_is_written_no_more_is_refused_by_name(folder, options):
    record = folder / "diffquant.json"
    entry = json.loads(record.read_text())
    usual = {"pure": False, "op": "custom"}
    record.write_text(json.dumps(entry | {"options": entry["options"] | usual}))
    assert read_manifest(folder).options == ExportOptions()
    record.write_text(json.dumps(entry | {"options": entry["options"] | usual | options}))
    with pytest.raises(CheckpointError, match="--pure-onnx or --op flex, which no longer exist; export"):
        read_manifest(folder)


def sha256_of(*files):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_an_export_whose_digests_are_sha256_is_verified_as_before(source, folder):
    record = json.loads((folder / RECORD).read_text())
    for part in (record, record["source"]):
        del part["xxh3_128"]
    record["sha256"] = sha256_of(folder / MODEL_FILE, folder / DATA_FILE)
    record["source"]["sha256"] = sha256_of(source / "model.safetensors")
    del record["source"]["origin"]
    record["source"]["origin_sha256"] = {}
    (folder / RECORD).write_text(json.dumps(record))
    verify(folder, source)
    with (folder / DATA_FILE).open("r+b") as data:
        data.write(b"\1\2\3")
    with pytest.raises(CheckpointError, match=f"{DATA_FILE} changed since export"):
        verify(folder, source)
