"""What calibration reads of a model: streaming statistics, outliers, its cache and its layers, wherever they are."""

import json

import accelerate.utils
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import diffquant
from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.calib.calibration.observe import observe_ranges
from diffquant.calib.calibration.observers import QUANTILE_ERROR, MagnitudeHistogram, Observer
from diffquant.calib.outlier_result import HIDDEN, LOGITS, RANKS
from diffquant.calib.outliers import measure_magnitudes
from diffquant.checkpoints.source import open_source
from diffquant.errors import NonFiniteError, UsageError
from diffquant.quantization.loading import load, load_by_layer
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.models import ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 200))
def test_the_largest_are_those_of_the_whole_stream(seed, pieces, kept):
    generator = torch.Generator().manual_seed(seed)
    stream = [torch.randn(3, 17 * (i + 1), generator=generator).exp() for i in range(pieces)]
    magnitudes = MagnitudeHistogram(kept)
    for piece in stream:
        magnitudes.add(piece)
    whole = torch.cat([piece.flatten() for piece in stream])
    assert torch.equal(magnitudes.largest, whole.topk(min(kept, len(whole))).values)


@given(st.integers(0, 2**31), st.floats(1e-12, 1e12), st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.999, 1.0]))
def test_quantiles_lie_within_the_stated_error(seed, size, share):
    values = torch.randn(3001, generator=torch.Generator().manual_seed(seed)).abs().mul(size)
    magnitudes = MagnitudeHistogram()
    for piece in values.split(700):
        magnitudes.add(piece)
    exact = np.quantile(values.double().numpy(), share, method="inverted_cdf")
    assert magnitudes.count == 3001
    assert magnitudes.quantile(share) == pytest.approx(exact, rel=QUANTILE_ERROR, abs=1e-37)
    assert QUANTILE_ERROR <= 0.005


def test_zeros_count_unless_they_are_hidden():
    magnitudes = MagnitudeHistogram()
    magnitudes.add(torch.tensor([0.0, 0.0, 0.0, 5.0, 6.0]), zeros_to_ignore=2)
    assert magnitudes.count == 3
    assert magnitudes.quantile(1 / 3) == 0
    assert magnitudes.quantile(2 / 3) == pytest.approx(5, rel=QUANTILE_ERROR)


