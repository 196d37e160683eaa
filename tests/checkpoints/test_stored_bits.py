"""Stored bits mean the same in every verb: the bytes of data in the files that were written, over the weights."""

import json
import struct
from itertools import product

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from diffquant.checkpoints.compressed_tensors import PACKED, SCALE, SHAPE
from diffquant.checkpoints.source import open_source
from diffquant.measure.sweep.subject import weight_bytes
from diffquant.quantization.conversion import convert
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.loading import load
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_checkpoint, write_llama
from tests.support.gguf_files import write_gguf
from tests.support.tables import in_one_test


def written(folder):
    """Entries of the headers of every safetensors file, read without the library; bytes of data by file size."""
    entries, nbytes = {}, 0
    for file in sorted(folder.glob("*.safetensors")):
        length = struct.unpack("<Q", file.read_bytes()[:8])[0]
        header = json.loads(file.read_bytes()[8 : 8 + length])
        nbytes += file.stat().st_size - 8 - length
        entries |= {name: entry for name, entry in header.items() if name != "__metadata__"}
    return entries, nbytes


def packed_bits(folder, entries):
    """Stored bits of a packed weight as its three tensors' entries have them."""
    suffixes = (PACKED, SCALE, SHAPE)
    nbytes = sum(
        end - start for name, e in entries.items() if name.endswith(suffixes) for start, end in [e["data_offsets"]]
    )
    shapes = [tensor for file in folder.glob("*.safetensors") for n, tensor in load_file(file).items() if SHAPE in n]
    return 8 * nbytes / sum(int(shape.prod()) for shape in shapes)


SOURCES = [*product(["diffllama", "llama"], [torch.float32, torch.bfloat16]), ("gguf", torch.float32)]
SOURCES += [("unilm-v2", torch.float16), ("unilm-v2", torch.float32)]


@pytest.fixture(params=SOURCES, ids=lambda source: f"{source[0]}-{source[1]}")
def source(request, tmp_path):
    kind, dtype = request.param
    if kind == "gguf":
        return write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama", vocab_size=97))
    return write_checkpoint(tmp_path / "source", kind, dtype, vocab_size=97)


@pytest.mark.parametrize("scheme", ["4:g32", "6:row", "3:g16", "8:tensor"])
def test_every_verb_counts_the_bytes_that_were_written(source, tmp_path, scheme):
    recipe = Recipe.of(weights=scheme, overrides={"*.1.mlp.*": "5:row"})
    plan = plan_quantization(open_source(source), recipe)
    report = quantize(source, tmp_path / "out", recipe)
    entries, nbytes = written(tmp_path / "out")
    bits = packed_bits(tmp_path / "out", entries)
    account = json.loads((tmp_path / "out/diffquant.json").read_text())
    assert report.bytes_after == plan.bytes_after == account["bytes"] == nbytes
    assert weight_bytes(open_source(source), recipe) == weight_bytes(open_source(tmp_path / "out"), Recipe()) == nbytes
    assert report.packed_bits == plan.packed_bits == pytest.approx(bits)
    assert account["packed_bits"] == round(bits, 4)
    assert f"{bits:.2f} stored bits per weight" in (tmp_path / "out/README.md").read_text()
    inspection = inspect_checkpoint(tmp_path / "out")
    assert inspection.sizes["as it is"] == nbytes
    assert inspection.packed_bits["as it is"] == pytest.approx(bits)


def test_sixteen_bits_are_two_bytes_a_weight_whatever_the_source(source):
    opened = open_source(source)
    weights = sum(p.numel() for p in load(opened).parameters())
    assert weight_bytes(opened, Recipe()) == 2 * weights == inspect_checkpoint(opened).sizes["16"]


def test_inspect_foresees_what_quantize_writes(source, tmp_path):
    inspection = inspect_checkpoint(source)
    report = quantize(source, tmp_path / "out", Recipe.of(weights="6:g32"))
    assert (inspection.sizes["6:g32"], inspection.packed_bits["6:g32"]) == (report.bytes_after, report.packed_bits)


