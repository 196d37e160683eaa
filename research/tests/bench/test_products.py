"""The library's products beside ONNX Runtime's."""

import pytest

from diffquant.onnx.native import count_matmul_calls, matmul_instruction_set
from research.bench.programs import products


def test_products_are_timed_in_turns_and_the_library_computes_its_own(monkeypatch):
    if (name := matmul_instruction_set()) is None:
        pytest.skip("no library, or ONNX Runtime's own products are used here")
    monkeypatch.setitem(products.SHAPES, "tiny", (96, 40))
    monkeypatch.setattr(products, "_COLD_BYTES", 20_000)
    product = products.Product("tiny", 3, 4, 32)
    calls = count_matmul_calls()
    times = products.measure(product, [name], 1, 2)
    assert product.matrices == 11
    assert count_matmul_calls() == calls + 2 * 2 * 11
    assert list(times) == [products.STOCK, name]
    assert [len(turns) for turns in times.values()] == [2, 2]
    assert products.ratios({products.STOCK: [3.0, 9.0, 4.0], name: [2.0, 1.0, 5.0]}) == {
        "ratio": {name: 2.0},
        "ratio_of_best": {name: 3.0},
    }
