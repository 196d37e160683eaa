"""The attention backends on a CUDA device, in the half types models run in. Needs torch and pytest alone."""

import pytest
import torch

from diffquant.attention import attend
from diffquant.attention.naive import naive
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.recipe.scheme import Scheme

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random_inputs(generation, length, keys, width, dtype, pairs=6, groups=3, batch=2):
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    maps = 1 if generation == "plain" else 2
    q = [randn(batch, pairs, length, width) for _ in range(maps)]
    k = [randn(batch, groups, keys, width) for _ in range(maps)]
    if generation == "v2":
        k = [k[0], k[0]]
    v = randn(batch, groups, keys, width * (2 if generation == "v1" else 1))
    lam = {
        "plain": None,
        "v1": torch.tensor(0.37, device="cuda"),
        "v2": randn(batch, pairs, length, 1).float().sigmoid(),
    }
    return q, k, v, lam[generation]


def relative_error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


def in_float64(q, k, v, lam):
    return [x.double() for x in q], [x.double() for x in k], v.double(), None if lam is None else lam.double()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize(("length", "keys"), [(129, 129), (17, 100), (1, 129)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
@pytest.mark.parametrize("backend", ["naive", "flashdiff1", "flashdiff2", "triton", "auto"])
def test_backends_equal_float64(backend, generation, dtype, width, length, keys, padded):
    if (backend, generation) == ("triton", "plain"):
        pytest.skip("one map has nothing to fuse")
    inputs = random_inputs(generation, length, keys, width, dtype)
    valid = torch.ones(2, keys, dtype=torch.bool, device="cuda")
    valid[1, : keys // 3] = not padded
    mask = Mask(keys=valid if padded else None)
    expected = naive(AttentionCall(*in_float64(*inputs), scale=width**-0.5, mask=mask))
    out = attend(AttentionCall(*inputs, scale=width**-0.5, mask=mask), backend)
    assert relative_error(out, expected) <= LIMITS[dtype]


@pytest.mark.parametrize("granularity", ["tensor", "head", "pair", "row", "b64", "row:shift"])
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
def test_simulated_logits_equal_full_maps(generation, granularity):
    inputs = random_inputs(generation, 129, 129, 64, torch.float16)
    scheme = Scheme.parse(f"8:{granularity}")
    expected = naive(AttentionCall(*inputs, scale=0.125, mask=Mask(), logits=scheme))
    out = attend(AttentionCall(*inputs, scale=0.125, mask=Mask(), logits=scheme))
    # A logit on the border of two codes may round either way.
    assert relative_error(out, expected.double()) <= 1e-2
