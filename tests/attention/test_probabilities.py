"""Softmax weights rounded before their row's sum divides them, and the values that they multiply.

The oracles are loops over rows in NumPy's float64; floats of eight bits are cast by ml_dtypes.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from diffquant import Recipe, load
from diffquant.attention import BACKENDS, attend
from diffquant.attention.logits import softmax_weights
from diffquant.attention.operands import round_values
from diffquant.errors import DiffQuantError, UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.measure import can_pad_left, can_share_prefixes
from diffquant.recipe.scheme import Scheme
from tests.support.attention_weights import attention_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test

WEIGHTS = [
    "8:row", "3:row", "4:g4", "e4m3:row", "e4m3:g8", "e4m3:row:pow2", "8:row:fullsum", "e4m3:row:pow2:fullsum",
]  # fmt: skip
VALUES = ["8:column", "4:g4", "3:row", "4:head", "4:tensor", "e4m3:column", "4:b5"]
PADDED = torch.ones(2, 13, dtype=torch.bool)
PADDED[0, :4] = PADDED[1, -3:] = False


def to_grid(x, scheme, scale):
    """Entries of x as multiples of a scale that the scheme's format has."""
    if scheme.format.name == "e4m3":
        return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    return np.round(x / scale) * scale


def top_level(scheme):
    return 448.0 if scheme.format.name == "e4m3" else 2.0 ** (scheme.bits - 1) - 1


def weights_in_numpy(logits, visible, scheme):
    """Rows of weights, rounded as exp(x - largest) in [0, 1] and then divided by their sum."""
    out = np.zeros(logits.shape)
    for at in np.ndindex(logits.shape[:-1]):
        seen = visible[at[0], at[2]]
        if not seen.any():
            continue
        row = np.where(seen, np.exp(np.where(seen, logits[at] - logits[at][seen].max(), -np.inf)), 0.0)
        size = scheme.granularity_size or len(row)
        rounded = np.zeros_like(row)
        for first in range(0, len(row), size):
            part = row[first : first + size]
            largest = part.max() if scheme.granularity_size else 1.0
            scale = 2.0**-8 if scheme.has_transform("pow2") else largest / top_level(scheme)
            rounded[first : first + size] = to_grid(part, scheme, scale or 1.0)
        out[at] = rounded / (row if scheme.has_transform("fullsum") else rounded).sum()
    return out


def values_in_numpy(v, valid, scheme):
    out = np.zeros(v.shape)
    for b, sequence in enumerate(v * valid[:, None, :, None]):
        for h, head in enumerate(sequence):
            for t, c in np.ndindex(head.shape):
                first = t // (scheme.granularity_size or 1) * (scheme.granularity_size or 1)
                block = head[first : first + (scheme.granularity_size or 1)]
                shared = {
                    "column": head[:, c], "group": block[:, c], "row": head[t], "head": head, "tensor": sequence,
                    "block": block,
                }[scheme.granularity]  # fmt: skip
                largest = np.abs(shared).max()
                scale = largest / top_level(scheme) if largest else 1.0
                out[b, h, t, c] = to_grid(head[t, c], scheme, scale)
    return out


