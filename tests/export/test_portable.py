"""Portable folders: what other readers look for is where they look, and `verify` proves them all the same."""

import json
from pathlib import Path

import onnx
import onnxruntime_genai as og
import pytest

import diffquant.data
from diffquant.errors import OutputExistsError, UsageError
from diffquant.onnx import ExportOptions, Generator, export, verify
from diffquant.onnx.files import PORTABLE
from diffquant.onnx.runtime.session import OnnxModel
from tests.support.thorough import sampled

POCKET = Path(diffquant.data.__file__).parent / "pocket"


ALL = {"weights": "4:g32", "kv_bits": 8, "embed_bits": 8}


SOURCES = [("diffllama", ALL), ("motif-grouped", {"dtype": "float16"}), ("gated", {"logits": "6:tensor"})]
SOURCES += [("llama", {}), ("unilm-v2-half", ALL)]


@pytest.mark.parametrize(("source", "options"), sampled(SOURCES, 3))
def test_verify_finds_no_fault(made, source, options):
    checkpoint, folder = made(source, portable=True, **options)
    assert verify(folder, checkpoint, threads=1).passed


def test_the_graph_has_no_functions_and_the_names_that_readers_know(made):
    _, folder = made("motif-grouped", portable=True, **ALL)
    model = onnx.load(folder / PORTABLE.model, load_external_data=False)
    onnx.checker.check_model(str(folder / PORTABLE.model))
    assert not model.functions
    assert {each.domain: each.version for each in model.opset_import} == {"": 18, "com.microsoft": 1}
    assert {value.type.tensor_type.shape.dim[0].dim_param for value in (*model.graph.input, *model.graph.output)} == {
        "batch_size"
    }
    external = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    assert external == {"model.onnx_data"}
    config = json.loads((folder / "config.json").read_text())
    cache = OnnxModel(folder, 1).cache
    assert (config["model_type"], config["num_key_value_heads"], config["head_dim"]) == (
        "llama",
        cache.kv_pairs,
        cache.width,
    )


def test_scales_of_a_quantized_embedding_are_an_initializer(made):
    _, folder = made("diffllama", portable=True, **ALL)
    graph = onnx.load(folder / PORTABLE.model, load_external_data=False).graph
    (lookup,) = (node for node in graph.node if node.op_type == "GatherBlockQuantized")
    tensors = {each.name: each for each in graph.initializer}
    scales = tensors[lookup.input[2]]
    assert scales.external_data == tensors[scales.name.removesuffix("_blocks")].external_data


def test_onnxruntime_genai_and_diffquant_open_it(tmp_path):
    export(POCKET / "needle-diff-v1", tmp_path / "out", ExportOptions(portable=True))
    ids = [5, 9, 2, 7]
    wanted = list(Generator(tmp_path / "out").generate_tokens(ids, 4))
    model = og.Model(str(tmp_path / "out"))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(ids) + 4)
    generator = og.Generator(model, parameters)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    assert list(generator.get_sequence(0))[len(ids) :][: len(wanted)] == wanted


def test_a_portable_folder_is_overwritten_and_what_somebody_put_into_it_is_not(tmp_path):
    source, out = POCKET / "needle-diff-v1", tmp_path / "out"
    export(source, out, ExportOptions(portable=True))
    export(source, out, ExportOptions(portable=True, cache=False), overwrite=True)
    assert OnnxModel(out, 1).cache is None
    (out / "onnx" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"holds onnx/notes\.txt, which diffquant did not write"):
        export(source, out, overwrite=True)
    (out / "onnx" / "notes.txt").unlink()
    export(source, out, overwrite=True)
    assert not (out / "onnx").exists()


def test_a_page_is_refused():
    with pytest.raises(UsageError, match="leave out portable"):
        ExportOptions(web=True, portable=True)
