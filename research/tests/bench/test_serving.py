"""The bench of served models: what engines without a server make of requests, and what is aimed at."""

import pytest

from research.bench.programs import serving
from research.bench.programs.batches import BatchSettings
from tests.support.thorough import sampled

SETTINGS = BatchSettings("float32", 1, requests=(1, 3), prompt=9, new=4, repeats=2)
SMALL = {"num_hidden_layers": 1, "intermediate_size": 96}


@pytest.mark.parametrize("model", sampled(["DIFF V1", "DIFF V2", serving.TRANSFORMER], 3))
def test_every_engine_continues_the_same_prompts_by_the_same_tokens(tmp_path, model):
    """In float32; ONNX Runtime's kernel for 4 bits rounds activations."""
    folders = {key: folder for key, folder in serving.write_models(tmp_path, **SMALL).items() if key[0] == model}
    measured = [row for row in serving.measure_batches(folders, SETTINGS) if "values" in row]
    assert {row["engine"] for row in measured} >= set(serving.ENGINES) - {serving.SERVED}
    assert all(row["equal"] == 1 for row in measured if (row["engine"], row["bits"]) != (serving.ONNX, "4"))
    assert all(len(row["values"]) == SETTINGS.repeats for row in measured)


def test_an_engine_that_is_not_there_is_a_reason(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no such engine. Nor any other")

    monkeypatch.setitem(serving.ENGINES, serving.SERVED, refuse)
    folders = serving.write_models(tmp_path, ("16",), **SMALL)
    found = serving.measure_batches(folders, SETTINGS, [serving.SERVED, serving.ONNX])
    cells = serving.cells(found, SETTINGS)
    missing = {cell.missing for cell in cells if serving.SERVED in cell.path}
    assert missing == {"RuntimeError: no such engine"}
    assert all(cell.values for cell in cells if serving.ONNX in cell.path)


def test_caches_of_the_models_are_of_one_size_and_query_heads_as_many(tmp_path):
    from diffquant.model.adapters import adapter_for
    from diffquant.quantization.modeling_diffquant import PlainHeads

    sizes = set()
    for config in serving.MODELS.values():
        spec = adapter_for(config).architecture.diff_spec
        heads = PlainHeads(spec.to_dict() | {"kv_repeats": 1})
        sizes.add((spec.layout.query_heads, heads.kv_pairs * heads.cuts * heads.width))
    assert sizes == {(8, 256)}


def test_aims_are_medians_of_ratios_turn_by_turn():
    def row(model, engine, requests, *values):
        return {"model": model, "bits": "4", "engine": engine, "requests": requests, "values": list(values)}

    found = serving.aims(
        [
            row("DIFF V2", serving.SERVED, 1, 10, 10, 10),
            row("DIFF V2", serving.SERVED, 32, 20, 40, 60),
            row("DIFF V2", serving.GENERATE, 32, 10, 10, 60),
            row(serving.TRANSFORMER, serving.SERVED, 32, 40, 40, 40),
        ]
    )
    assert [(aim["what"], aim["measured"], aim["met"]) for aim in found] == [
        ("DIFF V2, 4 bits, 32 requests: served / diffquant generate", 2, True),
        ("DIFF V2, 4 bits: served, 32 requests / 1", 4, True),
        ("4 bits, 32 requests: served, DIFF V2 / Transformer", 1, True),
    ]
