"""Every backend against the equations in float64."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.attention import BACKENDS, LogitMeter, attend
from diffquant.attention.backends import blocks, composed
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm, pair_norm
from diffquant.recipe.scheme import Scheme
from tests.support.tables import in_one_test

GENERATIONS = ["plain", "v1", "v2"]
SHAPES = [(17, 29), (29, 29), (1, 29), (1, 1), (2, 2), (13, 5)]
PLAIN = ["tensor", "map", "head", "pair", "row", "b8"]
GRANULARITIES = [*PLAIN, "tensor:shift", "map:shift", "head:shift", "row:shift", "b8:shift"]
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
    out = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(keys=valid if padded else None)), backend)
    torch.testing.assert_close(out, equation_1(q, k, v, lam, 0.3, valid), rtol=0, atol=1e-6)


@in_one_test(
    ("valid", "ranges"),
    [
        ([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], ([2, 0], [5, 5])),
        ([[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]], ([1, 0], [3, 4])),
        ([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], ([0, 0], [0, 5])),
        ([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]], None),
    ],
)
def test_padding_is_a_range_where_it_has_no_holes(valid, ranges):
    found = Mask(keys=torch.tensor(valid, dtype=torch.bool)).valid_ranges
    assert (found and tuple(each.tolist() for each in found)) == ranges


@in_one_test("weight", [None, torch.rand(16)])
def test_the_pair_norm_is_transformers_rms_norm(weight):
    y = torch.randn(2, 3, 5, 16).half()
    oracle = LlamaRMSNorm(16, 1e-5).half()
    if weight is not None:
        oracle.weight.data = weight.half()
    expected = oracle(y) * 0.7
    assert torch.equal(pair_norm(y, PairNorm(1e-5, None if weight is None else weight.half(), 0.7)), expected)


@pytest.mark.parametrize("text", ["16", "4:row"])
@pytest.mark.parametrize("shape", [(13, 1), (6, 13, 1), (1, 6, 1, 1), (2, 1, 13, 1)])
def test_weights_of_queries_may_lack_axes(shape, text, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_ENTRIES", 2 * 6 * 2 * 13 * 5)
    q, k, v, _ = random_inputs("v1", 13, 13)
    scheme, lam, gate = Scheme.parse(text), torch.rand(shape), torch.rand(shape)
    call = AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(), logits=scheme, signal_gate=gate)
    backend = "simulated" if scheme.quantizes else "blocks"
    torch.testing.assert_close(attend(call, backend), attend(call, "naive"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("text", ["16", "4:row", "4:tensor:shift", "4:b8"])
@pytest.mark.parametrize("length", [1, 3])
def test_queries_without_a_key_get_nothing(length, text):
    q, k, v, lam = random_inputs("v1", length, 0)
    call = AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(), logits=Scheme.parse(text), post=PairNorm(1e-5))
    for backend in ("auto", "naive"):
        assert torch.equal(attend(call, backend), torch.zeros(2, 6, length, 16, dtype=v.dtype))


@in_one_test("backend", ["naive", "flashdiff2", "blocks"])
def test_a_norm_in_float32_leaves_the_values_type(backend):
    q, k, v, lam = random_inputs("v1", 5, 5, dtype=torch.bfloat16)
    post = PairNorm(1e-5, torch.rand(16), 0.7)
    assert attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(), post=post), backend).dtype == v.dtype


def test_queries_and_keys_that_no_backend_rounds_are_refused():
    call = AttentionCall(*random_inputs("v1", 5, 5), scale=0.3, mask=Mask(), qk=Scheme.parse("4:row"))
    for backend in ("auto", "naive"):
        with pytest.raises(UsageError, match=r"does not quantize queries and keys itself \(qk is 4:row\)"):
            attend(call, backend)


@in_one_test("backend", ["naive", "flashdiff2"])
def test_any_strides_serve(backend):
    q, k, v, lam = random_inputs("v1", 13, 13)
    expected = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask()), backend)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*q, *k, v)]
    out = attend(AttentionCall(turned[:2], turned[2:4], turned[4], lam, scale=0.3, mask=Mask()), backend)
    torch.testing.assert_close(out, expected)


def quantized_by(text, scales=None, clipped=None, static=None):
    """An oracle that rounds the visible entries that share a scale, region by region.

    Args:
        scales, clipped: lists that get the scale of each region that holds anything, and how many entries it clips.
        static: [maps, h] ranges of a static scheme.
    """
    scheme = Scheme.parse(text)
    levels = 2**scheme.bits - 1 if scheme.has_transform("shift") else 2 ** (scheme.bits - 1) - 1
    lowest, highest = -levels, 0 if scheme.has_transform("shift") else levels

    def quantize(logits, seen):
        out = logits.clone()
        visible = seen.expand_as(logits)
        if scheme.has_transform("shift"):
            peak = out.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
            out -= peak.nan_to_num(neginf=0.0)
        for region in regions(scheme, logits.shape):
            entries = out[region][visible[region]]
            if not len(entries):
                continue
            largest = float(entries.abs().max()) if static is None else float(static[region[:2]])
            scale = (min(largest, 12.0) if scheme.has_transform("shift") else largest) / levels or 1.0
            codes = (entries / scale).round()
            if scales is not None and largest:
                scales.append(scale)
                clipped.append(int(((codes < lowest) | (codes > highest)).sum()))
            block = out[region]
            block[visible[region]] = codes.clamp(lowest, highest) * scale
            out[region] = block
        return out

    return quantize


def regions(scheme, shape):
    maps, pairs, length, keys = shape
    every, heads = slice(None), [(m, p) for m in range(maps) for p in range(pairs)]
    tiles = [slice(start, start + 8) for start in range(0, max(length, keys), 8)]
    return {
        "tensor": [(every, every, every)],
        "map": [(m, every, every) for m in range(maps)],
        "head": [(*head, every) for head in heads],
        "static": [(*head, every) for head in heads],
        "pair": [(every, p, every) for p in range(pairs)],
        "row": [(*head, t) for head in heads for t in range(length)],
        "block": [(*head, rows, columns) for head in heads for rows in tiles for columns in tiles],
    }[scheme.granularity]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("length", [1, 11])
def test_quantized_logits_are_those_of_visible_entries_that_share_a_scale(
    length, granularity, bits, generation, padded
):
    q, k, v, lam = random_inputs(generation, length, 17)
    q = [x * 9 for x in q]
    valid = left_padding(2, 17) if padded else torch.ones(2, 17, dtype=torch.bool)
    text = f"{bits}:{granularity}"
    expected = equation_1(q, k, v, lam, 0.3, valid, quantized_by(text))
    mask = Mask(keys=valid if padded else None)
    for backend in ("auto", "naive"):
        out = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=mask, logits=Scheme.parse(text)), backend)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "naive"])
@pytest.mark.parametrize("text", [f"4:{granularity}" for granularity in GRANULARITIES if "tensor" not in granularity])
def test_the_meter_reports_the_scales_and_what_they_clip(text, backend):
    q, k, v, lam = random_inputs("v1", 11, 17)
    q = [x * 20 for x in q]
    # A head without logits rounds nothing, and its scale counts as none.
    q[0][:, 2] = 0
    scales, clipped, meter = [], [], LogitMeter()
    equation_1(q, k, v, lam, 0.3, left_padding(2, 17), quantized_by(text, scales, clipped))
    mask = Mask(keys=left_padding(2, 17))
    attend(AttentionCall(q, k, v, lam, scale=0.3, mask=mask, logits=Scheme.parse(text), meter=meter), backend)
    found = meter.report()
    assert found["calls"] == 1
    assert found["entries"] == 2 * 6 * (sum(range(7, 18)) + sum(range(2, 13)))
    assert found["clipped"] == sum(clipped)
    assert found["step_max"] == pytest.approx(max(scales))
    # A pair's scale counts for both of its maps.
    assert found["step_mean"] == pytest.approx(sum(scales) / len(scales))


@in_one_test("backend", ["auto", "naive"])
def test_static_logits_clip_at_the_range_of_their_map_and_head(backend):
    q, k, v, lam = random_inputs("v1", 11, 17)
    static = torch.linspace(0.2, 2.0, 12, dtype=torch.float64).view(2, 6)
    scales, clipped, meter = [], [], LogitMeter()
    every = torch.ones(2, 17, dtype=torch.bool)
    expected = equation_1(q, k, v, lam, 0.3, every, quantized_by("4:static", scales, clipped, static))
    scheme, mask = Scheme.parse("4:static"), Mask()
    out = attend(
        AttentionCall(q, k, v, lam, scale=0.3, mask=mask, logits=scheme, ranges=static.flatten(), meter=meter), backend
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert meter.report()["clipped"] == sum(clipped) > 0


def test_a_meter_that_counted_nothing_reports_zeros():
    assert set(LogitMeter().report().values()) == {0}


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "row"])
def test_alike_rounds_the_mean_of_both_maps_and_half_their_difference(granularity, generation):
    def quantize(logits, seen):
        mean, half = logits.mean(0, keepdim=True), (logits[1:] - logits[:1]) / 2
        mean, half = (quantized_by(f"4:{granularity}")(each, seen) for each in (mean, half))
        return torch.cat([mean - half, mean + half])

    q, k, v, lam = random_inputs(generation, 11, 17)
    valid = left_padding(2, 17)
    expected = equation_1(q, k, v, lam, 0.3, valid, quantize)
    scheme = Scheme.parse(f"4:{granularity}:alike")
    out = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(keys=valid), logits=scheme))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@in_one_test("backend", ["naive", "auto"])
def test_alike_means_nothing_to_a_plain_transformer(backend):
    q, k, v, lam = random_inputs("plain", 9, 9)
    alike, without = (
        attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(), logits=Scheme.parse(text)), backend)
        for text in ("4:tensor:alike", "4:tensor")
    )
    assert torch.equal(alike, without)


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize("granularity", GRANULARITIES + ALIKE)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_blocks_of_queries_equal_full_maps(generation, granularity, bits, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_ENTRIES", 2000)
    q, k, v, lam = random_inputs(generation, 37, 45)
    scheme, mask = Scheme.parse(f"{bits}:{granularity}"), Mask(keys=left_padding(2, 45))
    meters = LogitMeter(), LogitMeter()
    blocked = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=mask, logits=scheme, meter=meters[0]))
    full = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=mask, logits=scheme, meter=meters[1]), "naive")
    torch.testing.assert_close(blocked, full, rtol=0, atol=1e-12)
    (counted, in_full) = (meter.report() for meter in meters)
    assert counted == pytest.approx(in_full)
    assert in_full["calls"] == 1


@in_one_test("granularity", ["tensor", "head", "pair", "row"])
def test_queries_that_are_padding_enter_no_scale(granularity):
    q, k, v, lam = random_inputs("v2", 12, 12)
    scheme, valid = Scheme.parse(f"4:{granularity}"), torch.ones(2, 12, dtype=torch.bool)
    valid[0, 7:] = False
    q = [x.clone() for x in q]
    for x in q:
        x[0, :, 7:] *= 100
    meter = LogitMeter()
    padded = attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(keys=valid), logits=scheme, meter=meter))
    first = [[x[:1, :, :7] for x in xs] for xs in (q, k)]
    alone = attend(AttentionCall(*first, v[:1, :, :7], lam[:1, :, :7], scale=0.3, mask=Mask(), logits=scheme))
    torch.testing.assert_close(padded[:1, :, :7], alone, rtol=0, atol=1e-12)
    assert meter.entries == 2 * 6 * (7 * 8 // 2 + 12 * 13 // 2)


def test_metering_never_waits_for_a_device():
    # A fake tensor has no values: fetching one raises.
    with FakeTensorMode() as mode:
        q, k, v, lam = (mode.from_tensor(torch.randn(2, 2, 9, 8)) for _ in range(4))
        meter = LogitMeter()
        for _ in range(2):
            scheme = Scheme.parse("4:row:shift")
            attend(AttentionCall([q, q], [k, k], v, lam[..., :1], scale=0.3, mask=Mask(), logits=scheme, meter=meter))
    assert meter.calls == 2
    with pytest.raises(DataDependentOutputException):
        meter.report()


def test_memory_of_simulated_logits_is_linear_in_the_keys(monkeypatch):
    largest = []
    original = blocks.mask_and_shift_logits
    monkeypatch.setattr(
        blocks, "mask_and_shift_logits", lambda x, *rest: largest.append(x.numel()) or original(x, *rest)
    )
    monkeypatch.setattr(blocks, "_BLOCK_ENTRIES", 1 << 14)
    q, k, v, lam = random_inputs("v1", 512, 512, batch=1, dtype=torch.float32)
    attend(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask(), logits=Scheme.parse("4:row")))
    assert max(largest) <= 1 << 14


@in_one_test(
    ("backend", "scheme", "message"),
    [
        ("flash_attn", "16", "flash-attn runs on CUDA only"),
        ("fast", "16", "unknown attention backend 'fast'"),
        ("triton", "16", r"'triton': Triton kernels run on CUDA devices, not on cpu; use auto"),
        ("flashdiff1", "4:row", "cannot quantize them"),
        ("simulated", "16", "'simulated' computes only quantized attention"),
    ],
)
def test_a_backend_that_cannot_serve_says_why(backend, scheme, message):
    call = AttentionCall(*random_inputs("v1", 7, 7), scale=0.3, mask=Mask(), logits=Scheme.parse(scheme))
    with pytest.raises(UsageError, match=message):
        attend(call, backend)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("length", [1, 29])
def test_the_flash_attn_package_is_asked_for_the_equation(monkeypatch, generation, length):
    """A stand-in for the package, which needs CUDA: its documented layout and mask, by torch's SDPA."""

    def flash_attn_func(q, k, v, softmax_scale, causal):
        assert causal
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        assert k.shape[-1] == v.shape[-1]
        aligned = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=aligned, scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    q, k, v, lam = random_inputs(generation, length, 29)
    out = composed.flash_attn(AttentionCall(q, k, v, lam, scale=0.3, mask=Mask()))
    torch.testing.assert_close(out, equation_1(q, k, v, lam, 0.3, torch.ones(2, 29, dtype=torch.bool)))


