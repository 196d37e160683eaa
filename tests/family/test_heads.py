"""Which rows are which head, against head numbers written out by hand."""

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


@in_one_test("kv_pairs", [1, 2])
def test_grouped_queries_become_pairs_with_their_noise_heads_repeated(kv_pairs):
    grouped = replace(GROUPED, kv_pairs=kv_pairs)
    pairs = replace(grouped, signals_per_noise=1)
    q = torch.randn(1, 7, grouped.row_count("q_proj"), generator=torch.Generator().manual_seed(0))
    signal, noise = grouped.split_query_maps(grouped.view_queries(q))
    expanded = q[..., grouped.permutation_to(pairs, "q_proj")]
    wanted = signal, noise.repeat_interleave(4, 1)
    assert all(map(torch.equal, pairs.split_query_maps(pairs.view_queries(expanded)), wanted))
    assert grouped.permutation_to(pairs, "k_proj") is None


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
