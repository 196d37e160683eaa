"""The prefill kernels, interpreted, against the plain form in float64."""

from itertools import product

import pytest
import torch

from diffquant.attention import BACKENDS
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments, configs
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill as module
from tests.support.kernel_inputs import (
    CAUSAL,
    expected,
    on_call,
    operator_arguments,
    padding,
    random_call,
    relative_error,
)
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


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_what_padding_holds_does_not_matter(generation):
    q, k, v, lam = random_call(generation, 64, 64)
    mask = padding(64, starts=[9], ends=[50])
    wanted = expected(q, k, v, lam, scale=0.125, mask=mask)
    for x in {id(x): x for x in (*q, *k, v)}.values():
        x[:, :, :9] = torch.nan
        x[:, :, 50:] = torch.inf
    assert relative_error(prefill(q, k, v, lam, scale=0.125, mask=mask), wanted) <= LIMIT


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_any_strides_serve(generation):
    q, k, v, lam = random_call(generation, 33, 33)
    wanted = expected(q, k, v, lam, scale=0.125)
    q[1] = q[1].contiguous()  # unlike q[0]
    k[0] = columns_apart(k[0])
    k[1] = k[0] if generation == "v2" else k[1]
    # Rows at odd addresses, which no descriptor can read.
    v = torch.cat([v.new_zeros(*v.shape[:-1], 1), v], -1)[..., 1:]
    assert relative_error(prefill(q, k, v, lam, scale=0.125), wanted) <= LIMIT


def columns_apart(x):
    return x.repeat_interleave(2, -1)[..., ::2]


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


def test_nothing_in_gives_nothing_out():
    q, k, v, lam = random_call("v1", 0, 5)
    assert prefill(q, k, v, lam, scale=0.125).shape == (1, 2, 0, 128)
    q, k, v, lam = random_call("v1", 3, 0)
    assert not prefill(q, k, v, lam, scale=0.125).any()


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_operator_is_well_formed(generation):
    arguments = operator_arguments(generation)
    checks = ["test_schema", "test_faketensor"]
    torch.library.opcheck(torch.ops.diffquant.prefill.default, arguments, test_utils=checks)


def test_a_compiled_model_keeps_the_operator(device_class):
    if device_class == "sm_90":
        pytest.skip("compiling does not depend on the device")
    inputs = random_call("v2", 17, 17)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    def model(q, k, v, lam):
        return prefill(q, k, v, lam, scale=0.125) * 2

    out = torch.compile(model, backend=keep, fullgraph=True)(*inputs)
    assert [node.target for node in graphs[0].graph.nodes].count(torch.ops.diffquant.prefill.default) == 1
    assert torch.equal(out, model(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, lam: (q[:1], k[:1], v, None), "supports two maps"),
        (lambda q, k, v, lam: ([x.float() for x in q], [x.float() for x in k], v.float(), lam), "are float32"),
        (lambda q, k, v, lam: ([x[..., :32] for x in q], [x[..., :32] for x in k], v, lam), "are 32 wide"),
        (
            lambda q, k, v, lam: (q, k, v[..., :96], lam),
            "v is 96 wide; with keys 64 wide the kernel supports 64 and 128",
        ),
        (lambda q, k, v, lam: (q, [k[0], k[1][:, :, 1:]], v, lam), "k2 .*4, 64.*, not"),
    ],
)
def test_what_the_kernels_do_not_take_is_an_error(change, message):
    with pytest.raises(UsageError, match=message):
        prefill(*change(*random_call("v1", 5, 5)), scale=0.125)


def test_a_scale_must_be_positive():
    with pytest.raises(UsageError, match="positive scale, got -1"):
        prefill(*random_call("v1", 5, 5), scale=-1)


def test_gradients_are_refused_not_dropped():
    q, k, v, lam = random_call("v1", 5, 5)
    with torch.enable_grad(), pytest.raises(UsageError, match="no backward pass"):
        prefill(q, k, v.requires_grad_(), lam, scale=0.125)


def test_the_dispatcher_hears_why_not():
    assert (
        BACKENDS["triton"].refuses(AttentionCall(*random_call("v1", 5, 5), scale=0.125, mask=CAUSAL))
        == "Triton kernels run on CUDA devices, not on cpu"
    )
