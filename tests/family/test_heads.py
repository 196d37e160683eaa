"""Which rows are which head, against head numbers written out by hand and attention one query at a time."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from diffquant.errors import CheckpointError
from diffquant.family.heads import PROJECTIONS, HeadLayout
from diffquant.family.spec import DiffSpec
from diffquant.model.config import DiffTransformerConfig
from tests.support.tables import in_one_test

V1 = HeadLayout(pairs=6, kv_pairs=3, head_dim=4, value_dim=8)
V2 = HeadLayout(pairs=6, kv_pairs=3, head_dim=4, value_dim=4, shares_keys=True)
PLAIN = HeadLayout(pairs=6, kv_pairs=3, head_dim=4, value_dim=4, maps=1)
GROUPED = HeadLayout(pairs=8, kv_pairs=2, head_dim=4, value_dim=8, signals_per_noise=4)
LAYOUTS = {"v1": V1, "v2": V2, "plain": PLAIN, "grouped": GROUPED}


def numbered(layout, projection):
    """A projection's output for two sequences of one token; each number says which row made it."""
    rows = torch.arange(layout.row_count(projection))
    return torch.stack([rows, rows + 1000])[:, None]


def test_adjacent_v1_heads_are_every_second_and_values_stand_whole():
    queries = V1.view_queries(numbered(V1, "q_proj"))
    assert queries.shape == (2, 12, 1, 4)
    assert queries[0, :, 0, 0].tolist() == [0, 8, 16, 24, 32, 40, 4, 12, 20, 28, 36, 44]
    assert V1.view_keys(numbered(V1, "k_proj"))[1, :, 0, 0].tolist() == [1000, 1008, 1016, 1004, 1012, 1020]
    assert V1.view_values(numbered(V1, "v_proj"))[0, 1, 0].tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


