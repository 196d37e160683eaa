"""`--like`: operands of attention beside the formulas that the kernels' papers and sources give, in NumPy's float64.

Each formula is of one head of one map; maps, λ, gates and norms around it are the family's. Numbers are cast by
ml_dtypes.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from diffquant import Recipe, load
from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.family.norm import pair_norm
from diffquant.recipe.numbers.simulation import make_rotation_matrix
from diffquant.recipe.presets import LIKE
from diffquant.verbs.recipes import recipe_from_options
from tests.support.checkpoints import PHI4FLASH, SOURCES, write_checkpoint

LENGTH = 150


def fp8(x):
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def fp4(x):
    return x.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


def by_tokens(x, groups, rounded):
    """Rows of x [T, d] rounded together by the label that each has."""
    out = np.zeros_like(x)
    for label in np.unique(groups):
        out[groups == label] = rounded(x[groups == label])
    return out


def integers(x, top):
    """absmax integers: 2411.10958, equation 2."""
    scale = np.abs(x).max() / top
    return np.round(x / scale) * scale


def e4m3(x):
    scale = np.abs(x).max() / 448
    return fp8(x / scale) * scale


def microscaled(x):
    """φ of 2505.11594, equation 1, along the last axis: 16 values in FP4 under max/6 in e4m3."""
    length = x.shape[-1]
    blocks = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % 16)]).reshape(*x.shape[:-1], -1, 16)
    scale = fp8(np.abs(blocks).max(-1, keepdims=True) / 6)
    rounded = fp4(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)) * scale
    return rounded.reshape(*x.shape[:-1], -1)[..., :length]


def unnormalized(logits, queries):
    """exp(S - max) over the keys that each query sees."""
    seen = np.arange(logits.shape[1]) <= np.arange(logits.shape[1] - queries, logits.shape[1])[:, None]
    masked = np.where(seen, logits, -np.inf)
    return np.exp(masked - masked.max(1, keepdims=True))


def thread_of_query(t):
    """Rows of a warp's 32 that one of its threads holds: i mod 8 (2411.10958, section 3.2)."""
    return t // 32 * 8 + t % 8


def thread_of_key(t):
    """Columns of 64 that one of a warp's threads holds: 8n + 2i and 8n + 2i + 1."""
    return t // 64 * 4 + t % 8 // 2


def sage2(q, k, v, scale, top=127, smooths_queries=False):
    """SageAttention 2: INT8 or INT4 per thread of Q and K - mean K; FP8 P times 448; FP8 V per channel."""
    k = k - k.mean(0)
    tokens, means = np.arange(len(q)), np.zeros_like(q)
    if smooths_queries:
        for first in range(0, len(q), 128):
            means[first : first + 128] = q[first : first + 128].mean(0)
    codes = [
        by_tokens(x, label(tokens), lambda part: integers(part, top))
        for x, label in ((q - means, thread_of_query), (k, thread_of_key))
    ]
    p = unnormalized((codes[0] @ codes[1].T + means @ k.T) * scale, len(q))
    of_channel = np.abs(v).max(0) / 448
    return fp8(p * 448) @ fp8(v / of_channel) * of_channel / 448 / p.sum(1, keepdims=True)


def sage2_int4(q, k, v, scale):
    return sage2(q, k, v, scale, top=7, smooths_queries=True)


def nvfp4_attention(q, k, v, scale, extra=0.0):
    """P in two levels: times 448·6, then φ along the keys; the sum is of P itself (2505.11594, section 3.3)."""
    p = unnormalized((microscaled(q) @ microscaled(k).T + extra) * scale, len(q))
    rounded = microscaled(p * (448 * 6)) / (448 * 6)
    return rounded @ microscaled(v.T).T / p.sum(1, keepdims=True)


def sage3(q, k, v, scale):
    """SageAttention 3: K loses its mean, Q that of each 128 rows, whose product with K is added in full."""
    k = k - k.mean(0)
    means = np.concatenate([np.broadcast_to(x.mean(0), x.shape) for x in np.split(q, range(128, len(q), 128))])
    return nvfp4_attention(q - means, k, v, scale, means @ k.T)


def fa3(q, k, v, scale):
    """FlashAttention-3, section 3.3: Q·M and K·M for an orthogonal M, FP8 by blocks of 128 tokens; P times 2^8."""
    m = make_rotation_matrix(q.shape[1]).numpy()
    tile = np.arange(len(q)) // 128
    q, k, v = (by_tokens(x, tile, e4m3) for x in (q @ m, k @ m, v))
    p = unnormalized(q @ k.T * scale, len(q))
    return fp8(p * 256) / 256 @ v / p.sum(1, keepdims=True)


FORMULAS = {
    "sage2": sage2, "sage2-int4": sage2_int4, "sage3": sage3, "fa3-fp8": fa3, "modelopt-nvfp4": nvfp4_attention,
}  # fmt: skip


@pytest.mark.parametrize("kernel", LIKE)
@pytest.mark.parametrize("name", [*SOURCES, *PHI4FLASH])
def test_the_whole_family_computes_each_kernel_s_formula(tmp_path, name, kernel):
    model = load(write_checkpoint(tmp_path / "model", name)).double()
    attention, spec = model.attention_modules[0], model.config.diff_spec
    shapes = (
        (attention.layout.query_heads, spec.head_dim), (spec.key_heads, spec.head_dim), (spec.kv_pairs, spec.value_dim),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, LENGTH, d, dtype=torch.float64, generator=generator) for h, d in shapes)
    k = k + 3 * k[:, :, :1]
    lam = None if spec.maps == 1 else torch.full((1, spec.pairs, LENGTH, 1), 0.4, dtype=torch.float64)
    gate = None if spec.lam != "two-gates" else torch.full((1, spec.pairs, LENGTH, 1), 0.7, dtype=torch.float64)
    outputs = []
    for queries, keys in zip(attention.layout.split_query_maps(q), attention.layout.split_key_maps(k), strict=True):
        group = queries.shape[1] // spec.kv_pairs
        heads = [
            FORMULAS[kernel](
                queries[0, h].numpy(), keys[0, h // group].numpy(), v[0, h // group].numpy(), attention.scale
            )
            for h in range(queries.shape[1])
        ]
        outputs.append(torch.from_numpy(np.stack(heads))[None].repeat_interleave(spec.pairs // len(heads), 1))
    wanted = outputs[0] if gate is None else gate * outputs[0]
    if lam is not None:
        wanted = wanted - lam * outputs[1]
    model.apply_recipe(Recipe.of(**LIKE[kernel]))
    got = attention.attend(q, k, v, lam, Mask(), gate)
    wanted = pair_norm(wanted, attention.pair_norm_settings()).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def test_a_kernel_stands_beside_presets_and_settings():
    both = Recipe.parse(recipe_from_options(like="sage3", preset="int4"))
    assert both == Recipe.of(weights="4:g32", **LIKE["sage3"])
    beside = Recipe.parse(recipe_from_options(like="sage3", pv="e4m3:channel", kv="8"))
    assert (
        beside
        == Recipe.parse({"like": "sage3", "pv": "e4m3:channel", "kv": 8})
        == Recipe.of(kv=8, **{**LIKE["sage3"], "pv": "e4m3:channel"})
    )
    with pytest.raises(
        UsageError, match=r"recipe and like=.* cannot be combined.*qk 8:thread:smooth, p e4m3:row:fullsum"
    ):
        recipe_from_options(recipe=Path("recipe.yaml"), like="sage2")
    with pytest.raises(UsageError, match=r"unknown kernel 'sage1'.*choose from sage2"):
        Recipe.parse(recipe_from_options(like="sage1"))
