"""The JavaScript of examples/web under Node, on WebAssembly: against ONNX Runtime, Python's tokenizers and torch."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from diffquant.attention.naive import naive
from diffquant.data import books_text
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.model.adapters import adapter_for
from diffquant.onnx import Generator
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.recipe.scheme import FULL, Scheme
from tests.support.attention_weights import attention_weights
from tests.web.browser import needs_node, node

pytestmark = needs_node
POCKET = ["prose-diff-v1", "prose-diff-v2"]
TEXTS = [
    "The old man opened the door of the house, and",
    "  two  spaces,\ttabs\nand lines\n\n",
    "It's 1,234.56 — naïve café, “quoted”; Ünïcödé ß Straße",
    "日本語 и кириллица 🙂👩‍👩‍👧 e\u0301",
    "don't  I'LL we've</s> <s>under_score#hash C++ [x]{y}",
]
# Each next token leads by 0.1 at least: runtimes round what goes into an 8-bit head in their own ways.
DECIDED = "of the sun. We sprang to our feet, straining our"
IDS = [0, 31, 7, 42, 19, 63, 5, 88, 42, 19, 3, 71, 50, 50, 2, 11, 29]


@pytest.mark.parametrize("source", POCKET)
def test_greedy_tokens_are_those_of_onnx_runtime_in_python(folders, source):
    folder = folders(source)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(DECIDED).ids
    wanted = list(Generator(folder, model=OnnxModel(folder, threads=1, native=False)).generate_tokens(ids, 24))
    assert node("run_model.mjs", {"folder": str(folder), "ids": ids, "count": 24})["tokens"] == wanted


def test_tokens_and_text_are_those_of_the_tokenizer_in_python(folders):
    folder = folders("prose-diff-v2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prose = books_text()
    texts = TEXTS + [prose[start : start + 300] for start in range(0, 60000, 1000)]
    answer = node("run_model.mjs", {"folder": str(folder), "ids": [0], "texts": texts})
    assert answer["encoded"] == [tokenizer.encode(text).ids for text in texts]
    assert answer["decoded"] == [tokenizer.decode(ids) for ids in answer["encoded"]]


@pytest.mark.parametrize("source", [*POCKET, "motif-grouped", "gated"])
def test_maps_are_those_of_torch_and_of_the_attention_map(folders, source):
    """Every row in float64, to 1e-9, and the last one by what `attention-map` uses in float32, to 1e-5."""
    folder = folders(source)
    config = json.loads((folder / "config.json").read_text())
    spec = adapter_for(config).architecture.diff_spec
    asked = [
        {"layer": 1, "pair": spec.pairs - 1, "bits": bits, "granularity": granularity}
        for bits, granularity in [(16, "row"), (8, "row"), (4, "row"), (8, "tensor"), (6, "tensor"), (4, "tensor")]
    ]
    answer = node("run_model.mjs", {"folder": str(folder), "ids": IDS, "maps": asked})
    q, k, lam, gate = heads_of(answer["layers"][1], spec)
    for request, maps in zip(asked, answer["maps"], strict=True):
        scheme = FULL if request["bits"] == 16 else Scheme.parse(f"{request['bits']}:{request['granularity']}")
        drawn = {name: np.reshape(maps[name], (17, 17)) for name in ("signal", "noise", "difference")}
        for name, factors in {"signal": (gate, 0), "noise": (0, -1), "difference": (gate, lam)}.items():
            wanted = weights(q, k, spec, scheme, *factors)[0, request["pair"]]
            np.testing.assert_allclose(drawn[name], wanted, rtol=0, atol=1e-9, err_msg=f"{request} {name}")
        _, last = attention_weights(call_of(q.float(), k.float(), spec, scheme, lam, gate), 16)
        last[0] *= gate.expand(1, spec.pairs, 17, 1)[..., -1:, :]
        for row, name in zip(last[:, 0, request["pair"], 0], ("signal", "noise"), strict=True):
            np.testing.assert_allclose(drawn[name][-1], row, rtol=0, atol=1e-5, err_msg=f"{request} {name}")


@pytest.mark.parametrize("source", [*POCKET, "motif-grouped", "gated"])
def test_queries_keys_and_lambda_are_those_of_onnx_runtime_in_python(folders, source):
    folder = folders(source)
    model = OnnxModel(folder, threads=1, native=False)
    asked = [{"layer": 0, "pair": 0, "bits": 16, "granularity": "row"}]
    layers = node("run_model.mjs", {"folder": str(folder), "ids": IDS, "maps": asked})["layers"]
    names = {"query": "maps.{}.query", "key": "present.{}.key", "lambda": "maps.{}.lambda"}
    outputs = tuple(name.format(layer) for layer in range(len(layers)) for name in names.values())
    ids = np.array([IDS])
    values, _ = model.run(ids, np.ones_like(ids), model.allocate_cache(1), outputs)
    for name, wanted in zip(outputs, values, strict=True):
        part, layer = name.split(".")[2], int(name.split(".")[1])
        np.testing.assert_allclose(layers[layer][part], wanted.ravel(), rtol=0, atol=2e-5 * np.abs(wanted).max())


def heads_of(layer, spec):
    """Queries and keys in canonical order, λ and the gate, float64, of one layer's reading."""
    rows = torch.tensor(layer["query"], dtype=torch.float64).view(1, -1, spec.query_heads, spec.head_dim)
    by_noise = rows.transpose(1, 2).unflatten(1, (-1, spec.signals_per_noise + 1))
    q = torch.cat([by_noise[:, :, :-1].flatten(1, 2), by_noise[:, :, -1]], 1)
    keys = torch.tensor(layer["key"], dtype=torch.float64).view(1, spec.kv_pairs, rows.shape[1], -1)
    k = keys if spec.shared_k else torch.cat(keys.chunk(2, -1), 1)
    lam, gate = (by_query(layer[name], spec) for name in ("lambda", "signalGate"))
    return q, k, lam, gate


def by_query(values, spec):
    """λ or the gate, [1] or [1, h, T, 1], where a missing gate is 1."""
    factors = torch.tensor([1.0] if values is None else values, dtype=torch.float64)
    return factors if factors.numel() == 1 else factors.view(1, -1, spec.pairs, 1).transpose(1, 2)


def weights(q, k, spec, scheme, gate, lam):
    """gate · map 1 - lam · map 2 of every pair, [1, h, T, T]: what attention gives for values that are unit vectors."""
    gate, lam = (torch.as_tensor(factor, dtype=torch.float64) for factor in (gate, lam))
    return naive(call_of(q, k, spec, scheme, lam, gate)).numpy()


def call_of(q, k, spec, scheme, lam, gate):
    """Attention whose values are unit vectors."""
    length = q.shape[2]
    units = torch.eye(length, dtype=q.dtype).expand(1, spec.kv_pairs, length, length)
    maps = spec.layout.split_query_maps(q), spec.layout.split_key_maps(k)
    return AttentionCall(*maps, units, lam, scale=spec.scale, mask=Mask(), logits=scheme, signal_gate=gate)
