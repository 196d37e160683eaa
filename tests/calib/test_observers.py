"""Observers against numpy percentiles and a search in float64; static schemes against their formula."""

import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch

from diffquant.calib.calibration.calibrate import calibrate, measure_range_quality
from diffquant.calib.calibration.observe import flatten_tokens, iterate_projections, observe_ranges
from diffquant.calib.calibration.observers import MagnitudeHistogram, Observer, key_ranges
from diffquant.checkpoints.ranges import Ranges, read_any_ranges, write_ranges
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, UsageError
from diffquant.model.cache import PackedStates
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.recipe.targets import LAYER_TARGETS
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.models import ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test


def heavy_tails(*shape, seed=0):
    torch.manual_seed(seed)
    return torch.distributions.StudentT(2.5).sample(shape)


@in_one_test("percentile", [50, 97.3, 99.99, 100])
def test_percentiles_are_numpys(percentile):
    x = heavy_tails(1003, 5).abs()
    found = Observer("percentile", percentile).ranges(x)
    expected = np.percentile(x.numpy(), percentile, axis=0, method="inverted_cdf")
    np.testing.assert_array_equal(found.numpy(), expected)


def squared_error(x, top, bits):
    largest = 2 ** (bits - 1) - 1
    step = top / largest
    return np.square(np.clip(np.rint(x / step), -largest, largest) * step - x).sum()


@in_one_test("bits", [4, 8])
def test_mse_clips_where_a_search_in_float64_finds_the_least_error(bits):
    x = heavy_tails(4000, 3).abs()
    found = Observer("mse", bits=bits).ranges(x).double().numpy()
    for channel, top in zip(x.double().numpy().T, found, strict=True):
        fine = min(squared_error(channel, share * channel.max(), bits) for share in np.geomspace(0.01, 1, 1601))
        assert squared_error(channel, top, bits) <= 1.03 * fine
        assert squared_error(channel, top, bits) <= squared_error(channel, channel.max(), bits)
    assert bits == 8 or (found < 0.8 * x.amax(0).numpy()).all()


@in_one_test("observer", [Observer("absmax"), Observer("percentile", 99.0), Observer("mse", bits=4)])
def test_ranges_of_counts_are_those_of_the_values(observer):
    x = heavy_tails(20000, 2).abs()
    heads = [MagnitudeHistogram() for _ in range(2)]
    for head, values in zip(heads, x.T, strict=True):
        head.add(values.contiguous())
    counts = torch.stack([head.counts for head in heads])
    found = observer.ranges_from_histograms(counts, MagnitudeHistogram.bin_centers(), x.amax(0))
    torch.testing.assert_close(found, observer.ranges(x), rtol=0.04, atol=0)


def test_counts_beyond_float32_s_whole_numbers_have_their_rank():
    # In float32 2**24 + 1 is 2**24, the rank of the first bin's last.
    counts, values = torch.tensor([[2**24, 1]]), torch.tensor([1.0, 2.0])
    assert Observer("percentile", 100.0).ranges_from_histograms(counts, values, torch.tensor([2.0])).item() == 2


@in_one_test("kind", ["absmax", "percentile", "mse"])
def test_a_channel_of_zeros_gets_a_range_that_divides(kind):
    assert Observer(kind).ranges(torch.zeros(9, 2)).tolist() == [1, 1]


@in_one_test("make", [random_llama, random_diffllama])
def test_no_position_exceeds_the_range_of_a_rotated_key(make):
    model = ours(make(num_key_value_heads=4))
    ids = random_ids(2, 16)
    spec = model.config.diff_spec

    def keys(offset):
        walk = model.new_layer_runner(16 + offset)
        layer = walk.layers[0]
        rotary = tuple(table[:, offset:] for table in walk.layer_arguments(layer)[0])
        _, k, _ = layer.project(walk.embed(ids), rotary)
        return k.transpose(1, 2).flatten(0, 1)

    ranges = key_ranges(Observer("absmax"), keys(0), spec).view(-1, spec.head_dim)
    own = keys(0).abs().amax(0)
    far = torch.stack([keys(offset).abs().amax(0) for offset in range(0, 100, 7)]).amax(0)
    assert (far <= ranges * 1.0001).all()
    assert (far > own * 1.001).any()


