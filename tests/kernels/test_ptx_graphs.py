"""The PTX machine's model of CUDA graphs held to what graphs do: nothing runs while one is captured, then all again."""

import torch

from tests.support.ptx.graphs import Graph, capture, captured


def launch(work):
    """As the machine launches: into the graph that is captured, or at once."""
    if not captured(work):
        work()


def test_what_is_captured_runs_in_order_when_it_is_replayed_at_the_same_addresses():
    x, given = torch.arange(4.0), torch.zeros(4)
    graph = Graph()
    with capture(graph):
        twice = x * 2
        launch(lambda: given.add_(twice))
        x.add_(1)
        first = x[:1]
        seen = first + 10
    assert (x.tolist(), given.tolist()) == ([0, 1, 2, 3], [0] * 4)
    graph.replay()
    # The launch comes before the addition, and the view sees what it leaves.
    assert given.tolist() == [0, 2, 4, 6]
    assert (x.tolist(), seen.tolist()) == ([1, 2, 3, 4], [11])
    x.fill_(5)
    graph.replay()
    assert given.tolist() == [10, 12, 14, 16]
    assert seen.tolist() == [16]
    launch(given.zero_)
    assert not given.any()


def test_an_address_that_moved_is_not_followed():
    """A graph that was recorded for a batch goes on with that batch's tensors."""
    x = torch.ones(2, 3)
    graph = Graph()
    with capture(graph):
        y = x + 1
    graph.replay()
    x = torch.zeros(1, 3)
    graph.replay()
    assert y.tolist() == [[2, 2, 2]] * 2
