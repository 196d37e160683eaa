"""Queries and keys rounded before Q·Kᵀ: against loops over heads and tokens in NumPy's float64, in the whole family."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from diffquant import Recipe, load
from diffquant.attention import BACKENDS
from diffquant.attention.naive import naive
from diffquant.attention.operands import round_operands
from diffquant.attention.registry import Backend
from diffquant.errors import DiffQuantError, UsageError
from diffquant.family.mask import Mask
from diffquant.recipe.scheme import FULL, Scheme
from tests.support.checkpoints import write_checkpoint
from tests.support.decoding import check_pieces
from tests.support.models import random_ids
from tests.support.tables import in_one_test

SCHEMES = ["8:tensor", "4:head", "3:row", "4:b4", "4:tensor:smooth", "3:head:smooth", "4:row:smooth", "3:b5:smooth"]
PADDABLE = [{"qk": text} for text in ("4:tensor", "4:head:smooth", "4:row:smooth", "4:row:rotated")]
PADDABLE += [{"p": "4:row"}, {"pv": "4:channel"}, {"pv": "4:head"}]
# Two sequences of 13 keys, one with padding on the left, one with a hole on the right.
PADDED = torch.ones(2, 13, dtype=torch.bool)
PADDED[0, :4] = PADDED[1, -3:] = False


def in_numpy(x, valid, scheme, is_keys):
    """x [B, H, T, d] with each scale's entries rounded by themselves, and what is padding at zero."""
    out = np.zeros(x.shape)
    size, largest = scheme.granularity_size or x.shape[2], 2 ** (scheme.bits - 1) - 1
    for b, sequence in enumerate(x.double().numpy()):
        real = valid[b].numpy()
        heads = sequence * real[:, None]
        if scheme.has_transform("smooth") and is_keys:
            heads = (heads - heads.sum(1, keepdims=True) / real.sum()) * real[:, None]
        top = np.abs(heads).max()
        for h, head in enumerate(heads):
            for t, row in enumerate(head):
                first = t // size * size
                spans = {"row": row, "head": head, "block": head[first : first + size]}
                shared = top if scheme.granularity == "tensor" else np.abs(spans[scheme.granularity]).max()
                scale = shared / largest if shared else 1.0
                out[b, h, t] = np.round(row / scale) * scale
    return torch.from_numpy(out)


def random_heads(heads, tokens, width=6, seed=0):
    x = torch.randn(2, heads, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    # A mean that is large beside the rest, which is what smoothing is for.
    return x + 3 * x[:, :, :1]


@pytest.mark.parametrize("length", [13, 5, 1])
@pytest.mark.parametrize("mask", [Mask(), Mask(PADDED)], ids=["whole", "padded"])
@pytest.mark.parametrize("text", SCHEMES)
def test_operands_are_rounded_as_loops_round_them(text, mask, length):
    scheme, q, k = Scheme.parse(text), random_heads(4, length), random_heads(2, 13, seed=1)
    valid = torch.ones(2, 13, dtype=torch.bool) if mask.keys is None else mask.keys
    queries, keys = round_operands(q, k, mask, scheme)
    torch.testing.assert_close(queries, in_numpy(q, valid[:, -length:], scheme, False), rtol=0, atol=1e-12)
    torch.testing.assert_close(keys, in_numpy(k, valid, scheme, True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "diffllama", "unilm-v2", "motif-grouped", "phi4flash", "motif3"])
@pytest.mark.parametrize("recipe", PADDABLE, ids=str)
def test_padding_and_batching_never_count(tmp_path, name, recipe):
    model, ids = load(write_checkpoint(tmp_path / "model", name)), random_ids(batch=2, length=13)
    model.apply_recipe(Recipe.of(**recipe))
    alone = model(ids[:1, 4:]).logits
    together = model(ids, attention_mask=torch.tensor([[0] * 4 + [1] * 9, [1] * 13])).logits
    torch.testing.assert_close(together[:1, 4:], alone, rtol=0, atol=2e-4)


@in_one_test("recipe", [{"qk": "4:row"}, {"p": "4:g4", "pv": "4:row"}])
def test_rows_read_token_by_token_are_those_of_a_whole_text(tmp_path, recipe):
    model = load(write_checkpoint(tmp_path / "model", "unilm-v2"), Recipe.of(**recipe))
    check_pieces(model, random_ids(batch=1, length=9), [1] * 9, 1e-4)


def test_every_layer_has_to_round_its_operands(tmp_path):
    model = load(write_checkpoint(tmp_path / "model", "diffllama"))
    model.apply_recipe(Recipe.of(qk="4:row", overrides={"*.layers.0.*.qk": "16"}))
    with pytest.raises(DiffQuantError, match="recipe quantizes queries and keys, but layers 1 did not"):
        model.check_quantizers_ran()
    model(random_ids())
    model.check_quantizers_ran()
    assert [attention.qk_calls for attention in model.attention_modules] == [0, 1]


@in_one_test("name", ["diffllama", "unilm-v2"])
def test_a_backend_that_rounds_operands_gets_them_as_they_are(tmp_path, monkeypatch, name):
    seen = []

    def compute(call):
        seen.append(call.qk)
        maps = [round_operands(q, k, call.mask, call.qk) for q, k in zip(call.q, call.k, strict=True)]
        return naive(replace(call, q=[q for q, _ in maps], k=[k for _, k in maps], qk=FULL))

    own = Backend("own", compute, logits="quantized", rounds_operands=True)
    monkeypatch.setitem(BACKENDS, "own", own)
    model, ids = load(write_checkpoint(tmp_path / "model", name)), random_ids(batch=2, length=13)
    model.apply_recipe(Recipe.of(qk="4:row", logits="8:row"))
    wanted = model(ids).logits
    for attention in model.attention_modules:
        attention.backend = "own"
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-4)
    assert seen == [Scheme.parse("4:row")] * len(model.attention_modules)
    model.check_quantizers_ran()


def test_half_types_are_rounded_in_float32_and_come_back(tmp_path):
    model = load(write_checkpoint(tmp_path / "model", "unilm-v2"), dtype=torch.bfloat16)
    model.apply_recipe(Recipe.of(qk="8:row"))
    assert model(random_ids()).logits.dtype == torch.bfloat16


@in_one_test(
    ("recipe", "said"),
    [
        ({"qk": "4:pair"}, "qk cannot be quantized per pair; use tensor, head, row, group, block"),
        ({"pv": "4:row:smoothq"}, "smoothq is for qk"),
        ({"p": "8:tensor"}, "p cannot be quantized per tensor; use row, group"),
        ({"pv": "4:c16"}, "pv has groups of 16 tokens of a channel; write g16"),
        ({"qk": "4:row:fullsum"}, "fullsum is for p"),
        ({"pv": "e4m3:row:pow2"}, "pow2 is for p"),
        ({"overrides": {"*.layers.0.*.k": "4:row:smooth"}}, "smooth is for qk"),
    ],
)
def test_what_operands_cannot_be_is_refused(recipe, said):
    with pytest.raises(UsageError, match=said):
        Recipe.of(**recipe)


def test_a_recipe_without_operands_has_the_form_it_had():
    assert not {"qk", "p", "pv"} & Recipe.of(logits="4:row").to_dict().keys()
    operands = {"qk": "4:b64:smooth", "p": "e4m3:row:pow2:fullsum", "pv": "nvfp4"}
    recipe = Recipe.of(**operands, overrides={"*.layers.1.*.qk": "8:row", "*.layers.1.*.pv": "8:channel"})
    assert operands.items() <= recipe.to_dict().items()
    assert Recipe.from_dict(recipe.to_dict()) == recipe
