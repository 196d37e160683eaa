"""What every prefill kernel owes, interpreted: padding, strides, empty calls, its operator, and what it refuses."""

from functools import partial

import pytest
import torch

from diffquant.attention import BACKENDS
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.kernels import arguments
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill_specialized as specialized
from diffquant.kernels.attention.prefill import prefill
from diffquant.kernels.attention.prefill_int8 import prefill_int8
from diffquant.kernels.attention.prefill_simulated import prefill_simulated
from diffquant.recipe.scheme import Scheme
from tests.support.gluon_machine import Launcher
from tests.support.kernel_inputs import (
    CAUSAL,
    expected,
    fill_unseen,
    kept_operators,
    on_call,
    operator_arguments,
    padding,
    random_call,
    relative_error,
    with_odd_strides,
)
from tests.support.tables import in_one_test

pytestmark = pytest.mark.usefixtures("rounded_as_a_gpu_does")

# A kernel and its options, how far it may be from float64, generations and cards.
KERNELS = {
    "prefill": (on_call(prefill), 2e-3, ["v1", "v2"], [(8, 0), (9, 0)]),
    "int8": (partial(on_call(prefill_int8), pv="fp16"), 2e-2, ["v1"], [(8, 9), (9, 0)]),
    "fp8": (partial(on_call(prefill_int8), pv="fp8"), 8e-2, ["v1"], [(8, 9), (9, 0)]),
    "specialized": (partial(on_call(specialized.prefill_specialized), bits=16), 2e-3, ["v1", "v2"], [(9, 0)]),
    "specialized 8": (partial(on_call(specialized.prefill_specialized), bits=8), 8e-2, ["plain", "v1"], [(9, 0)]),
}
CASES = [
    (name, generation, card) for name, (*_, made, cards) in KERNELS.items() for generation in made for card in cards
]


@pytest.fixture(autouse=True)
def _outputs_are_nan_until_they_are_stored(monkeypatch):
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))
    for name in ("attend_specialized", "attend_fp8_specialized"):
        monkeypatch.setattr(specialized, name, Launcher(getattr(specialized, name)))


@pytest.mark.parametrize(("name", "generation", "card"), CASES, ids=str)
def test_what_padding_holds_does_not_matter(name, generation, card, has_capability):
    has_capability(*card)
    kernel, limit, *_ = KERNELS[name]
    length, end = (140, 133) if name.startswith("specialized") else (64, 50)
    q, k, v, lam = random_call(generation, length, length)
    mask = padding(length, starts=[9], ends=[end])
    wanted = expected(q, k, v, lam, scale=0.125, mask=mask)
    fill_unseen(q, k, v, 9, end)
    assert relative_error(kernel(q, k, v, lam, scale=0.125, mask=mask), wanted) <= limit


@in_one_test("name", KERNELS)
def test_any_strides_serve(name, has_capability):
    kernel, limit, _, cards = KERNELS[name]
    q, k, v, lam = random_call("v1", 33, 33)
    wanted = expected(q, k, v, lam, scale=0.125)
    for card in cards:
        has_capability(*card)
        assert relative_error(kernel(*with_odd_strides(q, k, v), lam, scale=0.125), wanted) <= limit


@in_one_test("name", KERNELS)
def test_nothing_in_gives_nothing_out(name, has_capability):
    has_capability(9, 0)
    kernel, *_ = KERNELS[name]
    assert kernel(*random_call("v1", 0, 5), scale=0.125).shape == (1, 2, 0, 128)
    assert not kernel(*random_call("v1", 3, 0), scale=0.125).any()


OPERATORS = [("prefill", (), ["v1", "v2"]), ("prefill_specialized", (16,), ["v1", "v2"])]
OPERATORS += [
    (name, options, ["plain", "v1", "v2"])
    for name, options in (
        ("prefill_specialized", (8,)),
        ("prefill_int8", ("fp8",)),
        ("simulated_logits", (4, "pair", True, "e4m3:row:fullsum", "8:row", False)),
    )
]


@in_one_test(("name", "options", "generations"), OPERATORS)
def test_the_operator_is_well_formed(name, options, generations, has_capability):
    has_capability(9, 0)
    operator = getattr(torch.ops.diffquant, name).default
    for generation in generations:
        given = (*operator_arguments(generation), *options)
        torch.library.opcheck(operator, given, test_utils=["test_schema", "test_faketensor"])


@in_one_test("name", ["prefill", "prefill_int8"])
def test_a_compiled_model_keeps_the_operator(name, has_capability):
    has_capability(9, 0)
    kernel = KERNELS["prefill" if name == "prefill" else "int8"][0]
    operators = kept_operators(lambda *inputs: kernel(*inputs, scale=0.125) * 2, random_call("v2", 17, 17))
    assert operators.count(getattr(torch.ops.diffquant, name).default) == 1


SIMULATED = {"simulated": partial(on_call(prefill_simulated), scheme=Scheme.parse("4:row"))}


@in_one_test("name", [*KERNELS, *SIMULATED])
def test_what_no_kernel_takes_is_an_error(name, has_capability):
    has_capability(9, 0)
    kernel = (SIMULATED | {name: made for name, (made, *_) in KERNELS.items()})[name]
    q, k, v, lam = random_call("v1", 5, 5)
    with pytest.raises(UsageError, match="are float32"):
        kernel([x.float() for x in q], [x.float() for x in k], v.float(), lam, scale=0.125)
    with pytest.raises(UsageError, match="one map without λ or two maps with it"):
        kernel(q, k, v, None, scale=0.125)
    with torch.enable_grad(), pytest.raises(UsageError, match="no backward pass"):
        kernel(q, k, v.requires_grad_(), lam, scale=0.125)


@in_one_test("name", ["triton", "triton-int8", "triton-specialized", "triton-simulated"])
def test_the_dispatcher_hears_why_not(name):
    logits = {"logits": Scheme.parse("4:row")} if name == "triton-simulated" else {}
    call = AttentionCall(*random_call("v1", 5, 5), scale=0.125, mask=CAUSAL, **logits)
    assert BACKENDS[name].refuses(call) == "Triton kernels run on CUDA devices, not on cpu"
