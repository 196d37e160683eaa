"""Exported models against torch: every source, every precision, codes bit for bit."""

import re
from itertools import product

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import DiffLlamaForCausalLM

import diffquant
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.model.adapters import adapter_for
from diffquant.onnx import ExportOptions, export, verify
from diffquant.onnx.architectures.transformer import TransformerDecoder
from diffquant.onnx.files import DATA_FILE, MODEL_FILE
from diffquant.onnx.graph import plan, streaming
from diffquant.onnx.graph.matrix import attention_head_layout
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.recipe.numbers.absmax import max_code
from diffquant.recipe.numbers.packing import unpack
from diffquant.recipe.scheme import Scheme
from tests.support.checkpoints import SIZES, SOURCES, write_checkpoint
from tests.support.exports import export_to
from tests.support.models import random_ids
from tests.support.nearest_weights import pack_weight
from tests.support.stacks import rows_of
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

PRECISIONS = {
    "int4": {"weights": "4:g32"},
    "int4-exact": {"weights": "4:g32", "accuracy_level": 1},
    "int6": {"weights": "6:row"},
    "int8-tensor": {"weights": "8:tensor"},
    "int3": {"weights": "3:g16", "accuracy_level": 1},
    "embed8": {"embed_bits": 8},
    "float16": {"dtype": "float16"},
    "kv8": {"kv_bits": 8},
    "kv4": {"kv_bits": 4},
    "all": {"weights": "4:g32", "kv_bits": 8, "embed_bits": 8},
    "logits": {"logits": "4:row"},
    "logits-tensor-shift": {"logits": "5:tensor:shift"},
    "no-cache": {"cache": False},
}


@pytest.mark.parametrize("source", sampled(SOURCES, 2))
def test_every_source_computes_what_torch_does(made, source):
    checkpoint, folder = made(source)
    found = verify(folder, checkpoint, tolerance=1e-5)
    names = ["prefill", "padded batch", "chunked prefill", "decode", "batch decode", "decode in place", "long context"]
    assert [route.name for route in found.routes if route.session == "as exported"] == names
    assert next(iter(found.tokens.values())).agreement == 1.0


@pytest.mark.parametrize(
    ("precision", "source"), sampled(product(PRECISIONS, ["unilm-v1", "unilm-v2-half", "motif-grouped"]), 7)
)
def test_every_precision_computes_what_its_simulation_does(made, source, precision):
    checkpoint, folder = made(source, **PRECISIONS[precision])
    found = verify(folder, checkpoint)
    exact = [route for route in found.routes if route.session != "int8 activations"]
    typical, largest = (
        max(measure.value for r in exact for measure in getattr(r, name)) for name in ("typical", "largest")
    )
    roundoff = 1000 if precision == "float16" else 1
    assert typical < 5e-6 * roundoff
    # A logit, key or value that rounds to the neighbouring code moves its row of the stage, and not the typical row. Of
    # a key or value, which is one of many that a row weighs, an eighth of a step is allowed.
    bits = PRECISIONS[precision].get("kv_bits")
    if "logits" not in PRECISIONS[precision]:
        assert largest < (0.125 / max_code(bits) if bits else 2e-5 * roundoff)
        assert found.passed
    if not PRECISIONS[precision].keys() & {"kv_bits", "logits"}:
        assert largest_error(found) < 1e-5 * roundoff


def largest_error(found):
    """Of the logits, without int8 activations."""
    routes = [route for route in found.routes if route.session != "int8 activations"]
    return max(route.logits.value for route in routes if route.logits is not None)


def test_logits_equal_stock_transformers_to_the_end_of_the_context(made):
    ids = random_ids(2, SIZES["max_position_embeddings"]).numpy()
    checkpoint, folder = made("diffllama")
    model = OnnxModel(folder, 1, every_position=True)
    (logits,), _ = model.run(ids, np.ones_like(ids), model.allocate_cache(2))
    oracle = DiffLlamaForCausalLM.from_pretrained(checkpoint).eval()(torch.from_numpy(ids)).logits
    np.testing.assert_allclose(logits, oracle.numpy(), rtol=0, atol=2e-5)


@in_one_test(
    ("width", "scheme"), [(72, "8:row"), (80, "8:g16"), (96, "8:g32"), (64, "8:g64"), (128, "8:g128"), (256, "8:g128")]
)
def test_an_8_bit_embedding_shares_scales_over_the_largest_group_that_divides_its_width(tmp_path, width, scheme):
    source = write_checkpoint(tmp_path / "source", "diffllama", hidden_size=width, num_hidden_layers=1)
    matrices = plan.plan_export(open_source(source), ExportOptions(embed_bits=8)).matrices
    assert str(matrices[plan.EMBEDDING].scheme) == scheme


