"""Warp-specialized attention: its own source, run on the host with a thread for each of its parts, against float64."""

import pytest
import torch

from diffquant.attention import LogitMeter
from diffquant.attention.backends import blocks as in_blocks
from diffquant.attention.naive import naive
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments, configs
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill_int8 as today
from diffquant.kernels.attention import prefill_specialized as module
from diffquant.kernels.attention.prefill_simulated import prefill_simulated
from diffquant.kernels.attention.prefill_specialized import TILES
from diffquant.recipe.scheme import Scheme
from tests.support.gluon_machine import Launcher
from tests.support.kernel_inputs import (
    CAUSAL,
    expected,
    normed,
    on_call,
    padding,
    random_call,
    relative_error,
    whole_numbers,
)
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

pytestmark = pytest.mark.usefixtures("rounded_as_a_gpu_does")

prefill_specialized, simulated = on_call(module.prefill_specialized), on_call(prefill_simulated)
LIMITS = {16: 2e-3, 8: 8e-2}
CASES = [("v1", 16), ("v2", 16), ("plain", 8), ("v1", 8), ("v2", 8)]
IDS = [f"{generation}-{bits}-bit" for generation, bits in CASES]
# Buffers are used again and again.
TWO_STAGES = {key: {"stages": 2} for key in TILES}

SEEN = {
    "causal": (300, 300, Mask()),
    "later part": (17, 400, Mask()),
    "more queries than keys": (300, 129, Mask()),
    "one query": (1, 100, Mask()),
    "ragged": (300, 300, padding(300, starts=[7, 0], ends=[300, 57])),
    "left padding": (200, 200, padding(200, starts=[0, 141])),
    "ragged, one empty": (64, 99, padding(99, starts=[3, 20], ends=[90, 20])),
}


@pytest.fixture(autouse=True)
def _on_a_hopper_of_threads(monkeypatch, has_capability):
    """With outputs that hold NaN until a kernel stores them."""
    has_capability(9, 0)
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))
    for name in ("attend_specialized", "attend_fp8_specialized"):
        monkeypatch.setattr(module, name, Launcher(getattr(module, name)))


@pytest.mark.parametrize("name", sampled(SEEN, 4))
@pytest.mark.parametrize(("generation", "bits"), CASES, ids=IDS)
def test_close_to_the_plain_form(generation, bits, name):
    queries, keys, mask = SEEN[name]
    batch = 2 if mask.keys is not None else 1
    inputs = random_call(generation, queries, keys, batch=batch, pairs=2)
    with configs.override_configs(TWO_STAGES):
        out = prefill_specialized(*inputs, scale=0.125, mask=mask, bits=bits)
    assert relative_error(out, expected(*inputs, scale=0.125, mask=mask)) <= LIMITS[bits]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("generation", "bits"), CASES, ids=IDS)
def test_wide_heads_and_the_pair_norm_are_served(generation, bits, dtype):
    inputs = random_call(generation, 130, 257, width=128, pairs=2, dtype=dtype)
    post = PairNorm(1e-5, torch.linspace(0.5, 2, inputs[2].shape[-1]).to(dtype), 0.64)
    out = prefill_specialized(*inputs, scale=128**-0.5, post=post, bits=bits)
    wanted = expected(*inputs, scale=128**-0.5, post=post)
    assert relative_error(out, wanted) <= (LIMITS[bits] if dtype == torch.float16 or bits == 8 else 1e-2)


@pytest.mark.parametrize(("generation", "bits"), CASES, ids=IDS)
def test_pairs_find_their_keys_and_sequences_theirs(generation, bits):
    inputs = random_call(generation, 70, 70, pairs=4, kv_pairs=2, batch=2)
    out = prefill_specialized(*inputs, scale=0.125, bits=bits)
    assert relative_error(out, expected(*inputs, scale=0.125)) <= LIMITS[bits]


def test_maps_that_cancel_keep_what_bfloat16_can_say():
    q, k, v, _ = random_call("v1", 300, 300, dtype=torch.bfloat16)
    # The maps are nearly the same: what remains is two fifths of the noise map.
    inputs = [q[1] + 0.2 * q[0], q[1]], [k[1] + 0.2 * k[0], k[1]], v, torch.tensor(0.8)
    # Weights and output in bfloat16 give 5.2e-3; 6.7e-3 if the noise map waits in bfloat16 too.
    assert relative_error(prefill_specialized(*inputs, scale=0.125), expected(*inputs, scale=0.125)) <= 5.9e-3


@in_one_test("generation", ["v1", "v2"])
def test_eight_bits_give_what_todays_kernel_gives(generation):
    inputs = random_call(generation, 200, 200, pairs=2)
    mask = padding(200, starts=[9], ends=[190])
    with configs.override_configs({"prefill_int8/sm_90/64": {"stages": 2}}):
        wanted = on_call(today.prefill_int8)(*inputs, scale=0.125, mask=mask, pv="fp8")
    out = prefill_specialized(*inputs, scale=0.125, mask=mask, bits=8)
    # The same codes; one rounding of the map that waits, which the other keeps in other units.
    assert relative_error(out, wanted.double()) <= 1e-3


@pytest.mark.parametrize("name", sampled(["ragged", "causal", "more queries than keys", "ragged, one empty"], 4))
@pytest.mark.parametrize(
    ("generation", "text"), [("plain", "8:row"), ("v1", "4:row"), ("v1", "3:row:shift"), ("v2", "6:tensor:shift")]
)
def test_rounded_logits_equal_the_plain_form_at_every_border(generation, text, name):
    queries, keys, mask = SEEN[name]
    inputs = whole_numbers(generation, queries, keys, batch=2 if mask.keys is not None else 1)
    scheme, meters = Scheme.parse(text), (LogitMeter(), LogitMeter())
    shared = {"scale": 0.0625, "mask": mask, "scheme": scheme}
    with configs.override_configs(TWO_STAGES):
        out = simulated(*inputs, **shared, meter=meters[0], specialized=True)
    wanted = naive(AttentionCall(*inputs, scale=0.0625, mask=mask, logits=scheme)).double()
    assert relative_error(out, wanted) <= LIMITS[16]
    on_call(in_blocks.attend_by_blocks)(*inputs, **shared, meter=meters[1])
    assert meters[0].report() == meters[1].report()


def test_wide_rounded_logits_are_normed_as_the_plain_ones():
    inputs = whole_numbers("v1", 130, 200, width=128)
    post = PairNorm(1e-5, torch.linspace(0.5, 2, 256).half(), 0.64)
    scheme = Scheme.parse("8:row")
    out = simulated(*inputs, scale=2**-5, post=post, scheme=scheme, specialized=True)
    wanted = naive(AttentionCall(*inputs, scale=2**-5, mask=CAUSAL, logits=scheme)).double()
    assert relative_error(out, normed(wanted, post)) <= LIMITS[16]


def test_what_the_kernels_do_not_take_is_said(has_capability):
    plain = random_call("plain", 5, 5)
    with pytest.raises(UsageError, match="supports two maps; for one use scaled_dot_product_attention"):
        prefill_specialized(*plain, scale=0.125)
    with pytest.raises(UsageError, match="a positive scale, got -1"):
        prefill_specialized(*plain, scale=-1.0)
    has_capability(8, 0)
    with pytest.raises(UsageError, match="run only on Hopper"):
        prefill_specialized(*random_call("v1", 5, 5), scale=0.125)
    with pytest.raises(UsageError, match=r"simulated logits: .* run only on Hopper"):
        simulated(*random_call("v1", 5, 5), scale=0.125, scheme=Scheme.parse("8:row"), specialized=True)