@in_one_test("make", [random_llama, random_diffllama])
def test_two_channels_that_rotate_into_each_other_have_the_range_of_least_error_over_both(make):
    spec = ours(make(num_key_value_heads=4)).config.diff_spec
    half = spec.head_dim // 2
    keys = heavy_tails(3000, 2, spec.head_dim)
    keys[..., :half] *= 5
    first, second = key_ranges(Observer("mse", bits=4), keys, spec).view(2, 2, half).unbind(1)
    assert torch.equal(first, second)
    for head, channel in ((0, 0), (1, half - 1)):
        both = keys[:, head, [channel, channel + half]].abs().double().numpy().ravel()
        fine = min(squared_error(both, share * both.max(), 4) for share in np.geomspace(0.01, 1, 1601))
        assert squared_error(both, float(first[head, channel]), 4) <= 1.03 * fine


def test_a_static_cache_reads_back_what_the_formula_says():
    states, ranges = heavy_tails(2, 3, 11, 8), torch.rand(3, 8) + 0.5
    cache = PackedStates(Scheme.parse("4:static"), residual=2, ranges=ranges)
    for part in states.split(4, 2):
        cache.append(part)
    step = ranges[:, None] / 7
    expected = (states / step).round().clamp(-7, 7) * step
    torch.testing.assert_close(cache.read()[:, :, :9], expected[:, :, :9])
    assert torch.equal(cache.read()[:, :, 9:], states[:, :, 9:])
    assert cache.nbytes == 2 * 3 * 9 * 4 + 2 * 3 * 2 * 8 * 4
    cache.crop(5)
    torch.testing.assert_close(cache.read(), expected[:, :, :6])


def test_calibrated_ranges_serve_a_model_of_their_recipe():
    model = ours(random_diffllama(num_key_value_heads=4))
    ids = random_ids(4, 31)
    tensors = observe_ranges(model, ids[:2], LAYER_TARGETS, Observer("absmax"))
    fits = measure_range_quality(model, ids[2:], tensors, 8, batch_tokens=40)
    recipe = Recipe.of(k="8:static", v="8:static", logits="8:static")
    with pytest.raises(UsageError, match="static k, v, logits need calibrated ranges"):
        model.apply_recipe(recipe)
    exact = model(ids).logits
    model.model.ranges = tensors
    model.apply_recipe(recipe)
    rounded = model(ids).logits
    model.check_quantizers_ran()
    assert 0 < float((rounded - exact).square().mean() / exact.square().mean()) ** 0.5 < 0.1
    assert all(fit.sqnr > 15 and fit.clipped < 0.03 for fit in fits), fits


def test_the_fit_is_that_of_the_values_held_out():
    model = ours(random_llama())
    ids = random_ids(4, 31)
    tensors = observe_ranges(model, ids[:2], ("v",), Observer("percentile", 99.0, bits=6))
    fits = measure_range_quality(model, ids[2:], tensors, 6, batch_tokens=40)
    with torch.inference_mode():
        held = flatten_tokens(next(iterate_projections(model, ids[2:], 4096))[0][2]).double().numpy()
    top = tensors["layers.0.v"].double().numpy()
    read_back = np.clip(np.rint(held / (top / 31)), -31, 31) * top / 31
    assert fits[0].clipped == pytest.approx((np.abs(held) > top).mean(), abs=1e-9)
    sqnr = 10 * np.log10(np.square(held).sum() / np.square(held - read_back).sum())
    assert fits[0].sqnr == pytest.approx(sqnr, abs=0.05)