def random_heads(heads, tokens, width=6, seed=0, batch=2):
    return torch.randn(batch, heads, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@in_one_test("text", WEIGHTS)
def test_weights_are_rounded_before_their_row_is_divided(text):
    scheme, logits = Scheme.parse(text), 3 * random_heads(3, 7, 13)
    visible = torch.rand(2, 1, 7, 13, generator=torch.Generator().manual_seed(1)) < 0.7
    visible[0, :, 2] = False
    got = softmax_weights(logits, visible, scheme)
    wanted = weights_in_numpy(logits.numpy(), visible[:, 0].numpy(), scheme)
    torch.testing.assert_close(got, torch.from_numpy(wanted), rtol=0, atol=1e-12)
    if not scheme.has_transform("fullsum"):
        sees = visible.any(-1).expand(-1, 3, -1).double()
        torch.testing.assert_close(got.sum(-1), sees, rtol=0, atol=1e-12)


@in_one_test("text", ["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp6", "mxfp8"])
def test_blocks_of_keys_have_their_format_s_scales(text):
    scheme, logits = Scheme.parse(text), 0.1 * random_heads(2, 5, 64) - torch.arange(64.0) / 2
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    bound = scheme.format.with_tensor_scale(torch.ones(1))
    groups = weights.unflatten(-1, (-1, scheme.granularity_size))
    rounded = bound.decode(bound.encode(groups, scale := bound.compute_scale(groups, -1)), scale).flatten(-2)
    got = softmax_weights(logits, None, scheme)
    torch.testing.assert_close(got, rounded / rounded.sum(-1, keepdim=True), rtol=0, atol=1e-12)
    # Without a scale of its own above them, e4m3 block scales would lose every block this far below its row's largest.
    assert not text.startswith("nvfp4") or (got[..., 16:20] > 0).all()


@pytest.mark.parametrize("mask", [Mask(), Mask(PADDED)], ids=["whole", "padded"])
@pytest.mark.parametrize("text", VALUES)
def test_values_are_rounded_as_loops_round_them(text, mask):
    scheme, v = Scheme.parse(text), random_heads(3, 13)
    valid = torch.ones(2, 13, dtype=torch.bool) if mask.keys is None else mask.keys
    wanted = values_in_numpy(v.numpy(), valid.numpy(), scheme)
    torch.testing.assert_close(round_values(v, mask, scheme), torch.from_numpy(wanted), rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", ["4:row", "e4m3:row:pow2:fullsum", "4:g16", "nvfp4"])
@pytest.mark.parametrize("logits", ["16", "4:row", "4:tensor"])
@pytest.mark.parametrize("maps", [1, 2])
def test_blocks_of_queries_round_as_whole_maps(monkeypatch, text, logits, maps):
    monkeypatch.setattr("diffquant.attention.backends.blocks._BLOCK_ENTRIES", 200)
    q, k = [random_heads(4, 37, seed=n) for n in range(maps)], [random_heads(2, 37, seed=9 + n) for n in range(maps)]
    lam = None if maps == 1 else torch.tensor(0.4)
    call = AttentionCall(
        q, k, random_heads(2, 37, 12, seed=5), lam, scale=0.5, mask=Mask(), logits=Scheme.parse(logits),
        p=Scheme.parse(text),
    )  # fmt: skip
    assert call.has_quantized_maps
    whole = attend(call, "naive")
    torch.testing.assert_close(attend(call), whole, rtol=0, atol=1e-12)
    weights, _ = attention_weights(call)
    torch.testing.assert_close(weights @ call.v.repeat_interleave(2, 1), whole, rtol=0, atol=1e-12)


def test_only_backends_that_hold_maps_take_rounded_weights():
    q = [random_heads(4, 5)]
    call = AttentionCall(q, q, q[0], None, scale=0.5, mask=Mask(), p=Scheme.parse("8:row"))
    able = {name for name, backend in BACKENDS.items() if backend.supports(True)}
    assert {"naive", "simulated"} <= able
    for name in BACKENDS.keys() - able:
        with pytest.raises(UsageError, match="cannot quantize them or their softmax"):
            attend(call, name)


@in_one_test(
    ("recipe", "shares", "pads"),
    [
        ({"p": "4:row"}, True, True),
        ({"p": "4:g16"}, True, False),
        ({"pv": "4:row"}, True, True),
        ({"pv": "4:channel"}, False, True),
        ({"pv": "nvfp4"}, False, False),
        ({"qk": "4:row"}, True, True),
        ({"qk": "4:row:smooth"}, False, True),
        ({"qk": "4:b64"}, False, False),
        ({"qk": "4:head"}, False, True),
        ({"qk": "4:tensor"}, False, True),
        ({"qk": "8:row:smoothq"}, False, False),
        ({"qk": "8:thread"}, False, False),
    ],
)
def test_scales_over_tokens_forbid_shared_prefixes_and_padding(recipe, shares, pads):
    assert (can_share_prefixes(Recipe.of(**recipe)), can_pad_left(Recipe.of(**recipe))) == (shares, pads)


def test_every_layer_has_to_round_its_weights_and_values(tmp_path):
    model = load(write_checkpoint(tmp_path / "model", "diffllama"))
    model.apply_recipe(Recipe.of(p="4:row", pv="4:row", overrides={"*.layers.0.*.p": "16"}))
    said = "recipe quantizes values before P·V, but layers 0, 1 did not; .*softmax weights, but layers 1 did not"
    with pytest.raises(DiffQuantError, match=said):
        model.check_quantizers_ran()
    model(random_ids())
    model.check_quantizers_ran()
    assert [attention.meter.p_calls for attention in model.attention_modules] == [0, 1]
    assert [attention.pv_calls for attention in model.attention_modules] == [1, 1]