@pytest.mark.parametrize(
    ("weights", "dtype"),
    sampled(product(["4:g32", "6:g32", "8:row", "4:tensor"], [torch.float32, torch.bfloat16]), 3),
    ids=str,
)
def test_a_quantized_checkpoint_keeps_its_codes_and_scales(tmp_path, weights, dtype):
    plain = write_checkpoint(tmp_path / "plain", "diffllama", dtype)
    quantized = tmp_path / "quantized"
    diffquant.quantize(plain, quantized, diffquant.Recipe.of(weights=weights))
    folder = export_to(tmp_path / "out", quantized)
    source = open_checkpoint(plain)
    adapter = adapter_for(source.config)
    model = onnx.load(folder / MODEL_FILE)

    def held(name):
        tensor, rows = rows_of(model, name)
        return numpy_helper.to_array(tensor)[rows]

    scheme = Scheme.parse(weights)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        module = f"model.layers.1.{name}"
        packed = pack_weight(source.read(module + ".weight"), scheme)
        width = int(packed["weight_shape"][1])
        codes, scale = unpack(packed["weight_packed"], scheme.bits, width), packed["weight_scale"].float()
        order = adapter.layout_row_order(attention_head_layout(adapter.architecture.diff_spec), module + ".weight")
        rows = slice(None) if order is None else order
        stored = from_container(held(module + ".weight_codes"), 4 if scheme.bits <= 4 else 8)[:, :width]
        np.testing.assert_array_equal(stored, codes[rows].numpy())
        blocks = held(module + ".weight_scale")
        wanted = (scale.expand(len(codes), 1) if scale.numel() == 1 else scale)[rows].numpy()
        np.testing.assert_array_equal(blocks, np.repeat(wanted, blocks.shape[1] // wanted.shape[1], 1))
    assert verify(folder, quantized).passed


@in_one_test(("weights", "options"), [("4:g32", {}), ("4:g32", {"accuracy_level": 1}), ("8:g32", {})])
def test_the_lowest_code_and_negative_scales_are_read_alike(made, tmp_path, weights, options):
    quantized = tmp_path / "quantized"
    diffquant.quantize(made("diffllama")[0], quantized, diffquant.Recipe.of(weights=weights, rounding="mse"))
    module = "model.layers.1.mlp.down_proj.weight"
    source = open_checkpoint(quantized)
    assert (source.read(f"{module}_scale") < 0).any()
    codes = unpack(source.read(f"{module}_packed"), int(weights[0]), 32)
    assert codes.amin() == -(2 ** (int(weights[0]) - 1))
    found = verify(export_to(tmp_path / "out", quantized, **options), quantized)
    assert largest_error(found) < 1e-5
    assert found.passed


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "diffllama")
    diffquant.quantize(plain, tmp_path / "quantized", diffquant.Recipe.of(weights="4:g32", kv=8))
    with pytest.raises(diffquant.DiffQuantError, match="quantized weights already"):
        export_to(tmp_path / "out", tmp_path / "quantized", weights="4:g32")
    report = export(tmp_path / "quantized", tmp_path / "out")
    text = "\n".join(report.notes)
    assert "recipe (k 8:row" in text
    assert re.search(r"weights 4:g32: .*, 5\.00 stored bits each, with scales in float32\n", text)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "options", sampled([{"weights": "6:g16"}, {"weights": "8:row"}, {"embed_bits": 8}], 3), ids=str
)
def test_codes_of_8_bits_round_activations_at_both_accuracy_levels(made, options):
    (_, rounded), (checkpoint, folder) = (made("unilm-v2", accuracy_level=level, **options) for level in (4, 1))
    assert (rounded / MODEL_FILE).read_bytes() == (folder / MODEL_FILE).read_bytes()
    assert "int8 activations" in {route.session for route in verify(folder, checkpoint).routes}


@in_one_test(("weights", "is_said"), [("16", True), ("8:row", True), ("3:g16", False)])
def test_an_accuracy_level_that_changes_nothing_is_said_to(tmp_path, weights, is_said):
    source = write_checkpoint(tmp_path / "source", "unilm-v2")
    report = export(source, tmp_path / "out", ExportOptions.parse(weights=weights, accuracy_level=1))
    assert ("accuracy_level=1 has no effect: no weights have 2 to 4 bits" in report.notes) == is_said


