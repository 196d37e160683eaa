import errno
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from diffquant.checkpoints import row_stream as stream
from diffquant.checkpoints.compressed_tensors import PACKED, SCALE, SHAPE, unpack_weight
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.errors import (
    CheckpointError,
    DiffQuantError,
    GroupSizeError,
    NonFiniteError,
    OutputExistsError,
    UsageError,
)
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import contents, edit_json, set_number, write_checkpoint, write_diffllama, write_random
from tests.support.tables import in_one_test


@pytest.fixture
def source(tmp_path):
    return write_diffllama(tmp_path / "source", shard_size="150KB")


def plan_of(folder, recipe):
    return plan_quantization(open_source(folder), recipe)


def write_decoded(folder, destination):
    """The checkpoint in `folder` with every packed weight decoded by ours."""
    opened = open_source(folder)
    checkpoint, schemes = opened.checkpoint, opened.packed
    packed = tuple(module + suffix for module in schemes for suffix in (PACKED, SCALE, SHAPE))
    tensors = {name: checkpoint.read(name).clone() for name in checkpoint.tensors if name not in packed}
    for module, scheme in schemes.items():
        parts = (checkpoint.read(module + suffix) for suffix in (PACKED, SCALE, SHAPE))
        tensors[f"{module}.weight"] = unpack_weight(*parts, scheme)
    destination.mkdir()
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (destination / "config.json").write_text(json.dumps(config))