def test_what_the_flash_attn_package_cannot_do_is_refused(monkeypatch):
    def refusal(dtype=torch.float16, is_cuda=True, keys=None, window=None, widths=(64, 128)):
        v = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 1, 3, widths[1]))
        q = [torch.empty(1, 1, 3, widths[0])]
        call = SimpleNamespace(q=q, v=v, mask=Mask(keys, window), key_count=3)
        return BACKENDS["flash_attn"].refuses(call)

    monkeypatch.setattr(composed, "_has_flash_attn", lambda: True)
    assert refusal() is None
    assert refusal(torch.bfloat16) is None
    assert "CUDA only" in refusal(is_cuda=False)
    assert "not torch.float32" in refusal(torch.float32)
    assert "padding masks" in refusal(keys=torch.ones(2, 3, dtype=torch.bool))
    assert refusal(window=3) is None
    assert "windows" in refusal(window=2)
    # csrc/flash_attn/flash_api.cpp checks that heads are no wider than 256 and V's as wide as Q's.
    assert refusal(widths=(256, 256)) is None
    assert "keys are 192 and values 128 wide" in refusal(widths=(192, 128))
    assert "keys are 576 and values 576 wide" in refusal(widths=(576, 576))
    monkeypatch.setattr(composed, "_has_flash_attn", lambda: False)
    assert "pip install flash-attn" in refusal()
