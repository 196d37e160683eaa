"""IQ4_NL and IQ4_XS, against gguf's own reading of their blocks, and what follows from their levels and steps."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import diffquant
from diffquant.checkpoints.compressed_tensors import decode_codes
from diffquant.errors import GroupSizeError, UsageError
from diffquant.onnx.gguf.writer import pack_blocks
from diffquant.quantization.conversion import convert
from diffquant.quantization.roundings.gptq import descent
from diffquant.quantization.roundings.nearest import round_to_nearest, round_with_clipping
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.support.models import random_llama
from tests.support.tiny_lm import tokenizer, write_diff_v2

KINDS = {"iq4_nl": (GGMLQuantizationType.IQ4_NL, 32), "iq4_xs": (GGMLQuantizationType.IQ4_XS, 256)}
IDS = torch.randint(0, 400, (1, 24), generator=torch.Generator().manual_seed(0))


def weight(seed, rows=6, width=512):
    """Rows of very different sizes, with outliers, a group and a step of zeros, and groups of one sign."""
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    values *= 10.0 ** torch.linspace(-3, 2, rows)[:, None]
    values[1, 40] *= 30
    values[2, :32] = values[3, :256] = 0
    values[4, 64:96] = values[4, 64:96].abs()
    values[5, 64:96] = -values[5, 64:96].abs()
    return values


def rounded(values, name, rule=round_to_nearest, **options):
    scheme = Scheme.parse(name)
    codes, scale = rule("w", values, scheme, scheme.format.scale_dtype(torch.float32), **options)
    return codes, scale, decode_codes(codes, scale, scheme)


@pytest.mark.parametrize("rule", [round_to_nearest, round_with_clipping])
@pytest.mark.parametrize("name", KINDS)
def test_gguf_dequantizes_our_blocks_to_our_values(name, rule):
    codes, scale, values = rounded(weight(0), name, rule)
    kind, size = KINDS[name]
    number_format = Scheme.parse(name).format
    blocks = pack_blocks(codes, number_format.pack_scale(scale), 4, size)
    np.testing.assert_array_equal(quants.dequantize(blocks, kind), values.numpy())
    assert blocks.nbytes * 8 / values.numel() == {"iq4_nl": 4.5, "iq4_xs": 4.25}[name]
    assert torch.equal(number_format.unpack(number_format.pack(codes), 512), codes)


@given(st.integers(0, 2**32 - 1))
def test_scales_of_any_block_are_read_as_gguf_reads_them_and_written_again(seed):
    random = np.random.default_rng(seed)
    header = random.integers(0, 256, (4, 2, 8), np.uint8)
    steps = header[..., :2].copy().view(np.float16)
    header[..., :2] = np.where(np.isfinite(steps), steps, np.float16(1)).view(np.uint8)
    codes = torch.from_numpy(random.integers(-8, 8, (4, 512), np.int8))
    scheme = Scheme.parse("iq4_xs")
    stored = torch.from_numpy(header).flatten(1)
    scale = scheme.format.unpack_scale(stored)
    blocks = pack_blocks(codes, stored, 4, 256)
    oracle = quants.dequantize(blocks, GGMLQuantizationType.IQ4_XS)
    np.testing.assert_array_equal(decode_codes(codes, scale, scheme).numpy(), oracle)
    assert torch.equal(scheme.format.unpack_scale(scheme.format.pack_scale(scale)), scale)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_fitted_scales_are_never_worse_than_absmax_by_their_own_weights(seed, weighted):
    values = weight(seed)
    generator = torch.Generator().manual_seed(seed)
    importance = torch.rand(512, generator=generator) ** 4 if weighted else torch.ones(512)
    for name in KINDS:
        plain, fitted = (
            (each - values).square().mul(importance).sum(1).double()
            for each in (
                rounded(values, name)[2],
                rounded(values, name, round_with_clipping, importance={"w": importance})[2],
            )
        )
        assert (fitted <= plain * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", KINDS)
def test_zeros_and_largest_magnitudes_are_exact_by_absmax(name):
    values = weight(1)
    found = rounded(values, name)[2]
    assert not found[values.unflatten(1, (-1, 32)).eq(0).all(-1).repeat_interleave(32, 1)].any()
    largest = values[0].unflatten(0, (-1, 32)).abs().argmax(-1)
    of_largest = [each.unflatten(1, (-1, 32))[0, range(16), largest] for each in (values, found)]
    torch.testing.assert_close(*of_largest, rtol=2e-3 if name == "iq4_nl" else 0.2, atol=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codebooks") / "llama"
    sizes = {"vocab_size": 400, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
    model = random_llama(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1)
    model.model.layers[0].mlp.up_proj.weight.data[:8, :32] = 0
    model.bfloat16().save_pretrained(folder)
    tokenizer(adds_bos=True).save_pretrained(folder)
    return folder


def logits(path, **options):
    return diffquant.load(path, dtype=torch.float32, **options)(IDS).logits


@pytest.mark.parametrize("rule", ["nearest", "mse", "gptq", "tuned"])
@pytest.mark.parametrize("name", KINDS)
def test_a_quantized_llama_is_a_gguf_file_without_rounding_again(llama, tmp_path, name, rule, monkeypatch):
    monkeypatch.setattr(descent, "_STEPS", 5)
    reads = {"tokens": 128, "window": 64} if rule in ("gptq", "tuned") else {}
    report = diffquant.quantize(llama, tmp_path / "low", Recipe.of(weights=name, rounding={"name": rule} | reads))
    assert report.packed_bits == pytest.approx({"iq4_nl": 4.5, "iq4_xs": 4.25}[name])
    exported = diffquant.export(tmp_path / "low", tmp_path / "low.gguf", to="gguf")
    assert exported.types == {name.upper(): 7, "BF16": 2, "F32": 3}
    assert not any("rounded" in note for note in exported.notes)
    stored = logits(tmp_path / "low")
    assert stored.isfinite().all()
    assert torch.equal(stored, logits(tmp_path / "low.gguf"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="low.gguf", dtype=torch.float32)
    torch.testing.assert_close(theirs(IDS).logits, stored, rtol=0, atol=1e-4)
    if rule == "nearest":
        assert torch.equal(stored, logits(llama, recipe={"weights": name, "rounding": "nearest"}))
        diffquant.export(llama, tmp_path / "one.gguf", to="gguf", weights=name)
        assert torch.equal(stored, logits(tmp_path / "one.gguf"))
        with pytest.raises(ValueError, match=f"'{name}' is not a valid QuantizationType"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "low")


def test_a_differential_model_is_read_by_diffquant_as_it_is_simulated(llama, tmp_path):
    model = tmp_path / "diff"
    convert(llama, model, "diff-v2")
    diffquant.quantize(model, tmp_path / "low", {"weights": "iq4_nl", "rounding": "nearest"})
    simulated = diffquant.load(model, recipe={"weights": "iq4_nl", "rounding": "nearest"})
    assert all(map(torch.equal, diffquant.load(tmp_path / "low").parameters(), simulated.parameters()))
    account = json.loads((tmp_path / "low/diffquant.json").read_text())
    assert {each["format"] for each in account["tensors"].values()} == {"iq4_nl"}
    assert account["packed_bits"] == 4.5
    assert "The codes of iq4_nl are packed in a layout that only" in (tmp_path / "low/README.md").read_text()


def test_what_the_formats_cannot_hold_is_refused_by_name(llama, tmp_path):
    with pytest.raises(UsageError, match="iq4_nl has one scale per 32 values; leave out the granularity"):
        Scheme.parse("iq4_nl:row")
    for target in ("k", "v", "logits", "qk", "p", "pv", "activations"):
        with pytest.raises(UsageError, match=f"{target}.*iq4_nl is for weights only"):
            Recipe.of(**{target: "iq4_nl"})
    for name, size in (("iq4_nl", 32), ("iq4_xs", 256)):
        with pytest.raises(GroupSizeError, match=f"group size {size} does not divide .*: {name} has no other size"):
            diffquant.quantize(write_diff_v2(tmp_path / name), tmp_path / "low", name)
    with pytest.raises(UsageError, match="iq4_nl is not an integer format"):
        diffquant.export(llama, tmp_path / "onnx", weights="iq4_nl")
    with pytest.raises(UsageError, match="iq4_xs needs rows of a multiple of 256 values"):
        Scheme.parse("iq4_xs").format.unpack_scale(torch.zeros(4, 2, dtype=torch.uint8))
