from diffquant.benchmarks.workloads import Model
from research.bench.throughput import TRANSFORMER, V1, V2, run_throughput


def test_throughput_compares_models_of_nearly_equal_size():
    model = Model("v1", 128, 1, 2, 2, 64, 128, 192, 211)
    cells = run_throughput([model], [16], 1, "float32", "cpu", 1)
    sizes = [cell.facts["parameters"] for cell in cells]
    assert [cell.path for cell in cells] == [TRANSFORMER, V1, V2]
    # V1 adds λ alone; V2's queries are doubled.
    assert sizes[1] - sizes[0] == 4 * model.width
    assert sizes[2] > sizes[0]
