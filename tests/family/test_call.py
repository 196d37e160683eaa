"""What an attention is asked for: its layout of pairs, its mask, and what is refused about it."""

import json
from itertools import product

import pytest
import torch

from diffquant.attention import attend
from diffquant.errors import CheckpointError, UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.family.spec import DiffSpec, read_spec
from diffquant.kernels.arguments import call_refusal
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


V1 = DiffSpec(pairs=4, kv_pairs=2, head_dim=16, value_dim=32, lam="exp", post_norm="affine", scale_by_init=True)


def test_what_is_written_is_read_again():
    assert read_spec(json.loads(json.dumps(V1.to_dict()))) == V1
    assert read_spec(V1.to_dict() | {"soft_cap": None, "post_norm_eps": 0}).post_norm_eps == 0


@in_one_test(
    ("changes", "message"),
    [
        ({"rope": "interleave"}, "rope is 'interleave', not 'half' or 'interleaved' or 'none'"),
        ({"rope": None}, "rope is None"),
        ({"head_order": "paired"}, "head_order is 'paired', not 'adjacent' or 'halves'"),
        ({"scale_by_init": "no"}, "scale_by_init is 'no', not bool"),
        ({"shared_k": 1}, "shared_k is 1"),
        ({"maps": True}, "maps is True, not 1 or 2"),
        ({"pairs": 4.0}, "pairs is 4.0, not int"),
        ({"lam_init_offset": "1"}, "lam_init_offset is '1'"),
        ({"soft_cap": 30.0}, "soft_cap is not a known key"),
        ({"lambda": "exp", "post_norm": "rms"}, "lambda is not a known key; post_norm is 'rms'"),
    ],
)
def test_a_value_that_no_specification_has_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_spec(V1.to_dict() | changes)


def test_what_is_missing_is_named():
    with pytest.raises(CheckpointError, match=r"pairs is missing; value_dim is missing$"):
        read_spec({"kv_pairs": 2, "head_dim": 16})
    with pytest.raises(CheckpointError, match="not an object"):
        read_spec(["pairs"])


# Left padding, holes, no padding, and nothing but padding.
ROWS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0, 1, 1, 0], [1] * 9, [0] * 9]).bool()


def sees(row, query, key, window):
    """Whether a query sees a key, by what the docstrings say and one pair at a time."""
    between = sum(row[key + 1 : query + 1])
    return row[query] and row[key] and key <= query and (window is None or between < window)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 20])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_query_sees_the_newest_keys_that_are_no_padding(window, length):
    keys = ROWS.shape[1]
    padded, plain = Mask(ROWS, window), Mask(None, window)
    seen = padded.dense(length, keys, torch.device("cpu"))
    unpadded = plain.dense(length, keys, torch.device("cpu"))
    for row, query, key in product(range(len(ROWS)), range(length), range(keys)):
        wanted = sees(ROWS[row].tolist(), query + keys - length, key, window)
        assert bool(seen[row, 0, query, key]) == wanted, (row, query, key)
        if row == 2:
            assert (unpadded is None or bool(unpadded[0, 0, query, key])) == wanted, (query, key)
    parts = [padded.dense_rows(slice(i, i + 1), length, keys, torch.device("cpu")) for i in range(length)]
    assert torch.equal(torch.cat(parts, 2), seen)


@in_one_test("window", [None, 1, 2, 4, 20])
def test_keys_that_are_not_needed_are_seen_by_no_later_query(window):
    """And one more forgotten would be missed, unless none is needed."""
    keys = ROWS.shape[1]
    for rows in (ROWS, ROWS[:1], ROWS[1:2], ROWS[3:]):
        later = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.bool)], 1)
        seen = Mask(later, window).dense(1, keys + 1, torch.device("cpu"))[:, 0, 0, :-1].any(0)
        oldest_seen = int(seen.int().argmax()) if seen.any() else keys
        needed = Mask(rows, window).count_needed_keys(keys)
        assert needed == (keys if window is None else keys - oldest_seen)
    assert Mask(None, window).count_needed_keys(keys) == (keys if window is None else min(keys, window - 1))


@pytest.mark.parametrize("logits", ["16", "6:row", "4:tensor"])
@pytest.mark.parametrize("keys", [ROWS[:3], None], ids=["padded", "plain"])
def test_backends_compute_a_window_as_dense_softmax_in_float64_does(keys, logits):
    generator = torch.Generator().manual_seed(0)
    scheme = Scheme.parse(logits)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = [normal(3, 4, 7, 8) for _ in "12"], [normal(3, 2, 9, 8) for _ in "12"], normal(3, 2, 9, 16)
    lam, mask = torch.tensor(0.3), Mask(keys, 3)
    rows = torch.ones(3, 9, dtype=torch.bool) if keys is None else keys
    wanted = torch.zeros(3, 4, 7, 16, dtype=torch.float64)
    for row, pair, query in product(range(3), range(4), range(7)):
        seen = [key for key in range(9) if sees(rows[row].tolist(), query + 2, key, 3)]
        if seen:
            maps = [(k[m][row, pair // 2, seen] @ q[m][row, pair, query] * 0.2).softmax(0) for m in (0, 1)]
            wanted[row, pair, query] = (maps[0] - lam * maps[1]) @ v[row, pair // 2, seen]
    if not scheme.quantizes:
        for backend in ("naive", "flashdiff1", "flashdiff2", "auto"):
            y = attend(AttentionCall(q, k, v, lam, scale=0.2, mask=mask), backend)
            torch.testing.assert_close(y, wanted, rtol=0, atol=1e-8)
        return
    naive, simulated = (
        attend(AttentionCall(q, k, v, lam, scale=0.2, mask=mask, logits=scheme), b) for b in ("naive", "simulated")
    )
    torch.testing.assert_close(simulated, naive, rtol=0, atol=1e-12)
    assert 0 < (naive - wanted).abs().max() < 0.5


def test_the_kernels_refuse_windows_that_hide_something():
    q = torch.zeros(1, 2, 4, 64, dtype=torch.float16)
    call = AttentionCall((q,), (q,), q, None, scale=1.0, mask=Mask(None, 3))
    assert call_refusal(call) == "the kernel supports no window, but queries see only the newest 3 of 4 keys"
    assert call_refusal(AttentionCall((q,), (q,), q, None, scale=1.0, mask=Mask(None, 4))) is None


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize(("length", "keys"), [(5, 5), (3, 7), (7, 4), (1, 6)])
def test_no_query_sees_a_key_beyond_its_reach_and_the_last_sees_up_to_it(length, keys, padding):
    valid = torch.arange(keys)[None] >= padding if padding else None
    mask = Mask(valid)
    for start, stop in product(range(length), range(1, length + 1)):
        if start < stop:
            seen = mask.dense_rows(slice(start, stop), length, keys, torch.device("cpu"))
            reach = mask.visible_end(slice(start, stop), length, keys)
            seen = torch.ones(keys, dtype=torch.bool) if seen is None else seen.any(-2).flatten()
            assert reach >= 1
            assert not seen[reach:].any()
            assert seen[reach - 1] or not seen.any()
