"""The prefill kernels, interpreted, against the plain form in float64."""

from itertools import product

import pytest
import torch

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments, configs
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill as module
from tests.support.kernel_inputs import expected, on_call, padding, random_call, relative_error
from tests.support.thorough import sampled

prefill = on_call(module.prefill)
LIMIT = 2e-3
SMALL = {key: {"queries": 32, "keys": 32} for key in configs.PREFILL}

SEEN = {
    "causal": (129, 129, Mask()),
    "later part": (64, 129, Mask()),
    "more queries than keys": (64, 17, Mask()),
    "one query": (1, 100, Mask()),
    "left padding": (100, 100, padding(100, starts=[0, 41])),
    "ragged": (100, 129, padding(129, starts=[7, 0], ends=[129, 77])),
    "ragged, one empty": (17, 64, padding(64, starts=[3, 20], ends=[50, 20])),
}


@pytest.fixture(params=["sm_80", "sm_90"], autouse=True)
def device_class(request, monkeypatch, has_capability):
    """Both code paths, and outputs that hold NaN until a kernel stores them."""
    has_capability(int(request.param[3]), 0)
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))
    return request.param


@pytest.mark.parametrize(("name", "generation"), sampled(product(SEEN, ["v1", "v2"]), 3))
def test_equals_the_plain_form(generation, name):
    queries, keys, mask = SEEN[name]
    inputs = random_call(generation, queries, keys, batch=2, pairs=2)
    with configs.override_configs(SMALL):
        out = prefill(*inputs, scale=0.3, mask=mask)
    assert relative_error(out, expected(*inputs, scale=0.3, mask=mask)) <= LIMIT


@pytest.mark.parametrize(("generation", "width", "wide"), sampled(product(["v1", "v2"], [64, 128], [False, True]), 3))
def test_shipped_tiles_serve_every_width(generation, width, wide):
    q, k, _, lam = random_call(generation, 129, 129, width=width, pairs=4, kv_pairs=2)
    v = torch.randn(1, 2, 129, width * 2 if wide else width, generator=torch.Generator().manual_seed(1)).half()
    out = prefill(q, k, v, lam, scale=width**-0.5)
    assert relative_error(out, expected(q, k, v, lam, scale=width**-0.5)) <= LIMIT


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_pair_norm_is_part_of_the_kernel(generation, weighted):
    inputs = random_call(generation, 17, 33)
    mask = padding(33, ends=[30])
    width = inputs[2].shape[-1]
    post = PairNorm(1e-5, torch.linspace(0.5, 2, width).half() if weighted else None, 0.64)
    out = prefill(*inputs, scale=0.125, mask=mask, post=post)
    assert relative_error(out, expected(*inputs, scale=0.125, mask=mask, post=post)) <= LIMIT


@pytest.mark.parametrize("own", [0, 1], ids=["signal", "noise"])
def test_nan_in_either_map_shows(own):
    q, k, v, lam = random_call("v1", 40, 40)
    k[own][:, :, 7] = torch.nan
    out = prefill(q, k, v, lam, scale=0.125)
    assert out[:, :, :7].isfinite().all()
    assert out[:, :, 7:].isnan().all()


def test_lam_may_be_one_value_a_head():
    q, k, v, _ = random_call("v1", 17, 17, pairs=2)
    lam = torch.tensor([0.2, 0.9], dtype=torch.float64)[:, None, None]
    out = prefill(q, k, v, lam, scale=0.125)
    assert relative_error(out, expected(q, k, v, lam, scale=0.125)) <= LIMIT


def test_logits_of_any_size_stay_finite():
    q, k, v, lam = random_call("v1", 33, 33)
    inputs = [x * 200 for x in q], k, v, lam
    out = prefill(*inputs, scale=8)
    assert relative_error(out, expected(*inputs, scale=8)) <= LIMIT


def test_one_map_alone_is_refused():
    q, k, v, _ = random_call("v1", 5, 5)
    with pytest.raises(UsageError, match="supports two maps"):
        prefill(q[:1], k[:1], v, None, scale=0.125)


def test_a_scale_must_be_positive():
    with pytest.raises(UsageError, match="positive scale, got -1"):
        prefill(*random_call("v1", 5, 5), scale=-1)