def test_what_gguf_leaves_unpacked_is_written_in_16_bits_and_loads_as_simulated(tmp_path):
    source = write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama"))
    recipe = Recipe.of(weights="4:g32")
    quantize(source, tmp_path / "out", recipe)
    entries, _ = written(tmp_path / "out")
    matrices = {e["dtype"] for name, e in entries.items() if len(e["shape"]) == 2 and not name.endswith(PACKED)}
    assert matrices == {"BF16"}
    assert {e["dtype"] for name, e in entries.items() if "norm" in name} == {"F32"}
    stored, simulated = load(tmp_path / "out", dtype=torch.float32), load(source, recipe, torch.float32)
    for (name, ours), theirs in zip(simulated.named_parameters(), stored.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    ids = torch.arange(19)[None]
    assert stock.dtype == torch.bfloat16
    torch.testing.assert_close(stock(ids).logits, load(tmp_path / "out")(ids).logits, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind_of_source", [torch.float32, torch.bfloat16])
def test_stock_transformers_has_our_weights_in_every_dtype(tmp_path, kind_of_source, dtype):
    write_checkpoint(tmp_path / "source", "diffllama", kind_of_source)
    quantize(tmp_path / "source", tmp_path / "out", Recipe.of(weights="8:g32"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    ids = torch.arange(7)[None]
    stock(ids)
    ours = load(tmp_path / "out", dtype=dtype, packed=False)
    for layer, theirs in zip(ours.model.layers, stock.model.layers, strict=True):
        assert torch.equal(layer.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
        assert torch.equal(layer.self_attn.v_proj.weight, theirs.self_attn.v_proj.weight)


KINDS = {
    GGMLQuantizationType.Q4_1: "BF16",
    GGMLQuantizationType.Q8_0: "BF16",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
    GGMLQuantizationType.F32: "F32",
}


@in_one_test("gguf_kind", KINDS)
def test_a_gguf_file_is_converted_in_16_bits_and_exactly_where_it_is_plain(tmp_path, gguf_kind):
    source = write_gguf(tmp_path / "tiny.gguf", write_llama(tmp_path / "llama"), gguf_kind)
    report = convert(source, tmp_path / "out", "diff-v2")
    assert (tmp_path / "out/tokenizer.json").exists()
    entries, nbytes = written(tmp_path / "out")
    assert {e["dtype"] for e in entries.values() if len(e["shape"]) == 2} == {KINDS[gguf_kind]}
    assert (report.bytes_before, report.bytes_after) == (source.stat().st_size, nbytes)
    checkpoint, out = open_source(source).checkpoint, open_source(tmp_path / "out").checkpoint
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(out.read(name), checkpoint.read(name).to(out.tensors[name].dtype))
    is_plain = gguf_kind.name in ("F16", "BF16", "F32")
    assert (report.rounding_error == 0) == is_plain
    assert ("rounded to bfloat16" in report.summary()) == (not is_plain)
    assert report.rounding_error < 2**-8


def test_a_dtype_that_is_asked_for_is_that_of_the_matrices_alone(tmp_path):
    source = write_checkpoint(tmp_path / "source", "unilm-v1", torch.float32)
    report = convert(source, tmp_path / "out", "diffllama", dtype=torch.float16)
    entries, _ = written(tmp_path / "out")
    assert {len(e["shape"]): e["dtype"] for e in entries.values()} == {1: "F32", 2: "F16"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float16"
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    lost = [(after[n].double() - before[n].double(), before[n].double()) for n in after if "mlp" in n or "embed" in n]
    error = (sum(e.square().sum() for e, _ in lost) / sum(b.square().sum() for _, b in lost)).sqrt().item()
    assert report.rounding_error == pytest.approx(error, rel=0.05)
