"""Exported folders on a CUDA device, as far as it shows without one: what is asked for, refused, and falls back."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from diffquant.errors import MissingDependencyError, UsageError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.run import evaluate, run_sweep
from diffquant.onnx import ExportOptions, export
from diffquant.onnx.graph.op import DOMAIN
from diffquant.onnx.runtime.device import RuntimeDevice, count_cpu_nodes, describe_cpu_nodes
from diffquant.onnx.runtime.session import InPlaceDecoder, OnnxModel
from diffquant.onnx.targets import runtime_of
from diffquant.onnx.verifier import verify
from tests.support.exports import cache_ranges
from tests.support.tables import in_one_test

CUDA = "CUDAExecutionProvider"

has_cuda_provider = pytest.mark.skipif(CUDA in ort.get_available_providers(), reason="this onnxruntime runs on CUDA")


@pytest.fixture
def folder(made):
    return made("diffllama")[1]


def test_a_cuda_device_is_asked_first_and_keeps_float32():
    device = RuntimeDevice.parse("cuda:1")
    (first, options), *others = device.providers
    assert (first, options["device_id"], options["use_tf32"]) == (CUDA, "1", "0")
    assert others == ["CPUExecutionProvider"]
    assert RuntimeDevice.parse("cuda") == RuntimeDevice("cuda", 0)
    assert RuntimeDevice.parse("cpu").providers == ["CPUExecutionProvider"]


@has_cuda_provider
def test_a_runtime_without_cuda_is_refused_before_the_model_is_read(made, tmp_path):
    checkpoint, folder = made("diffllama")
    for call in (lambda: OnnxModel(tmp_path, device="cuda"), lambda: verify(folder, checkpoint, device="cuda")):
        with pytest.raises(MissingDependencyError, match=rf"has no {CUDA}: .*\[onnx-gpu\]'"):
            call()


def small_session(options):
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("MatMul", ["d", "b"], ["e"]),
    ]
    a, b, e = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 3]) for name in "abe")
    graph = helper.make_graph(nodes, "small", [a, b], [e])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_a_session_that_goes_on_without_its_device_is_refused():
    with pytest.raises(MissingDependencyError, match=rf"could not start its {CUDA}: it needs an NVIDIA driver"):
        RuntimeDevice("cuda").check_session(small_session(ort.SessionOptions()))
    RuntimeDevice("cpu").check_session(small_session(ort.SessionOptions()))


def test_what_falls_to_the_processor_is_counted_by_operator():
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    RuntimeDevice("cuda").record_node_providers(options)
    assert count_cpu_nodes(small_session(options)) == {"MatMul": 2, "Relu": 1}
    assert describe_cpu_nodes({"Relu": 1, "MatMul": 2}) == "3 nodes run on the CPU: MatMul 2, Relu 1"


class RecordingBinding:
    """Inputs and outputs bound to a device that is not here, and made on the processor in its place."""

    def __init__(self, binding, bound):
        self._binding, self._bound = binding, bound

    def __getattr__(self, name):
        return getattr(self._binding, name)

    def bind_output(self, name, device_type="cpu", device_id=0):
        self._bound.append((name, device_type, device_id))
        self._binding.bind_output(name)


@pytest.fixture
def elsewhere(folder, monkeypatch):
    """A model on a second card, as far as it tells ONNX Runtime; values made there, and outputs bound there."""
    model, made, bound = OnnxModel(folder, 1), [], []
    make, io_binding = ort.OrtValue.ortvalue_from_numpy, model.session.io_binding

    def ortvalue_from_numpy(array, device_type="cpu", device_id=0):
        made.append((tuple(array.shape), device_type, device_id))
        return make(array)

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", staticmethod(ortvalue_from_numpy))
    monkeypatch.setattr(model.session, "io_binding", lambda: RecordingBinding(io_binding(), bound))
    monkeypatch.setattr(model, "device", RuntimeDevice("cuda", 1))
    return model, made, bound


def test_a_decoder_makes_its_caches_once_on_the_card_and_logits_in_memory(elsewhere):
    model, made, _ = elsewhere
    state = InPlaceDecoder(model, 2, 12)
    rows = (2, model.cache.kv_pairs, 12, model.cache.width)
    assert made == [(rows, "cuda", 1)] * len(model.cache.inputs)
    made.clear()
    for _ in range(3):
        state.step(np.full((2, 1), 5))
    assert made == [((2, 1, model.vocabulary), "cpu", 0)] * 3


def test_caches_that_grow_stay_on_the_card_from_call_to_call(elsewhere):
    model, made, bound = elsewhere
    ids = np.arange(3, 8)[None]
    (logits,), past = model.run(ids, np.ones_like(ids), model.allocate_cache(1))
    made.clear()
    model.run(ids[:, :1], np.ones((1, 6), np.int64), past)
    assert not made
    assert bound == 2 * [("logits", "cpu", 0), *((name, "cuda", 1) for name in model.cache.outputs)]
    assert logits.shape == (1, 1, model.vocabulary)


@in_one_test(
    ("options", "wanted"),
    [
        ({}, [r"takes only float16 activations; export with dtype='float16'"]),
        ({"dtype": "float16"}, []),
        ({"dtype": "float16", "kv_bits": 4}, [r"has no cache of 4 bits; export with kv=8 or kv=16"]),
        ({"logits": "8:row"}, []),
    ],
)
def test_a_folder_for_cuda_says_what_is_left_to_the_processor(made, tmp_path, options, wanted):
    parsed, checkpoint = ExportOptions.parse(genai_device="cuda:1", **options), made("diffllama")[0]
    report = export(checkpoint, tmp_path / "out", parsed, ranges=cache_ranges(checkpoint, parsed))
    told = [note for note in report.notes if "runs on the CPU" in note]
    assert told == [f"attention runs on the CPU: on CUDA, ONNX Runtime's {each}" for each in wanted]
    domains = {(node.domain, node.op_type) for node in onnx.load(tmp_path / "out/model.onnx").graph.node}
    assert not any(op == "MatMulNBits" and domain == DOMAIN for domain, op in domains)


def test_eval_and_sweep_ask_the_runtime_for_their_device(folder, tmp_path):
    # A device that torch has and ONNX Runtime has not.
    options = SweepOptions(tasks=("perplexity",), device="meta")
    for call in (
        lambda: evaluate(folder, None, options, runtime_of=runtime_of),
        lambda: run_sweep([folder], options, tmp_path / "out", runtime_of=runtime_of),
    ):
        with pytest.raises(UsageError, match="exported models run on auto, cpu, cuda or cuda:N, not on 'meta'"):
            call()
