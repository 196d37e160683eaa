"""The exported graph of each family is the one that is kept; `python -m tests.golden graphs` keeps it anew."""

from difflib import unified_diff

import pytest

from tests.golden.graphs import GRAPHS, KEPT, graph_text


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_the_one_that_was_kept(name, tmp_path):
    kept, now = (KEPT / f"{name}.txt").read_text(), graph_text(tmp_path, name)
    assert not list(unified_diff(kept.splitlines(), now.splitlines(), "kept", "now", lineterm="", n=1))


def test_every_text_has_its_graph():
    assert {file.stem for file in KEPT.iterdir()} == set(GRAPHS)