def stock(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def assert_stock_agrees(folder, tmp_path):
    ids = torch.randint(0, 90, (2, 19), generator=torch.Generator().manual_seed(0))
    write_decoded(folder, tmp_path / "decoded")
    quantized, dense = stock(folder), stock(tmp_path / "decoded")
    torch.testing.assert_close(quantized(ids).logits, dense(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *((f"{bits}:{shared}", torch.float32) for shared in ("g32", "row", "tensor") for bits in (4, 6, 8)),
        *(("6:g16", dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_stock_transformers_computes_with_our_decoded_weights(tmp_path, text, dtype):
    source = write_diffllama(tmp_path / "source", dtype=dtype, attention_bias=True)
    quantize(source, tmp_path / "out", Recipe.of(weights=text))
    assert_stock_agrees(tmp_path / "out", tmp_path)


def test_stock_transformers_agrees_on_mixed_overrides_and_a_packed_head(tmp_path, source):
    overrides = {"*.1.self_attn.q_proj": "8:tensor", "*.2.self_attn.o_proj": "16", "lm_head": "8:g16"}
    recipe = Recipe.of(weights="4:g32", overrides={"*.mlp.*": "6:row"} | overrides)
    quantize(source, tmp_path / "out", recipe)
    assert_stock_agrees(tmp_path / "out", tmp_path)
    assert "model.layers.2.self_attn.o_proj.weight" in open_checkpoint(tmp_path / "out").tensors


def test_a_tied_model_keeps_one_embedding(tmp_path):
    source = write_diffllama(tmp_path / "source", tie_word_embeddings=True)
    quantize(source, tmp_path / "out", Recipe.of(weights="4:g32"))
    assert_stock_agrees(tmp_path / "out", tmp_path)
    with pytest.raises(UsageError, match="head is its embedding"):
        plan_of(source, Recipe.of(overrides={"lm_head": "8:row"}))


def test_progress_counts_the_bytes_of_all_shards_and_never_falls(tmp_path, source):
    told = []
    quantize(source, tmp_path / "out", Recipe.of(weights="8:row"), progress=lambda *about: told.append(about))
    done, totals, _ = zip(*told, strict=True)
    data = sum(sum(t.nbytes for t in load_file(f).values()) for f in (tmp_path / "out").glob("*.safetensors"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert set(totals) == {data}
    assert list(done) == sorted(done)
    assert done[-1] == data


def test_recipe_errors_sizes_and_digests_are_recorded(tmp_path, source):
    recipe = Recipe.of(weights="4:g32", k="8:row", v="4:row", logits="6:row", residual=16)
    report = quantize(source, tmp_path / "out", recipe)
    config = json.loads((tmp_path / "out/config.json").read_text())
    account = json.loads((tmp_path / "out/diffquant.json").read_text())
    assert Recipe.from_dict(config["diffquant_config"]["recipe"]) == recipe
    assert Recipe.read(tmp_path / "out/recipe.yaml") == recipe
    name = "model.layers.0.mlp.up_proj"
    weight = open_checkpoint(source).read(f"{name}.weight")
    out = open_checkpoint(tmp_path / "out")
    scheme = recipe.weights
    decoded = unpack_weight(*(out.read(name + suffix) for suffix in (PACKED, SCALE, SHAPE)), scheme)
    error = ((decoded - weight).square().sum() / weight.square().sum()).sqrt().item()
    assert account["tensors"][f"{name}.weight"]["relative_rms_error"] == pytest.approx(error, rel=1e-4)
    assert account["source"]["xxh3_128"] == {
        f.name: xxhash.xxh3_128_hexdigest(f.read_bytes()) for f in sorted(source.glob("*.safetensors"))
    }
    assert report.bytes_after == sum(t.nbytes for t in out.tensors.values()) == account["bytes"]
    # Scales of 16 bits, from a float32 source as well: half a bit for each of 32 weights.
    assert report.packed_bits == pytest.approx(4.5, abs=0.05)
    assert "relative RMS error" in report.summary()
    largest = [line.split()[1] for line in report.summary().splitlines() if line.startswith("  ")]
    assert largest == [each.name for each in report.errors[:3]]


def test_a_recipe_without_weights_copies_them(tmp_path, source):
    quantize(source, tmp_path / "out", Recipe.of(kv=4, logits=6))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["diffquant_config"]["recipe"]["logits"] == "6:row"
    assert all(
        torch.equal(tensor, load_file(tmp_path / "out" / file.name)[name])
        for file in source.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    )


def test_blocks_of_any_size_give_the_same_bytes(tmp_path, source, monkeypatch):
    recipe = Recipe.of(weights="4:g32", overrides={"*.mlp.*": "6:tensor"})
    quantize(source, tmp_path / "whole", recipe)
    monkeypatch.setattr(stream, "BLOCK_ELEMENTS", 100)
    quantize(source, tmp_path / "rows", recipe)
    weights = [f"{file.name}" for file in source.glob("*.safetensors")]
    whole, rows = contents(tmp_path / "whole"), contents(tmp_path / "rows")
    assert all(whole[name] == rows[name] for name in weights)


def test_the_table_shows_bits_and_final_size_before_any_work(tmp_path, source):
    plan = plan_of(source, Recipe.of(weights="4:g32"))
    lines = plan.table().splitlines()
    assert any("layers.*.mlp.up_proj" in line and "4:g32" in line and "4.5" in line for line in lines)
    report = quantize(source, tmp_path / "out", Recipe.of(weights="4:g32"))
    assert plan.bytes_after == report.bytes_after
    assert f"{report.bytes_after / 1e6:.1f} MB" in lines[-1]


def test_group_misfits_are_one_line_with_the_sizes_that_fit(source):
    with pytest.raises(GroupSizeError) as caught:
        plan_of(source, Recipe.of(weights="4:g128"))
    message = str(caught.value)
    assert "group size 128 does not divide the input width of 21 tensors, such as model.layers.0." in message
    assert "their widths are 64, 160: use g16, g32 or row" in message
    assert len(message) < 300


def test_a_quantized_source_is_refused(tmp_path, source):
    quantize(source, tmp_path / "out", Recipe.of(weights="8:row"))
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize(tmp_path / "out", tmp_path / "again", Recipe.of(weights="4:row"))


def test_float64_weights_are_refused(tmp_path):
    config = json.loads((write_diffllama(tmp_path / "model") / "config.json").read_text())
    write_random(tmp_path / "wide", config)
    with pytest.raises(CheckpointError, match=r"must be float16.*q_proj\.weight is torch\.float64"):
        plan_of(tmp_path / "wide", Recipe.of(weights="8:row"))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_named_and_leave_nothing(tmp_path, name, value):
    source = write_diffllama(tmp_path / "source")
    set_number(source, name, (3, 5), value)
    with pytest.raises(NonFiniteError, match=f"{name}.*holds 1 NaN or infinite"):
        quantize(source, tmp_path / "out", Recipe.of(weights="4:tensor"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


@in_one_test("dtype", [torch.float32, torch.bfloat16])
def test_what_overflows_the_dtype_that_is_asked_for_is_refused(tmp_path, dtype):
    source = write_diffllama(tmp_path / "source", dtype=dtype)
    set_number(source, "model.embed_tokens.weight", (3, 5), -1e5)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has values up to .* overflow .*float16"):
        quantize(source, tmp_path / "out", Recipe.of(weights="4:g32"), dtype="float16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_an_existing_output_survives_unless_replaced_whole(tmp_path, source):
    quantize(source, tmp_path / "out", Recipe.of(weights="8:row"))
    before = contents(tmp_path / "out")
    with pytest.raises(OutputExistsError, match="pass overwrite=True"):
        quantize(source, tmp_path / "out", Recipe.of(weights="4:row"))

    def interrupt(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the partial output was removed"):
        quantize(source, tmp_path / "out", Recipe.of(weights="4:row"), overwrite=True, progress=interrupt)
    assert contents(tmp_path / "out") == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "out"}
    quantize(source, tmp_path / "out", Recipe.of(weights="4:row"), overwrite=True)
    assert contents(tmp_path / "out") != before
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "out"}


def test_a_folder_in_the_place_of_a_file_that_was_written_is_not_overwritten(tmp_path, source):
    quantize(source, tmp_path / "out", Recipe.of(weights="8:row"))
    (tmp_path / "out/README.md").unlink()
    (tmp_path / "out/README.md").mkdir()
    (tmp_path / "out/README.md/notes.txt").write_text("years of work")
    with pytest.raises(OutputExistsError, match=r"holds README\.md/notes\.txt, which diffquant did not"):
        quantize(source, tmp_path / "out", Recipe.of(weights="8:row"), overwrite=True)
    assert (tmp_path / "out/README.md/notes.txt").exists()


@pytest.mark.parametrize("place", [".", "quantized", ".."])
def test_the_input_is_never_an_output(tmp_path, source, place):
    with pytest.raises(UsageError, match="overlaps the input"):
        quantize(source, source / place, Recipe.of(weights="8:row"), overwrite=True)
    assert open_checkpoint(source)


def test_too_small_a_disk_is_refused_before_work(tmp_path, source, monkeypatch):
    # More than the weights, and less than what is kept beside them.
    for free in (10, 16 << 20):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(free, 0, free))
        with pytest.raises(
            DiffQuantError, match=r"needs [\d,]+ bytes for .* and [\d,]+ for .* only [\d,]+ are free"
        ) as refusal:
            quantize(source, tmp_path / "out", Recipe.of(weights="8:row"))
        weights, beside, said = (
            int(n.replace(",", "")) for n in re.findall(r" ([\d,]+) (?:bytes|for|are)", str(refusal.value))
        )
        assert said == free < weights + beside
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this processor has no /proc, where nobody can write")
def test_a_place_where_nothing_can_be_written_is_no_full_disk(source):
    with pytest.raises(UsageError, match=r"cannot write into /proc: .*; choose another output"):
        quantize(source, "/proc/out", Recipe.of(weights="8:row"))


def test_a_quota_is_no_full_disk(tmp_path, source, monkeypatch):
    monkeypatch.setattr("os.pwrite", fill_up_after(0))
    with pytest.raises(
        DiffQuantError, match=r"needs [\d,]+ bytes and [\d,]+ are free; .*quotas and the number of files"
    ):
        quantize(source, tmp_path / "out", Recipe.of(weights="8:row"))


def test_a_disk_that_fills_up_says_how_to_go_on(tmp_path, source, monkeypatch):
    quantize(source, tmp_path / "expected", Recipe.of(weights="8:row"))
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", fill_up_after(120_000))
        with pytest.raises(
            DiffQuantError, match=r"disk is full.*needs [\d,]+ bytes and [\d,]+ are free.*same command again"
        ):
            quantize(source, tmp_path / "out", Recipe.of(weights="8:row"))
    assert not (tmp_path / "out").exists()
    report = quantize(source, tmp_path / "out", Recipe.of(weights="8:row"))
    assert report.resumed > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def fill_up_after(limit):
    from os import pwrite

    written = 0

    def limited(descriptor, data, offset):
        nonlocal written
        written += len(data)
        if written > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    return limited


def test_a_source_with_changed_config_is_not_resumed_into(tmp_path, source):
    def interrupt_late(done, total, what):
        if done > 0.7 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", Recipe.of(weights="8:row"), progress=interrupt_late)
    edit_json(source / "config.json", rms_norm_eps=1e-3)
    assert quantize(source, tmp_path / "out", Recipe.of(weights="8:row")).resumed == 0


@in_one_test("kind", ["diffllama", "llama", "unilm-v1", "unilm-v2", "motif"])
def test_the_card_says_that_transformers_loads_what_transformers_loads(kind, tmp_path):
    quantize(write_checkpoint(tmp_path / "plain", kind), tmp_path / "low", Recipe.of(weights="4:g32"))
    known = json.loads((tmp_path / "low" / "config.json").read_text())["model_type"] in CONFIG_MAPPING_NAMES
    card = (tmp_path / "low" / "README.md").read_text()
    assert ("transformers loads without diffquant" in card) == known
    assert ("trust_remote_code=True" in card) == (kind != "llama")


@pytest.mark.parametrize("rounding", ["nearest", "mse"])
def test_an_open_source_of_float32_is_the_same_after_it_was_quantized(source, tmp_path, rounding):
    opened = open_source(source)
    before = {name: opened.checkpoint.read(name).clone() for name in opened.checkpoint.tensors}
    quantize(opened, tmp_path / "first", Recipe.of(weights="4:g32", rounding=rounding))
    assert {tensor.dtype for tensor in before.values()} == {torch.float32}
    assert [name for name in before if not torch.equal(opened.checkpoint.read(name), before[name])] == []
