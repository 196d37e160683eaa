"""8-bit attention, interpreted, against the plain form in float64."""

import pytest
import torch

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments, configs
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill_int8 as module
from diffquant.kernels.attention.prefill_int8 import TILES
from tests.support.kernel_inputs import expected, on_call, padding, random_call, relative_error
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

pytestmark = pytest.mark.usefixtures("rounded_as_a_gpu_does")

prefill_int8 = on_call(module.prefill_int8)
LIMITS = {"fp16": 2e-2, "fp8": 8e-2}
SMALL = {key: {"queries": 64, "keys": 32} for key in TILES}

SEEN = {
    "causal": (100, 100, Mask()),
    "later part": (17, 129, Mask()),
    "more queries than keys": (64, 17, Mask()),
    "one query": (1, 100, Mask()),
    "ragged": (64, 100, padding(100, starts=[7, 0], ends=[100, 57])),
    "ragged, one empty": (17, 64, padding(64, starts=[3, 20], ends=[50, 20])),
}


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch, has_capability):
    """With outputs that hold NaN until a kernel stores them."""
    has_capability(9, 0)
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


@pytest.fixture(params=["sm_89", "sm_90"])
def _either_path(request, _on_hopper, has_capability):
    has_capability(*divmod(int(request.param[3:]), 10))


@pytest.mark.usefixtures("_either_path")
@pytest.mark.parametrize("name", sampled(SEEN, 3))
@pytest.mark.parametrize(("generation", "pv"), [("v1", "fp8"), ("v2", "fp16")])
def test_close_to_the_plain_form(generation, pv, name):
    queries, keys, mask = SEEN[name]
    batch = 2 if mask.keys is not None else 1
    inputs = random_call(generation, queries, keys, batch=batch, pairs=2)
    with configs.override_configs(SMALL):
        out = prefill_int8(*inputs, scale=0.125, mask=mask, pv=pv)
    assert relative_error(out, expected(*inputs, scale=0.125, mask=mask)) <= LIMITS[pv]


@pytest.mark.parametrize("pv", LIMITS)
@pytest.mark.parametrize(("generation", "width"), sampled([("plain", 64), ("v1", 64), ("v1", 128), ("v2", 128)], 2))
def test_shipped_tiles_serve_every_width(generation, width, pv):
    inputs = random_call(generation, 65, 130, width=width, pairs=2)
    out = prefill_int8(*inputs, scale=width**-0.5, pv=pv)
    assert relative_error(out, expected(*inputs, scale=width**-0.5)) <= LIMITS[pv]


def test_a_constant_offset_of_keys_costs_nothing():
    q, k, v, lam = random_call("v1", 64, 64)
    offset = 20 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    k = [(x + offset).half() for x in k]
    out = prefill_int8(q, k, v, lam, scale=0.125)
    assert relative_error(out, expected(q, k, v, lam, scale=0.125)) <= LIMITS["fp16"]


def test_left_padding_changes_no_code():
    q, k, v, lam = random_call("v1", 60, 60)
    alone = prefill_int8([x[:, :, 9:] for x in q], [x[:, :, 9:] for x in k], v[:, :, 9:], lam, scale=0.125)
    padded = prefill_int8(q, k, v, lam, scale=0.125, mask=padding(60, starts=[9]))
    torch.testing.assert_close(padded[:, :, 9:], alone, rtol=0, atol=1e-3)


@in_one_test("generation", ["v1", "v2"])
def test_the_pair_norm_is_part_of_the_kernel_and_pairs_find_their_keys(generation):
    inputs = random_call(generation, 33, 33, pairs=4, kv_pairs=2)
    post = PairNorm(1e-5, torch.linspace(0.5, 2, inputs[2].shape[-1]).half(), 0.64)
    out = prefill_int8(*inputs, scale=0.125, post=post)
    assert relative_error(out, expected(*inputs, scale=0.125, post=post)) <= LIMITS["fp16"]


@in_one_test("pv", LIMITS)
def test_extreme_inputs_stay_finite(pv):
    q, k, v, lam = random_call("v1", 33, 33)
    huge = [x * 200 for x in q], [x * 200 for x in k], v * 1000, lam
    assert prefill_int8(*huge, scale=8, pv=pv).isfinite().all()
    nothing = [x * 0 for x in q], [x * 0 for x in k], v * 0, lam
    assert not prefill_int8(*nothing, scale=8, pv=pv).any()


def test_what_a_device_or_the_kernel_cannot_do_is_said(has_capability):
    inputs = random_call("v1", 5, 5)
    with pytest.raises(UsageError, match="P·V in 'int4' is unknown; choose from fp16, fp8"):
        prefill_int8(*inputs, scale=0.125, pv="int4")
    has_capability(8, 0)
    with pytest.raises(UsageError, match="fp8 needs compute capability 8"):
        prefill_int8(*inputs, scale=0.125, pv="fp8")