@in_one_test("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(NonFiniteError, match="float32"):
        MagnitudeHistogram().add(torch.tensor([1.0, bad]))


def test_the_middle_of_a_bin_is_where_its_values_fall():
    values = MagnitudeHistogram.bin_centers()
    kept = values[1000:30000:97]
    magnitudes = MagnitudeHistogram()
    magnitudes.add(kept)
    assert torch.equal(values[magnitudes.counts.bool()], kept)


def layer_magnitudes(oracle, ids):
    """(visible |logits|, |outputs|) of each layer, from transformers' projections and rotation."""
    config = oracle.config
    width = config.hidden_size // config.num_attention_heads
    hidden = oracle.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1])[None]
    rotary = oracle.model.rotary_emb(hidden, positions)
    mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    found = []
    for layer in oracle.model.layers:
        x = layer.input_layernorm(hidden)
        q, k = (
            p(x).unflatten(-1, (-1, width)).transpose(1, 2) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = (q @ k.mT / width**0.5)[:, :, visible]
        out = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        hidden = out[0] if isinstance(out, tuple) else out
        found.append((logits.abs().flatten(), hidden.abs().flatten()))
    return found


@pytest.mark.parametrize("make", [random_llama, random_diffllama], ids=["llama", "diffllama"])
@pytest.mark.parametrize("batch_tokens", [37, 4096])
def test_magnitudes_are_those_of_transformers_layers(make, batch_tokens):
    oracle = make(num_key_value_heads=4, num_hidden_layers=2)
    oracle.set_attn_implementation("eager")
    ids = random_ids(batch=3, length=37)
    layers, overall = measure_magnitudes(ours(oracle), ids, batch_tokens)
    expected = layer_magnitudes(oracle, ids)
    for found, (logits, hidden) in zip(layers, expected, strict=True):
        check(found[LOGITS], logits)
        check(found[HIDDEN], hidden)
    check(overall[LOGITS], torch.cat([logits for logits, _ in expected]))
    check(overall[HIDDEN], torch.cat([hidden for _, hidden in expected]))


def check(found, values):
    assert found.count == len(values)
    top = values.topk(max(RANKS)).values
    assert list(found.top) == list(RANKS)
    for rank, value in found.top.items():
        assert value == pytest.approx(float(top[rank - 1]), rel=2e-5)
    assert found.median == pytest.approx(float(values.median()), rel=QUANTILE_ERROR + 1e-4)


def test_a_plain_checkpoint_with_rounded_weights_has_the_ranges_of_the_quantized_one(tmp_path):
    plain, quantized = write_checkpoint(tmp_path / "plain", "unilm-v1"), tmp_path / "quantized"
    recipe, ids = Recipe.of(weights="4:g32"), torch.randint(90, (2, 32))
    diffquant.quantize(plain, quantized, recipe)
    simulated, stored = calibrate_cache(plain, recipe, ids).tensors, calibrate_cache(quantized, ids=ids).tensors
    assert simulated.keys() == stored.keys()
    assert all(torch.equal(simulated[name], stored[name]) for name in stored)
    exact = calibrate_cache(plain, ids=ids).tensors
    assert not torch.equal(exact["layers.1.k"], stored["layers.1.k"])


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", "llama")
    tiny_lm.tokenizer().save_pretrained(source)
    with pytest.raises(UsageError, match=r"token \d+ \(.*embedding has 90 rows"):
        calibrate_cache(source)


@pytest.mark.parametrize("name", ["diffllama", "phi4flash"])
@pytest.mark.parametrize("weights", ["16", "4:g16"])
def test_a_model_that_is_read_layer_by_layer_gives_the_same_ranges_and_keeps_none(name, weights, tmp_path):
    source = open_source(write_checkpoint(tmp_path / "model", name))
    recipe, ids = Recipe.of(weights=weights), random_ids(2, 24)
    model = load_by_layer(source, recipe)
    ranges = observe_ranges(model, ids, ("k", "v"), Observer("absmax"))
    whole = observe_ranges(load(source, recipe, torch.float32), ids, ("k", "v"), Observer("absmax"))
    assert set(ranges) == set(whole)
    for place, wanted in whole.items():
        torch.testing.assert_close(ranges[place], wanted, rtol=1e-5, atol=0)
    layers = {parameter.device.type for parameter in model.model.layers.parameters()}
    assert layers == {"meta"}


@pytest.fixture(scope="module", params=["diffllama", "unilm-v2"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    write_checkpoint(folder, request.param, vocab_size=len(tiny_lm.tokenizer()), max_position_embeddings=512)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


def test_the_command_line_spreads_a_model_larger_than_memory(model, tmp_path, on_disk, run, monkeypatch):
    nbytes = sum(parameter.nbytes for parameter in diffquant.load(model).parameters())
    monkeypatch.setattr(accelerate.utils, "get_balanced_memory", lambda *_, **__: {"cpu": nbytes // 2})
    reading = ["--tokens", 128, "--window", 32, "--dtype", "float32", "--json"]

    def read(*arguments):
        code, out, err = run(*arguments, *reading)
        assert code == 0, err
        return json.loads(out)

    spread = ["--device-map", "auto", "--offload-folder", tmp_path / "offload"]
    whole = read("outliers", model)
    assert not on_disk
    assert read("outliers", model, *spread)["models"] == whole["models"]
    assert on_disk
    on_disk.clear()
    read("calibrate", model, "-o", tmp_path / "whole.safetensors")
    assert not on_disk
    read("calibrate", model, "-o", tmp_path / "spread.safetensors", *spread)
    assert on_disk
    whole, from_disk = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "spread"))
    torch.testing.assert_close(from_disk, whole, rtol=0, atol=0)


def test_places_are_checked_before_the_model_is_read(model, tmp_path):
    with pytest.raises(UsageError, match="leave out device or device_map"):
        diffquant.calibrate(model, tmp_path / "out.safetensors", device="cpu", device_map="auto")
    with pytest.raises(UsageError, match="give device_map='auto' too"):
        diffquant.calibrate(model, tmp_path / "out.safetensors", offload_folder=tmp_path)
