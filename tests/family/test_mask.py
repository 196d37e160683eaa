"""What a mask lets a query see, position by position, and what a cache over a window may forget."""

from itertools import product

import pytest
import torch

from diffquant.attention import attend
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.kernels.arguments import call_refusal
from diffquant.recipe.scheme import Scheme
from tests.support.tables import in_one_test

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
