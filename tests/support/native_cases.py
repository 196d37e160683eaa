"""Sessions of ONNX Runtime that run the native kernel, and caches for them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from tests.support.attention_cases import Case, Inputs, one_node, random_inputs

Call = Callable[[Inputs], list[np.ndarray]]


def session(model: onnx.ModelProto, library: Path | None, threads: int = 2) -> ort.InferenceSession:
    """Session of a model, with the native kernel where a library is given."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    # An arena would hide reads and writes beyond a tensor from a sanitizer.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def native(library: Path, case: Case, threads: int = 2, dtype: str = "f4", cached: bool = True) -> Call:
    """Call of the node without a body, which nothing but the library can run."""
    kind = TensorProto.FLOAT if dtype == "f4" else TensorProto.FLOAT16
    started = session(one_node(case, None, kind, cached), library, threads)
    return lambda inputs: started.run(None, inputs)


def inputs_of(case: Case, batch: int, length: int, seed: int = 0) -> Inputs:
    """Inputs as `random_inputs` makes them, with tables for every position."""
    made = random_inputs(case, batch, length, seed)
    if case.rope:
        angles = np.arange(length + 1)[:, None] / 100.0 ** (np.arange(0, case.width, 2) / case.width)
        tables = np.tile(angles, (1, case.row // case.width))
        made |= {"cos_cache": np.cos(tables).astype("f4"), "sin_cache": np.sin(tables).astype("f4")}
    return made


def past_of(case: Case, batch: int, rows: int, dtype: str = "f4") -> list[np.ndarray]:
    """Caches whose every row is poison: NaN, or large codes of any sign."""
    shape = (batch, case.kv_pairs, rows, case.row * (case.kv_bits or 8) // 8)
    if not case.kv_bits:
        return [np.full((batch, case.kv_pairs, rows, case.row), np.nan, dtype) for _ in range(2)]
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, shape, "u1").view("i1" if case.kv_bits == 8 else "u1") for _ in range(2)]
