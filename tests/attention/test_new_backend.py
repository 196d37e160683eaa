"""A backend of one file: registered here, nothing else of diffquant changed, then chosen by name and by rank."""

import pytest
import torch

from diffquant import verbs
from diffquant.attention import BACKENDS, attend, check_backend, registry
from diffquant.attention.naive import naive
from diffquant.attention.registry import Backend, register
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.verbs.cli.options import list_options

CALLS = []


def compute(call):
    CALLS.append(call)
    return naive(call)


@pytest.fixture
def toy():
    """Registers a backend; what it computed stands in CALLS."""
    CALLS.clear()

    def registered(**options):
        register(Backend("toy", compute, **options))

    yield registered
    BACKENDS.pop("toy", None)


def inputs(length=5):
    torch.manual_seed(0)
    q, k = ([torch.randn(1, heads, length, 8) for _ in range(2)] for heads in (4, 2))
    return q, k, torch.randn(1, 2, length, 16), torch.tensor(0.4)


def result(backend="auto", length=5, logits=FULL):
    return attend(AttentionCall(*inputs(length), scale=0.3, mask=Mask(), logits=logits), backend)


def test_it_is_found_by_name_and_given_the_call_whole(toy):
    toy()
    gated = AttentionCall(*inputs(), scale=0.3, mask=Mask(window=3), signal_gate=torch.tensor(0.7))
    assert torch.equal(attend(gated, "toy"), attend(gated, "naive"))
    assert [gated] == CALLS
    with pytest.raises(UsageError, match=r"choose from auto, .*, toy, triton"):
        check_backend("tyo")


def test_a_backend_that_was_replaced_names_what_computes_the_same():
    with pytest.raises(UsageError, match="'triton-pipelined' was replaced by 'triton-specialized'"):
        check_backend("triton-pipelined")
    check_backend("triton-specialized")


def test_the_highest_rank_that_serves_a_call_computes_it(toy):
    few = "it takes 3 queries at most"
    toy(priority=99, logits="both", refuses=lambda call: few if call.query_count > 3 else None)
    for logits in (FULL, Scheme.parse("4:row")):
        result(length=3, logits=logits)
        assert CALLS.pop().logits == logits
        result(length=4, logits=logits)
        assert not CALLS
    with pytest.raises(UsageError, match=f"'toy': {few}; use auto"):
        result("toy", length=4)


def test_without_a_rank_or_where_it_does_not_pay_nobody_asks(toy):
    toy()
    result()
    assert not CALLS
    del BACKENDS["toy"]
    toy(priority=99, is_worthwhile=lambda call: call.query_count > 9)
    result()
    assert not CALLS


def test_it_is_not_asked_for_logits_it_does_not_compute(toy):
    toy(priority=99, logits="quantized")
    result()
    assert not CALLS
    result(logits=Scheme.parse("4:row"))
    assert len(CALLS) == 1
    with pytest.raises(UsageError, match="'toy' computes only quantized attention; use auto or naive"):
        result("toy")


def test_a_name_is_given_once(toy):
    toy()
    with pytest.raises(UsageError, match="'toy' exists already"):
        toy()


def test_where_nobody_serves_a_call_each_says_why(monkeypatch):
    monkeypatch.setattr(
        registry, "find_auto_backends", lambda logits: [Backend("toy", compute, lambda call: "it is a toy")]
    )
    with pytest.raises(UsageError, match="no attention backend supports this call: toy: it is a toy"):
        registry.backend_for(AttentionCall(*inputs(), scale=0.3, mask=Mask()))


def test_the_command_lines_help_names_backends_that_are_there():
    (option,) = (option for option in list_options(verbs.sweep) if option.name == "attention")
    _, named = option.help.removesuffix(", ...").split(": ")
    assert set(named.split(", ")) <= {"auto", *BACKENDS}
