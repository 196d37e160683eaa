"""Gates of the signal map and of the output: against a formula of one query at a time, and against V2."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from diffquant import load
from diffquant.attention import BACKENDS, attend
from diffquant.errors import CheckpointError, UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.spec import DiffSpec
from diffquant.kernels.arguments import call_refusal
from diffquant.model.fused_cache import FusedCache, fused_cache_refusal
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.attention.test_grouped import one_at_a_time
from tests.support.checkpoints import NATIVE, write_checkpoint
from tests.support.decoding import check_pieces
from tests.support.models import random_ids
from tests.support.tables import in_one_test

SPEC = DiffSpec(**NATIVE["gated"]["spec"])


def random_call(noises=4, length=7, keys=11, seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)

    def normal(heads, tokens):
        return torch.randn(2, heads, tokens, 8, generator=generator, dtype=torch.float64)

    def gate():
        return torch.rand(2, 4, length, 1, generator=generator, dtype=torch.float64)

    given = {
        "q": [normal(4, length), normal(noises, length)],
        "k": [normal(2, keys), normal(2, keys)],
        "v": normal(2, keys),
        "lam": gate(),
        "signal_gate": gate(),
        "scale": 0.3,
        "mask": Mask(),
    }
    return given | changes


@pytest.mark.parametrize("noises", [4, 2], ids=["own noise", "shared noise"])
@pytest.mark.parametrize("backend", ["naive", "flashdiff1", "flashdiff2", "auto"])
def test_backends_equal_the_formula(backend, noises):
    given = random_call(noises)
    torch.testing.assert_close(attend(AttentionCall(**given), backend), one_at_a_time(**given), rtol=0, atol=1e-12)


def test_contributings_example_of_a_backend_computes_both_gates():
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(# diffquant/attention/backends/naive_float64\.py\n.*?)```", page, re.DOTALL)
    given = random_call(2)
    try:
        exec(example, {})
        found = attend(AttentionCall(**given), "naive-float64")
    finally:
        BACKENDS.pop("naive-float64", None)
    torch.testing.assert_close(found, one_at_a_time(**given), rtol=0, atol=1e-12)


@in_one_test("scheme", ["4:row", "4:tensor", "5:head:alike"])
def test_a_gate_weighs_the_rounded_map_and_is_in_no_scale(scheme):
    given = random_call(logits=Scheme.parse(scheme))
    halved = attend(
        AttentionCall(**given | {"signal_gate": given["signal_gate"] / 2, "lam": given["lam"] / 2}), "simulated"
    )
    whole = attend(AttentionCall(**given), "naive")
    torch.testing.assert_close(2 * halved, whole, rtol=0, atol=1e-12)


def test_kernels_leave_gates_to_the_other_backends():
    given = random_call()
    call = AttentionCall(**given)
    assert "gate" in call_refusal(call)
    assert "gate" in fused_cache_refusal(Recipe(), SPEC, torch.float16, torch.device("meta"))


def test_a_gate_of_other_queries_is_refused_with_its_shape():
    with pytest.raises(UsageError, match=r"signal_gate \[2, 4, 3, 1\], not one value or \[2, 4, 7, 1\]"):
        attend(AttentionCall(**random_call(signal_gate=torch.ones(2, 4, 3, 1, dtype=torch.float64))))
    one_map = random_call()
    one_map |= {"q": one_map["q"][:1], "k": one_map["k"][:1], "lam": None}
    with pytest.raises(UsageError, match="a signal gate only with two maps"):
        attend(AttentionCall(**one_map))


@in_one_test(
    ("change", "message"),
    [
        ({"post_norm": "plain"}, "post_norm must be 'none'"),
        ({"maps": 1, "shared_k": False, "signals_per_noise": 1}, "lam must be 'none', not 'two-gates'"),
    ],
)
def test_a_spec_that_no_model_has_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        DiffSpec(**NATIVE["gated"]["spec"] | change)


def test_the_model_computes_the_formula_from_its_projections(tmp_path):
    model = load(write_checkpoint(tmp_path / "gated", "gated", torch.float64), dtype=torch.float64)
    attention = model.attention_modules[1]
    x = torch.randn(2, 9, model.config.hidden_size, dtype=torch.float64)
    positions = torch.arange(9)[None]
    rotary = model.model.rotary_emb(x, position_ids=positions)
    q, k, v = attention.project(x, rotary)
    # Gates are float32 sums, whose last digit depends on how many rows a product has: each gate's rows by themselves.
    rows = [attention.lambda_proj.weight[start::2].float() for start in (1, 0)]
    gates = [torch.sigmoid(linear(x.float(), weight)).double().transpose(1, 2)[..., None] for weight in rows]
    pairs = one_at_a_time([q[:, :4], q[:, 4:]], [k, k], v, gates[0], 16**-0.5, None, gates[1])
    gated = pairs.transpose(1, 2).flatten(2) * torch.sigmoid(linear(x, attention.output_gate_proj.weight))
    wanted = linear(gated, attention.o_proj.weight)
    torch.testing.assert_close(attention(x, rotary, Mask(), None), wanted, rtol=0, atol=1e-12)


def test_a_signal_gate_that_is_open_gives_v2(tmp_path):
    """σ(g) = 1 for a large g, and V3's noise gate is V2's λ."""
    spec = NATIVE["gated"]["spec"] | {"signals_per_noise": 1, "output_gate": False}
    v3 = load(write_checkpoint(tmp_path / "v3", "gated", torch.float64, spec=spec), dtype=torch.float64)
    v2 = load(
        write_checkpoint(tmp_path / "v2", "gated", torch.float64, spec=spec | {"lam": "sigmoid"}), dtype=torch.float64
    )
    with torch.no_grad():
        for name, parameter in v2.named_parameters():
            given = v3.get_parameter(name)
            parameter.copy_(given[1::2] if name.endswith("lambda_proj.weight") else given)
        for attention in v3.attention_modules:
            attention.compute_signal_gate = lambda x: torch.ones(())
    ids = random_ids(2, 17)
    torch.testing.assert_close(v3(ids).logits, v2(ids).logits, rtol=0, atol=1e-12)


def test_decoding_with_a_cache_gives_what_prefill_does(tmp_path):
    model = load(write_checkpoint(tmp_path / "gated", "gated", torch.float64), dtype=torch.float64)
    # Gates are computed in float32, whatever the model's type.
    check_pieces(model, random_ids(2, 12), [5] + [1] * 7, 2e-5)


def test_a_fused_cache_that_a_caller_brings_loses_no_gate(tmp_path, monkeypatch):
    attention = load(
        write_checkpoint(tmp_path / "gated", "gated", torch.float64), dtype=torch.float64
    ).attention_modules[0]
    monkeypatch.setattr(FusedCache, "attend", lambda *_, **__: torch.zeros(1, 4, 5, 16, dtype=torch.float64))
    monkeypatch.setattr(FusedCache, "update", lambda _, k, v, __: (k, v))
    x = torch.randn(1, 5, attention.q_proj.in_features, dtype=torch.float64)
    rotary = torch.ones(1, 5, 16, dtype=torch.float64), torch.zeros(1, 5, 16, dtype=torch.float64)
    cache = FusedCache(Recipe(), 2)
    torch.testing.assert_close(attention(x, rotary, Mask(), cache), attention(x, rotary, Mask(), None))
