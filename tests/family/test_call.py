"""What one attention is asked for, and what is refused about it."""

import pytest
import torch

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.recipe.scheme import Scheme
from tests.support.tables import in_one_test

Q = [torch.zeros(2, 6, 5, 64, dtype=torch.float16) for _ in range(2)]
K = [torch.zeros(2, 3, 7, 64, dtype=torch.float16) for _ in range(2)]
V = torch.zeros(2, 3, 7, 128, dtype=torch.float16)


def call(**changes):
    """A V1 call whose arguments agree, some of them changed."""
    return AttentionCall(**({"q": Q, "k": K, "v": V, "lam": torch.tensor(0.3), "scale": 1, "mask": Mask()} | changes))


def test_lengths_of_a_call():
    assert (call().maps, call().pairs, call().query_count, call().key_count) == (2, 6, 5, 7)
    assert call(q=Q[:1], k=K[:1], lam=None).maps == 1
    assert not call().shares_keys
    assert call(k=[K[0], K[0]]).shares_keys


@in_one_test(
    ("changes", "message"),
    [
        ({"q": Q[:1]}, "one map without λ or two maps with it"),
        ({"lam": None}, "one map without λ or two maps with it"),
        ({"q": [Q[0], Q[1][0]]}, r"q2 \[6, 5, 64\]"),
        ({"k": [K[0], K[1][:, :, 1:]]}, r"k2 \[2, 3, 6, 64\], not \[2, 3, 7, 64\]"),
        ({"k": [x[..., :32] for x in K]}, r"k1 .*; k2 "),
        ({"q": [x[:, :5] for x in Q]}, "3 KV pairs do not divide 5 query pairs"),
        ({"q": [Q[0], Q[1][:, :4]]}, "4 noise heads must divide 6 query pairs"),
        ({"q": [Q[0], Q[1][:, :2]]}, "2 noise heads must divide 6 query pairs and be a multiple of 3 KV pairs"),
        ({"q": [Q[0], Q[1][:, :0]]}, "0 noise heads must divide"),
        ({"v": V.float()}, "v is float32; use one"),
        ({"v": V.to("meta")}, "v is on meta"),
        ({"lam": torch.zeros(2, 6, 5)}, r"lam \[2, 6, 5\], not one value or \[2, 6, 5, 1\]"),
        ({"mask": Mask(torch.ones(2, 7))}, r"mask torch.float32 \[2, 7\], not torch.bool \[2, 7\]"),
        ({"mask": Mask(torch.ones(3, 7, dtype=torch.bool))}, r"mask torch.bool \[3, 7\], not torch.bool \[2, 7\]"),
        (
            {"mask": Mask(explicit=torch.ones(3, 1, 5, 7, dtype=torch.bool))},
            r"mask torch.bool \[3, 1, 5, 7\], not torch.bool \[2, 1, 5, 7\]",
        ),
        ({"mask": Mask(window=0)}, "window 0, expected a positive number of keys"),
        ({"post": PairNorm(1e-5, torch.ones(64))}, r"norm weight \[64\], not \[128\]"),
        ({"logits": Scheme.parse("4:static")}, "need 12 calibrated ranges, one per head of each map"),
    ],
)
def test_arguments_that_disagree_are_named(changes, message):
    with pytest.raises(UsageError, match=message):
        call(**changes)


def test_a_backward_pass_may_come_where_anything_wants_a_gradient():
    learned = call(lam=torch.tensor(0.3, requires_grad=True))
    with torch.enable_grad():
        assert learned.needs_gradient
        assert not call().needs_gradient
    with torch.no_grad():
        assert not learned.needs_gradient