def test_a_head_of_8_bits_rounds_where_accuracy_level_1_spares_the_rest(made):
    checkpoint, folder = made("unilm-v1", weights="4:g32", embed_bits=8, accuracy_level=1)
    nodes = [node for node in onnx.load(folder / MODEL_FILE).graph.node if node.op_type == "MatMulNBits"]
    attributes = [{a.name: a.i for a in node.attribute} for node in nodes]
    assert {(each["bits"], each["accuracy_level"]) for each in attributes} == {(4, 1), (8, 4)}
    assert {node.domain for node in nodes if node.input[1].startswith("model.layers")} == {"com.microsoft"}
    assert nodes[-1].domain == "diffquant"
    assert verify(folder, checkpoint).passed


@pytest.mark.parametrize(
    ("weights", "sizes"),
    [
        ("4:row", {"intermediate_size": 150}),
        # A group is three blocks of 32 columns there, and a row two groups.
        ("4:g96", {"hidden_size": 192, "intermediate_size": 192, "head_dim": 48}),
    ],
    ids=["a padded block", "blocks in a group"],
)
def test_widths_that_no_kernels_block_has_are_computed(tmp_path, weights, sizes):
    source = write_checkpoint(tmp_path / "plain", "diffllama", **sizes)
    folder = export_to(tmp_path / "out", source, weights=weights)
    assert largest_error(verify(folder, source)) < 1e-5


def test_gates_that_a_recipe_names_are_read_from_their_codes(made, tmp_path):
    recipe = diffquant.Recipe.of(weights="4:g32", overrides={"*.lambda_proj": "8:row", "*.output_gate_proj": "8:row"})
    diffquant.quantize(made("gated")[0], tmp_path / "quantized", recipe)
    source = tmp_path / "quantized"
    assert verify(export_to(tmp_path / "out", source), source, threads=1).passed


def test_the_graph_is_built_and_each_matrix_planned_once(made, tmp_path, monkeypatch):
    plans, names, emit, read = [], [], TransformerDecoder.add_all_nodes, plan.open_matrix
    monkeypatch.setattr(TransformerDecoder, "add_all_nodes", lambda decoder: plans.append(decoder) or emit(decoder))
    monkeypatch.setattr(
        plan, "open_matrix", lambda source, name, *rest: names.append(name) or read(source, name, *rest)
    )
    export_to(tmp_path / "out", made("diffllama")[0], weights="4:g32", kv_bits=8, embed_bits=8)
    assert (len(plans), len(names), len(set(names))) == (1, 16, 16)


def test_the_same_checkpoint_gives_the_same_bytes(made, tmp_path):
    options = {"weights": "4:g32", "kv_bits": 8}
    checkpoint, folder = made("unilm-v2", **options)
    again = export_to(tmp_path / "again", checkpoint, **options)
    for name in (MODEL_FILE, DATA_FILE):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_a_matrix_in_many_blocks_of_rows_is_the_same_in_the_file_and_no_block_is_larger_than_said(
    made, tmp_path, monkeypatch
):
    checkpoint, whole = made("unilm-v1")
    put, sizes = streaming.PreallocatedFile.put, []

    def watched(file, data, offset):
        sizes.append(len(data))
        put(file, data, offset)

    widest = SIZES["intermediate_size"]
    monkeypatch.setattr(streaming.PreallocatedFile, "put", watched)
    monkeypatch.setattr("diffquant.checkpoints.row_stream.BLOCK_ELEMENTS", widest)
    blocks = export_to(tmp_path / "blocks", checkpoint)
    assert (blocks / DATA_FILE).read_bytes() == (whole / DATA_FILE).read_bytes()
    assert len(sizes) > 100
    assert max(sizes) <= 4 * widest


def test_tied_weights_are_stored_once(tmp_path):
    source = write_checkpoint(tmp_path / "plain", "unilm-v1", vocab_size=4000)
    for options in ({}, {"embed_bits": 8}):
        folder = export_to(tmp_path / f"out{len(options)}", source, **options)
        names = [t.name for t in onnx.load(folder / MODEL_FILE, load_external_data=False).graph.initializer]
        assert not [name for name in names if "lm_head" in name]
        assert verify(folder, source).passed


def from_container(stored, bits):
    """Codes int [out, in] of a MatMulNBits weight [out, blocks, bytes]."""
    rows = stored.reshape(len(stored), -1).astype(int)
    if bits == 8:
        return rows - 128
    return np.stack([rows & 15, rows >> 4], -1).reshape(len(rows), -1) - 8