def test_in_halves_noise_heads_follow_and_values_come_in_two_parts():
    halves = replace(V1, head_order="halves")
    assert halves.view_queries(numbered(halves, "q_proj"))[0, :, 0, 0].tolist() == list(range(0, 48, 4))
    assert halves.view_values(numbered(halves, "v_proj"))[0, 1, 0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


def test_four_signal_heads_stand_before_their_noise_head():
    # Groups of five: signal head s is head (s // 4)·5 + s % 4 of the projection, noise head g is 5g + 4.
    assert (GROUPED.query_heads, GROUPED.key_heads, GROUPED.noise_heads) == (10, 4, 2)
    heads = GROUPED.view_queries(numbered(GROUPED, "q_proj"))[0, :, 0, 0] // 4
    assert heads.tolist() == [(s // 4) * 5 + s % 4 for s in range(8)] + [4, 9]
    signal, noise = GROUPED.split_query_maps(GROUPED.view_queries(numbered(GROUPED, "q_proj")))
    assert (signal.shape[1], noise.shape[1]) == (8, 2)


@in_one_test("layout", LAYOUTS.values())
def test_a_rows_order_and_the_view_of_an_output_agree(layout):
    for projection, view in zip(PROJECTIONS, (layout.view_queries, layout.view_keys, layout.view_values), strict=True):
        assert torch.equal(layout.channel_rows(projection), view(numbered(layout, projection))[0, :, 0])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_reordered_projection_has_the_same_heads(layout, projection):
    orders = [
        replace(layout, head_order=heads, channel_order=channels)
        for heads, channels in product(("adjacent", "halves"), ("half", "interleaved"))
    ]
    for source, target in product(orders, orders):
        moved = source.permutation_to(target, projection)
        if moved is None:
            moved = torch.arange(source.row_count(projection))
        assert torch.equal(moved[target.channel_rows(projection)], source.channel_rows(projection))
        back = target.permutation_to(source, projection)
        assert torch.equal(moved if back is None else moved[back], torch.arange(len(moved)))


def test_nothing_moves_between_equal_layouts():
    assert all(V1.permutation_to(V1, projection) is None for projection in PROJECTIONS)
    # Where maps share keys, and in a plain Transformer, there is no order of heads to change.
    assert V2.permutation_to(replace(V2, head_order="halves"), "k_proj") is None
    assert PLAIN.permutation_to(replace(PLAIN, head_order="halves"), "q_proj") is None


def test_interleaved_channels_become_halves():
    interleaved = replace(PLAIN, channel_order="interleaved")
    assert interleaved.permutation_to(PLAIN, "q_proj")[:8].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleaved.permutation_to(PLAIN, "v_proj") is None


def attention(layout, q, k, v, lam):
    """softmax(q1·k1)·v - λ·softmax(q2·k2)·v in float64, a signal head and a query at a time, heads found by index."""
    length, out = q.shape[0], torch.zeros(q.shape[0], layout.pairs, layout.value_dim, dtype=torch.float64)
    group = layout.signals_per_noise + 1
    kv_of_noise = layout.noise_heads // layout.kv_pairs
    for s in range(layout.pairs):
        noise = s // layout.signals_per_noise
        kv = noise // kv_of_noise
        head = {1: noise * group + s % layout.signals_per_noise, 2: noise * group + group - 1}
        for t in range(length):
            maps = []
            for number in (1, 2):
                query = q[t].view(-1, layout.head_dim)[head[number]]
                key = k[: t + 1].view(t + 1, -1, layout.head_dim)[:, 2 * kv + number - 1]
                maps.append((key @ query * layout.head_dim**-0.5).softmax(0))
            out[t, s] = (maps[0] - lam * maps[1]) @ v[: t + 1].view(t + 1, -1, layout.value_dim)[:, kv]
    return out


@in_one_test("kv_pairs", [1, 2])
def test_grouped_attention_is_that_of_pairs_with_its_noise_heads_repeated(kv_pairs):
    grouped = replace(GROUPED, kv_pairs=kv_pairs)
    pairs = replace(grouped, signals_per_noise=1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(7, grouped.row_count(projection), generator=generator, dtype=torch.float64)
        for projection in PROJECTIONS
    )
    expanded = q[:, grouped.permutation_to(pairs, "q_proj")]
    assert expanded.shape[1] == pairs.row_count("q_proj") == 16 * 4
    assert grouped.permutation_to(pairs, "k_proj") is None
    wanted = attention(grouped, q, k, v, 0.37)
    torch.testing.assert_close(attention(pairs, expanded, k, v, 0.37), wanted, rtol=0, atol=1e-14)
    # And by the views, one noise map for four signal maps.
    (signal, noise), (k1, k2) = (
        grouped.split_query_maps(grouped.view_queries(q[None])),
        grouped.split_key_maps(grouped.view_keys(k[None])),
    )
    weights = [
        (queries @ keys.repeat_interleave(queries.shape[1] // kv_pairs, 1).mT * 0.5)
        .masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        .softmax(-1)
        for queries, keys in ((signal, k1), (noise, k2))
    ]
    values = grouped.view_values(v[None]).repeat_interleave(8 // kv_pairs, 1)
    out = (weights[0] - 0.37 * weights[1].repeat_interleave(grouped.signals_per_noise, 1)) @ values
    torch.testing.assert_close(out[0].transpose(0, 1), wanted, rtol=0, atol=1e-14)


def test_layouts_of_other_heads_are_no_orders_of_each_other():
    with pytest.raises(ValueError, match=r"cannot be converted to .*their heads differ"):
        V1.permutation_to(V2, "q_proj")
    with pytest.raises(ValueError, match=r"cannot be converted to .*their heads differ"):
        replace(GROUPED, signals_per_noise=1).permutation_to(GROUPED, "q_proj")


@in_one_test(("pairs", "kv_pairs", "signals"), [(8, 2, 3), (8, 4, 4), (8, 2, 0)])
def test_groups_that_do_not_divide_the_heads_are_refused(pairs, kv_pairs, signals):
    with pytest.raises(CheckpointError, match=f"with {signals} signal maps per noise map, {pairs} pairs cannot"):
        DiffSpec(pairs, kv_pairs, head_dim=8, value_dim=16, lam="exp", signals_per_noise=signals)


def test_a_grouped_spec_counts_its_heads_and_survives_a_config():
    spec = DiffSpec(8, 2, head_dim=8, value_dim=16, lam="exp", signals_per_noise=4)
    assert (spec.query_heads, spec.key_heads, spec.attention_name) == (10, 4, "grouped DIFF V1")
    assert DiffTransformerConfig(spec=spec.to_dict()).diff_spec == spec
