"""Weights by blocks of queries: against whole maps in float64, and against what a model computed with a window."""

import pytest
import torch

from diffquant import load
from diffquant.attention import LogitMeter
from diffquant.attention.backends import blocks
from diffquant.attention.naive import naive
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import pair_norm
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.support.attention_weights import attention_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids
from tests.support.recorded_calls import record_calls
from tests.support.tables import in_one_test

LENGTH, KEYS = 11, 13
SCHEMES = ["16", "3:tensor", "3:map", "4:tensor:shift", "3:head", "4:pair", "3:pair:shift", "4:row", "3:row:shift"]
SCHEMES += ["4:b4", "3:b5:shift", "4:static", "3:row:alike", "3:head:alike", "3:tensor:alike"]


def random_call(noises, mask, scheme, gate=None):
    """Attention of 4 pairs over 2 KV pairs whose values are unit vectors: what it gives are the weights."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads, tokens):
        return 3 * torch.randn(2, heads, tokens, 8, generator=generator, dtype=torch.float64)

    def factors():
        return torch.rand(2, 4, LENGTH, 1, generator=generator, dtype=torch.float64)

    return AttentionCall(
        [normal(4, LENGTH), normal(noises, LENGTH)],
        [normal(2, KEYS), normal(2, KEYS)],
        torch.eye(KEYS, dtype=torch.float64).expand(2, 2, KEYS, KEYS),
        factors(),
        scale=0.3,
        mask=mask,
        logits=Scheme.parse(scheme),
        ranges=torch.rand(4 + noises, generator=generator, dtype=torch.float64) * 20 + 5,
        meter=LogitMeter(),
        signal_gate=factors() if gate else None,
    )


def padded():
    valid = torch.ones(2, KEYS, dtype=torch.bool)
    valid[1, :3] = False
    return Mask(valid)


@pytest.mark.parametrize("first", [0, 4, LENGTH - 1])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("noises", "gate", "mask"),
    [(4, False, Mask()), (2, True, Mask()), (4, True, Mask(window=4)), (2, False, padded())],
    ids=["v1", "v3-grouped", "v3-window", "grouped-padded"],
)
def test_weights_by_blocks_are_those_of_whole_maps(scheme, noises, gate, mask, first, monkeypatch):
    # Blocks of two queries, so that what shares a scale lies in several of them.
    monkeypatch.setattr(blocks, "_BLOCK_ENTRIES", 2 * 2 * 8 * KEYS)
    call = random_call(noises, mask, scheme, gate)
    found, maps = attention_weights(call, first)
    assert call.meter == LogitMeter()
    torch.testing.assert_close(found, naive(call)[:, :, first:], rtol=0, atol=1e-12)
    gates = 1 if call.signal_gate is None else call.signal_gate[:, :, first:]
    torch.testing.assert_close(gates * maps[0] - call.lam[:, :, first:] * maps[1], found, rtol=0, atol=1e-12)
    seen = mask.dense(LENGTH, KEYS, call.v.device)[:, :, first:].any(-1)
    torch.testing.assert_close(maps.sum(-1), seen.expand(2, 2, 4, -1).double())


@in_one_test("recipe", [{}, {"logits": "4:row"}, {"kv": "4:row"}])
def test_weights_of_a_windowed_layer_give_the_models_own_output(tmp_path, recipe):
    model = load(write_checkpoint(tmp_path / "phi4flash", "phi4flash"), Recipe.of(**recipe), torch.float32)
    layer = next(layer.attn for layer in model.model.layers if getattr(layer.attn, "window", None))
    computed = []
    layer.out_proj.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0][0]))
    with record_calls(layer.inner_cross_attn) as calls:
        model(random_ids(1, 17))
    (call,) = calls
    assert call.mask.window == layer.window < 17
    found, _ = attention_weights(call)
    values = call.v.repeat_interleave(call.pairs // call.v.shape[1], 1)
    wanted = pair_norm(found @ values, call.post)[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(wanted, computed[0], rtol=1e-4, atol=1e-5)
    assert (found[0, :, -1, : 17 - layer.window] == 0).all()
