"""Caches, logits and operands at float formats: what is read back, what it takes, and that K and V need not agree."""

import ml_dtypes
import numpy
import pytest
import torch

import diffquant
from diffquant.attention import LogitMeter, attend
from diffquant.attention.operands import round_operands
from diffquant.data import pocket_models
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.measure import can_pad_left, can_share_prefixes
from diffquant.measure.sweep.subject import cached_bytes_per_token
from diffquant.model.cache import PackedStates
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.support.tables import in_one_test

CACHED = [
    # Scheme, and bytes of a token's [2, 64] states.
    ("e4m3:token", 2 * (64 + 2)),
    ("e5m2:token", 2 * (64 + 2)),
    ("e4m3:g16", 2 * (64 + 8)),
    ("mxfp8", 2 * (64 + 2)),
    ("mxfp6", 2 * (48 + 2)),
    ("mxfp4", 2 * (32 + 2)),
    ("nvfp4", 2 * (32 + 4)),
    ("nvfp4_4over6", 2 * (32 + 4)),
]


def nvfp4(x):
    """Values of NVFP4 without a tensor scale, by ml_dtypes, in float64 [..., n]."""
    blocks = x.reshape(*x.shape[:-1], -1, 16).astype("float64")
    scale = (numpy.abs(blocks).max(-1, keepdims=True) / 6).clip(max=448).astype(ml_dtypes.float8_e4m3fn)
    scale = numpy.where(scale.astype("float64") == 0, 0.125, scale.astype("float64"))
    levels = (blocks / scale).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype("float64")
    return (levels * scale).reshape(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("text", "nbytes"), CACHED)
def test_a_cache_reads_back_what_the_format_rounds_to_and_stores_its_bytes(text, nbytes, dtype):
    scheme = Scheme.parse(text, target="k")
    states = torch.randn(2, 2, 9, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored = PackedStates(scheme, 2)
    for chunk in states.split([3, 1, 5], 2):
        stored.append(chunk)
    read = stored.read()
    assert read.dtype == dtype
    assert torch.equal(read[:, :, 7:], states[:, :, 7:])
    if scheme.granularity == "group":
        view = states.unflatten(-1, (-1, scheme.granularity_size))
        scale = scheme.format.compute_scale(view, -1, dtype)
        expected = scheme.format.decode(scheme.format.encode(view, scale), scale).to(dtype).flatten(-2)
        assert torch.equal(read[:, :, :7], expected[:, :, :7])
    if dtype == torch.float32 and text == "nvfp4":
        assert torch.allclose(read[:, :, :7].double(), torch.from_numpy(nvfp4(states.numpy()))[:, :, :7], atol=0)
    assert cached_bytes_per_token(scheme, 2, 64) == nbytes
    stored.crop(4)
    stored.forget_oldest(1)
    assert torch.equal(stored.read(), read[:, :, 1:5])


def prose(kind):
    (model,) = (folder for folder in pocket_models("prose") if folder.name.endswith(kind))
    return model


@in_one_test("kind", ["v1", "v2"])
def test_keys_in_fp8_and_values_in_nvfp4_serve_one_cache(kind):
    ids = torch.arange(5, 45)[None]
    plain = diffquant.load(prose(kind), dtype="float32")
    model = diffquant.load(prose(kind), {"k": "e4m3:token", "v": "nvfp4"}, dtype="float32")
    whole = model(ids).logits
    cache = model.new_cache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split([17, 1, 1, 21], 1)]
    # What is nearly between two levels may go to either, as sums come out.
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=3e-3)
    error = (whole - plain(ids).logits).abs().max()
    assert 1e-3 < error < 3
    layer = cache.layers[0]
    assert layer.stored_keys.words.shape[-1] == 2 * layer.stored_values.words.shape[-1] * (
        layer.stored_keys.recent.shape[-1] / layer.stored_values.recent.shape[-1]
    )


