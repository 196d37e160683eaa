from tests.support.apart import idle_memory, quantize_once
from tests.support.synthetic import sized_diffllama, synthesize


def test_memory_stays_at_a_few_blocks_and_not_at_a_tensor(tmp_path):
    synthesize(tmp_path / "source", sized_diffllama(0.36), shards=1)
    run = quantize_once(tmp_path / "source", tmp_path / "out", "4:g32")
    # The embedding alone is 131 MB; the import of torch is most of what either process holds.
    assert run["peak_anonymous"] - idle_memory() < 64e6
