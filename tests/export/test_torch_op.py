"""torch.ops.diffquant.differential_attention: the op's meaning in torch, and its way through torch.onnx.export."""

import numpy as np
import onnxruntime as ort
import pytest
import torch

import diffquant
from diffquant.errors import UsageError
from diffquant.export.graph.body import add_body
from diffquant.export.graph.translation import TRANSLATIONS
from diffquant.scheme import Scheme
from tests.support.attention_cases import Case, empty_past, expected, feed, one_node, random_inputs
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids

CASES = {
    "v1": Case(),
    "v1-window": Case(window=5, rope=""),
    "v2": Case(generation=2),
    "v2-half": Case(generation=2, pairs=6, kv_pairs=2, rope="half"),
    "v1-logits": Case(logits=Scheme(4, "pair")),
}


def arguments(case, call, dtype=torch.float32):
    """The operator's arguments of one call of the node."""
    tensor = lambda n: torch.from_numpy(call[n]).to(dtype) if n in call else None  # noqa: E731
    tensors = [tensor(n) for n in ("query", "key", "value", "lambda", "past_key", "past_value")]
    tables = [tensor("cos_cache"), tensor("sin_cache")]
    a = case.attributes
    numbers = [a.num_pairs, a.num_kv_pairs, a.generation, a.scale, a.rotary_interleaved, a.local_window_size]
    rest = [a.logit_bits, a.logit_granularity, a.logit_shift]
    return [*tensors, torch.from_numpy(call["seqlens_k"]), *tables, *numbers, *rest]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prefill_chunks_and_decode_equal_naive(case):
    inputs = random_inputs(case, batch=2, length=15)
    past = empty_past(case, 2)
    for tokens in (slice(0, 8), slice(8, 13), slice(13, 14), slice(14, 15)):
        found = torch.ops.diffquant.differential_attention(*arguments(case, feed(inputs, tokens, past), torch.float64))
        past = [x.numpy() for x in found[1:]]
        np.testing.assert_allclose(found[0].numpy(), expected(case, inputs, tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [CASES["v1"], CASES["v2-half"]], ids=["v1", "v2"])
def test_a_ragged_batch_equals_the_node(case):
    lengths, width = [9, 4, 6], 9
    inputs = random_inputs(case, batch=3, length=width + 1)
    run = ort.InferenceSession(one_node(case, "pure").SerializeToString()).run
    call = feed(inputs, slice(0, width), empty_past(case, 3), lengths)
    ours = torch.ops.diffquant.differential_attention(*arguments(case, call))
    theirs = run(None, call)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(ours[0][row, :length], theirs[0][row, :length], rtol=0, atol=1e-5)
    token = {n: v[:, -1:] if n in ("query", "key", "value") or v.ndim == 3 else v for n, v in inputs.items()}
    last = feed(token, slice(0, 1), theirs[1:], [length + 1 for length in lengths])
    last["total_sequence_length"] = np.array(width + 1, "i4")
    ours = torch.ops.diffquant.differential_attention(*arguments(case, last))
    np.testing.assert_allclose(ours[0], run(None, last)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_opcheck_is_clean(case):
    inputs = random_inputs(case, batch=2, length=9)
    past = tuple(np.random.default_rng(1).standard_normal(p.shape, dtype="f4") for p in empty_past(case, 2, 5))
    call = feed(inputs, slice(5, 9), past)
    torch.library.opcheck(torch.ops.diffquant.differential_attention.default, arguments(case, call))


@pytest.mark.parametrize("source", ["diffllama", "unilm-v2"])
def test_a_model_traced_by_torch_holds_one_node_a_layer(tmp_path, source):
    model = diffquant.load(write_checkpoint(tmp_path / "source", source))
    for attention in model.attentions:
        attention.backend = "op"
    ids = random_ids(2, 12)
    shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
    program = torch.onnx.export(
        _Logits(model).eval(),
        (ids,),
        dynamo=True,
        opset_version=23,
        input_names=["input_ids"],
        dynamic_shapes=shapes,
        custom_translation_table=TRANSLATIONS,
        verbose=False,
    )
    proto = program.model_proto
    nodes = [node for node in proto.graph.node if node.op_type == "DifferentialAttention"]
    assert len(nodes) == 2
    add_body(proto, "contrib")
    session = ort.InferenceSession(proto.SerializeToString())
    other = random_ids(3, 7, seed=1)
    (logits,) = session.run(None, {"input_ids": other.numpy()})
    np.testing.assert_allclose(logits, model(other).logits.numpy(), rtol=0, atol=1e-4)


def test_a_compiled_model_calls_one_operator_a_layer(tmp_path):
    model = diffquant.load(write_checkpoint(tmp_path / "source", "diffllama"))
    ids = random_ids(1, 8)
    wanted = model(ids).logits
    for attention in model.attentions:
        attention.backend = "op"
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(_Logits(model).eval(), backend=keep, fullgraph=True)
    torch.testing.assert_close(compiled(ids), wanted, rtol=0, atol=1e-5)
    calls = [node for graph in graphs for node in graph.graph.nodes if "differential_attention" in str(node.target)]
    assert len(calls) == 2


def test_the_backend_refuses_what_the_op_does_not_mean(tmp_path):
    model = diffquant.load(write_checkpoint(tmp_path / "source", "llama"))
    model.attentions[0].backend = "op"
    with pytest.raises(UsageError, match="two maps"):
        model(random_ids(1, 8))


class _Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, input_ids):
        return self.inner(input_ids).logits
