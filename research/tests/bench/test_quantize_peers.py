import pytest
import torch

from diffquant.checkpoints.source import open_source
from diffquant.errors import MissingDependencyError
from diffquant.quantization.quantize import quantize
from research.bench.programs import quantize_peers
from research.bench.programs.quantize_peers import in_turns, packed_weights, summary
from tests.support.checkpoints import write_diffllama


def test_the_peer_is_given_every_weight_that_quantize_packs(tmp_path):
    source = open_source(write_diffllama(tmp_path / "source"))
    weights = packed_weights(source)
    packed = {error.name for error in quantize(source, tmp_path / "out", "4:g32").errors}
    assert len(weights) == len(packed) > 0
    expected = [source.checkpoint.read(name) for name in packed]
    assert all(any(torch.equal(weight, other) for other in expected) for weight in weights)


def test_ways_take_turns_and_the_first_one_does_not_count():
    order = []
    times = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, turns=3)
    assert order == list("abababab")
    assert [len(each["seconds"]) for each in times.values()] == [3, 3]


def test_the_summary_gives_medians_and_rates():
    text = summary({"one": {"seconds": [4.0, 2.0, 3.0], "cpu_seconds": [5.0, 5.0, 1.0]}}, 6 * 10**9)
    for part in ("3.00 (2.00-4.00)", "5.00", "2.000"):
        assert part in text


def test_without_torchao_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(quantize_peers, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="ONLY=quantizers"):
        quantize_peers.main()
