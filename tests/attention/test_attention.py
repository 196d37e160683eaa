"""Every backend against the equations in float64."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.attention import LogitMeter, attend
from diffquant.attention.backends import simulated
from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm, pair_norm
from diffquant.scheme import Scheme
from tests.support.fake_quantizer import fake_quantize

GENERATIONS = ["plain", "v1", "v2"]
SHAPES = [(17, 29), (29, 29), (1, 29), (1, 1), (13, 5)]
GRANULARITIES = ["tensor", "head", "pair", "row", "b8", "tensor:shift", "head:shift", "row:shift", "b8:shift"]
ALIKE = ["tensor:alike", "head:alike", "row:alike"]


def random_inputs(generation, length, keys, dtype=torch.float64, batch=2, pairs=6, groups=2, width=8):
    torch.manual_seed(0)
    maps = 1 if generation == "plain" else 2
    q = [torch.randn(batch, pairs, length, width, dtype=dtype) for _ in range(maps)]
    k = [torch.randn(batch, groups, keys, width, dtype=dtype) for _ in range(maps)]
    if generation == "v2":
        k = [k[0], k[0]]
    v = torch.randn(batch, groups, keys, width * (2 if generation == "v1" else 1), dtype=dtype)
    lam = {"plain": None, "v1": torch.tensor(0.37), "v2": torch.rand(batch, pairs, length, 1)}[generation]
    return q, k, v, lam


def left_padding(batch, keys):
    valid = torch.ones(batch, keys, dtype=torch.bool)
    valid[1, : keys // 3] = False
    return valid


def equation_1(q, k, v, lam, scale, valid, quantize=lambda logits, seen: logits):
    """The paper's equation, one sequence, pair and query at a time. `quantize` sees a sequence's [maps, h, T, S]."""
    batch, pairs, length, _ = q[0].shape
    keys, per_group = v.shape[2], pairs // v.shape[1]
    distance = torch.arange(length)[:, None] + keys - length - torch.arange(keys)[None]
    seen = distance >= 0
    out = torch.zeros(batch, pairs, length, v.shape[-1], dtype=v.dtype)
    for b in range(batch):
        visible = seen & valid[b]
        logits = torch.stack(
            [qm[b] @ km[b].repeat_interleave(per_group, 0).mT * scale for qm, km in zip(q, k, strict=True)]
        )
        logits = quantize(logits, visible)
        for p in range(pairs):
            for t in range(length):
                at = visible[t]
                if not at.any():
                    continue
                maps = [each[p, t, at].softmax(-1) for each in logits]
                weights = maps[0] if lam is None else maps[0] - lam.expand(batch, pairs, length, 1)[b, p, t] * maps[1]
                out[b, p, t] = weights @ v[b, p // per_group, at]
    return out


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize(("length", "keys"), SHAPES)
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("backend", ["naive", "flashdiff1", "flashdiff2", "auto"])
def test_backends_equal_the_equation(backend, generation, length, keys, padded):
    q, k, v, lam = random_inputs(generation, length, keys)
    valid = left_padding(2, keys) if padded else torch.ones(2, keys, dtype=torch.bool)
    out = attend(q, k, v, lam, scale=0.3, mask=Mask(keys=valid if padded else None), backend=backend)
    torch.testing.assert_close(out, equation_1(q, k, v, lam, 0.3, valid), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("valid", "ranges"),
    [
        ([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], ([2, 0], [5, 5])),
        ([[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]], ([1, 0], [3, 4])),
        ([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], ([0, 0], [0, 5])),
        ([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]], None),
    ],
    ids=["left", "both sides", "nothing", "hole"],
)
def test_padding_is_a_range_where_it_has_no_holes(valid, ranges):
    found = Mask(keys=torch.tensor(valid, dtype=torch.bool)).ranges
    assert (found and tuple(each.tolist() for each in found)) == ranges


@pytest.mark.parametrize("weight", [None, torch.rand(16)], ids=["plain", "affine"])
def test_the_pair_norm_is_transformers_rms_norm(weight):
    y = torch.randn(2, 3, 5, 16).half()
    oracle = LlamaRMSNorm(16, 1e-5).half()
    if weight is not None:
        oracle.weight.data = weight.half()
    expected = oracle(y) * 0.7
    assert torch.equal(pair_norm(y, PairNorm(1e-5, None if weight is None else weight.half(), 0.7)), expected)


@pytest.mark.parametrize("backend", ["naive", "flashdiff2"])
def test_any_strides_serve(backend):
    q, k, v, lam = random_inputs("v1", 13, 13)
    expected = attend(q, k, v, lam, scale=0.3, mask=Mask(), backend=backend)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*q, *k, v)]
    out = attend(turned[:2], turned[2:4], turned[4], lam, scale=0.3, mask=Mask(), backend=backend)
    torch.testing.assert_close(out, expected)


def quantized_by(granularity, bits):
    """An oracle for symmetric granularities without shift, on compacted visible entries."""

    def quantize(logits, seen):
        out = logits.clone()
        maps, pairs, length, _ = logits.shape
        regions = {
            "tensor": [(slice(None), slice(None), slice(None))],
            "head": [(m, p, slice(None)) for m in range(maps) for p in range(pairs)],
            "pair": [(slice(None), p, slice(None)) for p in range(pairs)],
            "row": [(m, p, t) for m in range(maps) for p in range(pairs) for t in range(length)],
        }[granularity]
        for region in regions:
            visible = seen.expand_as(logits)[region]
            entries = out[region][visible]
            if len(entries):
                block = out[region]
                block[visible] = fake_quantize(entries[None, None], bits, "tensor")[0, 0]
                out[region] = block
        return out

    return quantize


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("granularity", ["tensor", "head", "pair", "row"])
def test_quantized_logits_equal_fake_quantized_visible_entries(granularity, generation, padded):
    q, k, v, lam = random_inputs(generation, 11, 17)
    valid = left_padding(2, 17) if padded else torch.ones(2, 17, dtype=torch.bool)
    expected = equation_1(q, k, v, lam, 0.3, valid, quantized_by(granularity, 4))
    mask = Mask(keys=valid if padded else None)
    out = attend(q, k, v, lam, scale=0.3, mask=mask, logits=Scheme.parse(f"4:{granularity}"))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
def test_alike_rounds_the_mean_of_both_maps_and_half_their_difference(granularity, generation):
    def quantize(logits, seen):
        mean, half = logits.mean(0, keepdim=True), (logits[1:] - logits[:1]) / 2
        mean, half = (quantized_by(granularity, 4)(each, seen) for each in (mean, half))
        return torch.cat([mean - half, mean + half])

    q, k, v, lam = random_inputs(generation, 11, 17)
    valid = left_padding(2, 17)
    expected = equation_1(q, k, v, lam, 0.3, valid, quantize)
    scheme = Scheme.parse(f"4:{granularity}:alike")
    out = attend(q, k, v, lam, scale=0.3, mask=Mask(keys=valid), logits=scheme)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["naive", "auto"])
def test_alike_means_nothing_to_a_plain_transformer(backend):
    q, k, v, lam = random_inputs("plain", 9, 9)
    alike, without = (
        attend(q, k, v, lam, scale=0.3, mask=Mask(), logits=Scheme.parse(text), backend=backend)
        for text in ("4:tensor:alike", "4:tensor")
    )
    assert torch.equal(alike, without)


def test_equal_maps_rounded_alike_stay_equal():
    q, k, v, _ = random_inputs("v2", 9, 9)
    meter = LogitMeter()
    scheme = Scheme.parse("3:row:alike")
    out = attend([q[0], q[0]], k, v, torch.tensor(1.0), scale=0.3, mask=Mask(), logits=scheme, meter=meter)
    assert out.abs().max() == 0
    assert meter.entries == 2 * 2 * 6 * 45


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("granularity", GRANULARITIES + ALIKE)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_blocks_of_queries_equal_full_maps(generation, granularity, bits, monkeypatch):
    monkeypatch.setattr(simulated, "_BLOCK_ENTRIES", 2000)
    q, k, v, lam = random_inputs(generation, 37, 45)
    scheme, mask = Scheme.parse(f"{bits}:{granularity}"), Mask(keys=left_padding(2, 45))
    meters = LogitMeter(), LogitMeter()
    blocked = attend(q, k, v, lam, scale=0.3, mask=mask, logits=scheme, meter=meters[0])
    full = attend(q, k, v, lam, scale=0.3, mask=mask, logits=scheme, meter=meters[1], backend="naive")
    torch.testing.assert_close(blocked, full, rtol=0, atol=1e-12)
    (counted, in_full) = (meter.report() for meter in meters)
    assert (counted["entries"], counted["clipped"]) == (in_full["entries"], in_full["clipped"])
    assert in_full["calls"] == 1


@pytest.mark.parametrize("granularity", ["tensor", "row", "pair", "row:shift"])
def test_padding_and_batching_do_not_change_a_sequence(granularity):
    q, k, v, lam = random_inputs("v1", 12, 12)
    scheme = Scheme.parse(f"4:{granularity}")
    together = attend(q, k, v, lam, scale=0.3, mask=Mask(keys=left_padding(2, 12)), logits=scheme)
    alone = attend(
        [x[1:, :, 4:] for x in q], [x[1:, :, 4:] for x in k], v[1:, :, 4:], lam, scale=0.3, mask=Mask(), logits=scheme
    )
    torch.testing.assert_close(together[1:, :, 4:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("granularity", ["tensor", "head", "pair", "row"])
def test_queries_that_are_padding_enter_no_scale(granularity):
    q, k, v, lam = random_inputs("v2", 12, 12)
    scheme, valid = Scheme.parse(f"4:{granularity}"), torch.ones(2, 12, dtype=torch.bool)
    valid[0, 7:] = False
    q = [x.clone() for x in q]
    for x in q:
        x[0, :, 7:] *= 100
    meter = LogitMeter()
    padded = attend(q, k, v, lam, scale=0.3, mask=Mask(keys=valid), logits=scheme, meter=meter)
    first = [[x[:1, :, :7] for x in xs] for xs in (q, k)]
    alone = attend(*first, v[:1, :, :7], lam[:1, :, :7], scale=0.3, mask=Mask(), logits=scheme)
    torch.testing.assert_close(padded[:1, :, :7], alone, rtol=0, atol=1e-12)
    assert meter.entries == 2 * 6 * (7 * 8 // 2 + 12 * 13 // 2)


def test_shift_keeps_more_of_a_one_sided_row_than_plain_absmax():
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 64, 16), torch.randn(1, 4, 64, 16)
    q[..., 0] = k[..., 0] = 6.0
    v = torch.randn(1, 4, 64, 16)
    exact = attend([q], [k], v, None, scale=0.25, mask=Mask())
    error = {
        text: (attend([q], [k], v, None, scale=0.25, mask=Mask(), logits=Scheme.parse(text)) - exact).norm()
        for text in ("4:row", "4:row:shift")
    }
    assert error["4:row:shift"] < error["4:row"] / 2


def test_the_meter_counts_visible_entries_steps_and_clipping():
    q, k, v, lam = random_inputs("v1", 5, 5)
    meter = LogitMeter()
    attend(q, k, v, lam, scale=0.3, mask=Mask(), logits=Scheme.parse("4:row"), meter=meter)
    assert meter.entries == 2 * 6 * 15 * 2
    assert meter.clipped == 0
    assert 0 < meter.report()["step_mean"] <= meter.scale_max
    attend([x * 40 for x in q], k, v, lam, scale=0.3, mask=Mask(), logits=Scheme.parse("4:row:shift"), meter=meter)
    assert meter.calls == 2
    assert meter.clipped > 0
    assert meter.scale_max <= 12 / 15


def test_metering_never_waits_for_a_device():
    # A fake tensor has no values: fetching one raises.
    with FakeTensorMode() as mode:
        q, k, v, lam = (mode.from_tensor(torch.randn(2, 2, 9, 8)) for _ in range(4))
        meter = LogitMeter()
        for _ in range(2):
            scheme = Scheme.parse("4:row:shift")
            attend([q, q], [k, k], v, lam[..., :1], scale=0.3, mask=Mask(), logits=scheme, meter=meter)
    assert meter.calls == 2
    with pytest.raises(DataDependentOutputException):
        meter.report()


def test_memory_of_simulated_logits_is_linear_in_the_keys(monkeypatch):
    largest = []
    original = simulated.prepare_logits
    monkeypatch.setattr(simulated, "prepare_logits", lambda x, *rest: largest.append(x.numel()) or original(x, *rest))
    monkeypatch.setattr(simulated, "_BLOCK_ENTRIES", 1 << 14)
    q, k, v, lam = random_inputs("v1", 512, 512, batch=1, dtype=torch.float32)
    attend(q, k, v, lam, scale=0.3, mask=Mask(), logits=Scheme.parse("4:row"))
    assert max(largest) <= 1 << 14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, lam: (q, k, v, None), "one map without λ or two with it"),
        (lambda q, k, v, lam: (q[:1], k, v, lam), "one map without λ or two with it"),
        (lambda q, k, v, lam: (q, k, v.float(), lam), "v is float32; use one"),
        (lambda q, k, v, lam: (q, [k[0], k[1][:, :, 1:]], v, lam), r"k2 \[2, 2, 6, 8\], not \[2, 2, 7, 8\]"),
        (lambda q, k, v, lam: ([x[:, :5] for x in q], k, v, lam), "2 KV pairs do not divide 5 query pairs"),
    ],
)
def test_arguments_that_disagree_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        attend(*change(*random_inputs("v1", 7, 7)), scale=0.3, mask=Mask())


def test_a_backend_that_cannot_serve_says_why():
    inputs = random_inputs("v1", 7, 7)
    with pytest.raises(UsageError, match="flash-attn runs on CUDA only"):
        attend(*inputs, scale=0.3, mask=Mask(), backend="flash_attn")
    with pytest.raises(UsageError, match="unknown attention backend 'fast'"):
        attend(*inputs, scale=0.3, mask=Mask(), backend="fast")
    with pytest.raises(UsageError, match=r"'triton': Triton kernels run on CUDA devices, not on cpu; use auto"):
        attend(*inputs, scale=0.3, mask=Mask(), backend="triton")
    with pytest.raises(UsageError, match="cannot quantize them"):
        attend(*inputs, scale=0.3, mask=Mask(), logits=Scheme.parse("4:row"), backend="flashdiff1")
