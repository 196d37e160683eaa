"""Sizes beside 16 bits, the ticks of a logarithmic axis, and the frame of a plot."""

from matplotlib.figure import Figure

from diffquant.reports.plots import set_log_y_scale
from diffquant.reports.tables import bytes_at_16_bits, compare_size, stored_bits_per_weight
from tests.support.tables import in_one_test


def test_stored_bits_are_all_bytes_over_the_weights():
    assert stored_bits_per_weight(576, 1024) == 4.5
    assert stored_bits_per_weight(0, 0) == 0
    assert stored_bits_per_weight(3, 1) == 24
    assert bytes_at_16_bits(1024) == 2048


@in_one_test(
    ("source", "is_of_16_bits"), [(20_000_000, True), (20_190_000, True), (20_210_000, False), (19_790_000, False)]
)
def test_a_source_within_a_percent_of_16_bits_is_not_set_beside_them_once_more(source, is_of_16_bits):
    told = compare_size(5_000_000, source, 10_000_000)
    assert told.startswith(f"5.0 MB, {5_000_000 / source:.1%} of the source's {source / 1e6:.1f} MB")
    assert ("25.0% of 16 bits' 20.0 MB" in told) != is_of_16_bits


@in_one_test(
    ("limits", "ticks"),
    [
        ((1, 100), ["1", "2", "5", "10", "20", "50", "100"]),
        ((1, 499), ["1", "2", "5", "10", "20", "50", "100", "200"]),
        ((1, 501), ["1", "10", "100"]),
        ((0.01, 1000), ["0.01", "0.1", "1", "10", "100", "1,000"]),
    ],
)
def test_ticks_are_written_out_and_closer_where_an_axis_spans_little(limits, ticks):
    axis = Figure().subplots()
    axis.set_ylim(*limits)
    set_log_y_scale(axis)
    # A locator may give a tick beyond either end.
    shown = [
        axis.yaxis.get_major_formatter()(value)
        for value in axis.yaxis.get_majorticklocs()
        if limits[0] <= value * 1.0001 and value <= limits[1] * 1.0001
    ]
    assert shown == ticks
    assert len(axis.yaxis.get_minorticklocs()) == 0
