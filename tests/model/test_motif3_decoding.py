"""Motif-3 decoding by the kernel that reads latents as they are stored, against the same steps in torch."""

import logging

import pytest
import torch

from diffquant import Recipe, load
from diffquant.errors import UsageError
from diffquant.model.cache import PackedLayer
from diffquant.model.fused_cache import FusedLayer
from diffquant.model.motif3 import attention as module
from diffquant.model.windowed_cache import WindowedLayer
from tests.support.checkpoints import MOTIF3, write_random
from tests.support.models import ours, random_diffllama, random_ids

pytest.importorskip("triton")

# Latents and turned channels of the released model's sizes, and eight signal heads over two noise heads.
CONFIG = MOTIF3 | {
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 80,
    "v_head_dim": 24,
    "sliding_window": 5,
}
WHOLE = [0, 2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("motif3") / "latents"
    write_random(folder, CONFIG, torch.float32)
    return folder


@pytest.fixture
def kernel_calls(monkeypatch):
    """Numbers of tokens that the kernel, which the interpreter runs, was asked to decode."""
    from diffquant.kernels.cache import latent

    calls, decode = [], latent.decode_latent

    def counted(q, *args, **kwargs):
        calls.append(q[0].shape[2])
        return decode(q, *args, **kwargs)

    monkeypatch.setattr(latent, "decode_latent", counted)
    monkeypatch.setattr(module, "latent_layer_refusal", lambda *_: None)
    return calls


def opened(checkpoint, backend, recipe=None):
    model = load(checkpoint, recipe)
    for attention in model.attention_modules:
        # Logits of about one.
        attention.wkv_b.weight.data *= 0.1
    model.use_attention(backend)
    return model


@torch.no_grad()
def in_chunks(model, ids, chunks, mask=None):
    cache, out, read = model.new_cache(), [], 0
    for chunk in ids.split(chunks, 1):
        read += chunk.shape[1]
        seen = None if mask is None else mask[:, :read]
        out.append(model(chunk, attention_mask=seen, past_key_values=cache).logits)
    return torch.cat(out, 1), cache


@pytest.mark.parametrize(
    "recipe",
    [Recipe.of(), Recipe.of(kv=8), Recipe.of(k="8:c16:rotated", v="4:row:rotated", residual=3)],
    ids=["16", "8", "rotated 4"],
)
def test_steps_are_those_of_torch(checkpoint, recipe, kernel_calls):
    ids = random_ids(2, 16)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    wanted, plain = in_chunks(opened(checkpoint, "auto", recipe), ids, [11, 1, 3, 1], mask)
    assert kernel_calls == []
    logits, cache = in_chunks(opened(checkpoint, "triton-latent", recipe), ids, [11, 1, 3, 1], mask)
    assert kernel_calls == [tokens for tokens in (1, 3, 1) for _ in WHOLE]
    assert [type(layer) for layer in cache.layers] == [FusedLayer, WindowedLayer, FusedLayer]
    assert [type(layer) for layer in plain.layers] == [PackedLayer, WindowedLayer, PackedLayer]
    valid = mask.bool()
    torch.testing.assert_close(logits[valid], wanted[valid], rtol=0, atol=2e-4)
    assert logits.std() > 0.1


def test_generates_the_same_tokens(checkpoint, kernel_calls):
    ids = random_ids(1, 6)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = opened(checkpoint, "auto").generate(ids, **settings)
    assert torch.equal(opened(checkpoint, "triton-latent").generate(ids, **settings), wanted)
    assert kernel_calls == [1] * 3 * len(WHOLE)


def test_what_the_kernel_does_not_serve_is_said_and_computed_in_torch(checkpoint, kernel_calls, monkeypatch, caplog):
    ids = random_ids(1, 8)
    wanted, _ = in_chunks(opened(checkpoint, "auto"), ids, [6, 1, 1])
    model = opened(checkpoint, "triton-latent")
    refusal = "Triton kernels run on CUDA devices, not on cpu"
    monkeypatch.setattr(module, "latent_layer_refusal", lambda *_: refusal)
    with caplog.at_level(logging.WARNING):
        logits, cache = in_chunks(model, ids, [6, 1, 1])
    assert torch.equal(logits, wanted)
    assert not any(isinstance(layer, FusedLayer) for layer in cache.layers)
    assert caplog.messages == [f"the decode kernel is not used, which makes generation much slower: {refusal}"]
    assert kernel_calls == []


def test_reasons_against_the_kernel_are_named(checkpoint):
    model = opened(checkpoint, "triton-latent")
    attention = model.attention_modules[0]

    def refusal(recipe):
        return attention.decoding_refusal(recipe)

    assert refusal(Recipe.of()) == "the decode kernel supports float16 and bfloat16, not torch.float32"
    model.half()
    assert refusal(Recipe.of()) == "Triton kernels run on CUDA devices, not on cpu"
    model.apply_recipe(Recipe.of(logits="8:row"))
    assert "logits, softmax weights or operands of attention are quantized" in refusal(Recipe.of())


def test_formats_and_widths_that_the_kernel_does_not_read_are_refused(monkeypatch):
    from diffquant.model import fused_cache

    monkeypatch.setattr(fused_cache, "device_refusal", lambda _: None)

    def refusal(recipe, latent=512):
        return fused_cache.latent_layer_refusal(recipe, 64, latent, torch.float16, torch.device("cpu"))

    assert refusal(Recipe.of(kv=4)) is None
    assert refusal(Recipe.of(), 256) == "keys are 64 and values 256 wide; the kernels support 64 and 512"
    assert "v has scales per group of channels" in refusal(Recipe.of(v="4:g64"))


def test_models_without_latents_refuse_it():
    model = ours(random_diffllama())
    model.use_attention("triton-latent")
    with pytest.raises(
        UsageError, match="'triton-latent': this backend only decodes a few tokens at a time from the cache of a model"
    ):
        model(random_ids(1, 5))