def test_the_fit_of_logits_counts_those_that_a_query_sees():
    model = ours(random_llama())
    ids = random_ids(4, 31)
    tensors = observe_ranges(model, ids[:2], ("logits",), Observer("percentile", 90.0, bits=6))
    (fit, *_) = measure_range_quality(model, ids[2:], tensors, 6, batch_tokens=40)
    with torch.inference_mode():
        q, k, *_ = next(iterate_projections(model, ids[2:], 4096))[0]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = (q.double() @ k.double().mT).numpy() * q.shape[-1] ** -0.5
    seen = np.broadcast_to(np.tri(31, dtype=bool), logits.shape)
    beyond = np.abs(logits) > tensors["layers.0.logits"].double().numpy()[:, None, None]
    assert fit.clipped == pytest.approx(beyond[seen].mean(), abs=1e-4)
    assert 0.05 < fit.clipped < 0.2


def test_a_file_of_ranges_gives_them_back_and_any_flipped_bit_is_refused(tmp_path):
    ranges = Ranges("a model", {"tokens": 3}, 8, {"layers.0.k": torch.rand(1, 4) + 1})
    file = tmp_path / "scales.safetensors"
    write_ranges(file, ranges)
    again = read_any_ranges(file)
    assert (again.model, again.settings, again.bits) == (ranges.model, ranges.settings, ranges.bits)
    assert torch.equal(again.tensors["layers.0.k"], ranges.tensors["layers.0.k"])
    content = file.read_bytes()
    taken = []
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with suppress(CheckpointError):
            taken.append((at, read_any_ranges(file)))
    assert [at for at, _ in taken] == []


@in_one_test("text", ["absmax:99.9", "mse:99"])
def test_an_observer_without_a_percentage_takes_none(text):
    with pytest.raises(UsageError, match="takes no percentage: give"):
        Observer.parse(text)


@in_one_test("value", [0.0, -1.0, float("nan"), float("inf")])
def test_ranges_that_no_scale_can_be_made_of_are_refused(tmp_path, value):
    write_ranges(tmp_path / "s.safetensors", Ranges("", {}, None, {"layers.0.k": torch.tensor([[1.0, value]])}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.k"):
        read_any_ranges(tmp_path / "s.safetensors")


@in_one_test("change", ["shape", "layer", "name"])
def test_ranges_of_other_heads_or_layers_than_the_model_s_are_refused(tmp_path, change):
    source = open_source(write_checkpoint(tmp_path / "model", "diffllama"))
    spec, layers = source.spec, source.architecture.num_hidden_layers
    tensors = {f"layers.{n}.k": torch.ones(spec.key_heads, spec.head_dim) for n in range(layers)}
    Ranges(source.fingerprint, {}, None, tensors).check_model(source)
    if change == "shape":
        tensors["layers.1.k"] = torch.ones(1)
    else:
        tensors["layers.1.hidden" if change == "name" else "layers.9.k"] = tensors.pop("layers.1.k")
    with pytest.raises(CheckpointError, match=r"layers\.1\.k is .*expected"):
        Ranges(source.fingerprint, {}, None, tensors).check_model(source)


def test_the_digest_of_ranges_is_that_of_their_values():
    tensors = {"layers.0.k": torch.rand(3, 4)}
    digest = Ranges("", {}, None, tensors).digest
    assert Ranges("elsewhere", {"tokens": 3}, 8, dict(tensors)).digest == digest
    assert Ranges("", {}, None, {"layers.0.k": tensors["layers.0.k"] * 2}).digest != digest
    assert Ranges("", {}, None, {"layers.0.v": tensors["layers.0.k"]}).digest != digest


def test_a_checkpoint_that_is_replaced_while_it_is_calibrated_gives_no_ranges(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    tiny_lm.write_llama(tmp_path / "other", seed=5)

    def replace_it(*_):
        shutil.copy(tmp_path / "other" / "model.safetensors", model)

    with pytest.raises(CheckpointError, match="changed while"):
        calibrate(model, ("v",), tokens=128, window=32, progress=replace_it)


def test_two_windows_are_enough_to_calibrate_on_one_and_report_on_the_other(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    ranges, fits = calibrate(model, ("v",), tokens=64, window=32)
    assert set(ranges.tensors) == {"layers.0.v", "layers.1.v"}
    assert len(fits) == 2
    with pytest.raises(UsageError, match=r"^63 tokens are only one window of 32 tokens; two are needed"):
        calibrate(model, ("v",), tokens=63, window=32)