def test_groups_that_do_not_divide_a_head_are_refused_when_the_model_is_loaded(tmp_path):
    from tests.support import tiny_lm

    folder = tiny_lm.write_llama(tmp_path / "llama")
    with pytest.raises(UsageError, match="v at nvfp4: groups of 16 channels do not divide layer 0's heads of 8"):
        diffquant.load(folder, {"v": "nvfp4"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", ["mxfp4_up", "mxfp6_up", "mxfp8_up"])
def test_an_exponent_is_not_raised_out_of_the_dtype_that_is_read_back(text, dtype):
    states = torch.full((1, 1, 1, 32), torch.finfo(dtype).max, dtype=dtype)
    read = []
    for name in (text, text.removesuffix("_up")):
        held = PackedStates(Scheme.parse(name), 0)
        held.append(states)
        read.append(held.read())
    assert torch.equal(*read)
    assert torch.isfinite(read[0]).all()


def call_with(**changes):
    """Attention of two maps over 37 keys, 11 queries and two KV pairs."""
    generator = torch.Generator().manual_seed(0)
    q1, q2, k1, k2, v = (
        torch.randn(2, heads, n, 24, generator=generator) for heads, n in ((4, 11), (4, 11), (2, 37), (2, 37), (2, 37))
    )
    return AttentionCall((q1, q2), (k1, k2), v, torch.tensor(0.4), scale=0.5, mask=Mask(), **changes)


@in_one_test("text", ["mxfp8", "nvfp4", "4:g8", "mxfp4_up"])
def test_logits_in_groups_round_what_each_query_sees_of_neighbouring_keys(text):
    call = call_with(logits=Scheme.parse(text, target="logits"))
    expected = attend(call, "naive")
    torch.testing.assert_close(attend(call, "simulated"), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(attend(call_with(), "naive"), expected, atol=1e-5)


def test_logits_beyond_the_last_level_of_their_block_count_as_clipped():
    meter = LogitMeter()
    call = call_with(logits=Scheme.parse("mxfp4", target="logits"), meter=meter)
    attend(call)
    clipped = 0
    for q, k in zip(call.q, call.k, strict=True):
        logits = (0.5 * q @ k.repeat_interleave(2, 1).mT).tril(37 - 11).abs().double().numpy()
        for first in range(0, 37, 32):
            block = logits[..., first : first + 32]
            # OCP's scale of E2M1, whose last levels are 4 and 6: from 7 scales on, 8 would be nearer.
            scale = 2.0 ** (numpy.floor(numpy.log2(block.max(-1, keepdims=True).clip(1e-30))) - 2)
            clipped += int((block > 7 * scale).sum())
    assert meter.report()["clipped"] == clipped > 0


@in_one_test("text", ["mxfp8", "nvfp4", "4:g8", "e4m3:tensor"])
def test_operands_in_groups_are_rounded_along_the_channels_that_are_summed(text):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, n, 24, generator=generator) for n in (5, 7))
    scheme = Scheme.parse(text, target="qk")
    rounded, _ = round_operands(q, k, Mask(), scheme)
    if scheme.granularity == "group":
        for first in range(0, 24, scheme.granularity_size):
            group = q[..., first : first + scheme.granularity_size]
            scale = scheme.format.compute_scale(group, -1)
            expected = scheme.format.decode(scheme.format.encode(group, scale), scale)
            assert torch.equal(rounded[..., first : first + scheme.granularity_size], expected)
    else:
        scale = q.abs().amax() / 448
        assert torch.allclose(rounded, (q / scale).to(torch.float8_e4m3fn).float() * scale, atol=0)


def test_what_groups_of_logits_allow():
    assert can_share_prefixes(Recipe.of(logits="mxfp8"))
    assert not can_pad_left(Recipe.of(logits="mxfp8"))
    assert can_pad_left(Recipe.of(qk="nvfp4"))
    with pytest.raises(UsageError, match="nvfp4_4over6 chooses scales by rounding error"):
        Recipe.of(logits="nvfp4_4over6")
