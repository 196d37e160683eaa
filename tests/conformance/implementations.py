"""Whoever computes the op, as one function of a vector each: both bodies, the native kernel, onnx's own evaluator."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from onnx.reference import ReferenceEvaluator

from diffquant.errors import UsageError
from diffquant.onnx.graph.body import BodyKind
from diffquant.onnx.native import library_path
from tests.conformance.formula import spans
from tests.conformance.op_call import OUTPUTS, Vector, one_node

Outputs = dict[str, np.ndarray]

# Largest differences of the output and of a cache's floats.
TOLERANCES = {np.dtype(np.float32): (2e-5, 1e-6), np.dtype(np.float16): (5e-3, 2e-3)}


@dataclass(frozen=True)
class Verdict:
    """One implementation's result on one test vector.

    Attributes:
        error: largest absolute difference of the real rows of `output`; None if it is not served.
        passed: whether everything is within the tolerances, or the vector is not served.
        note: reason why it is not served, or what differs.
    """

    error: float | None
    passed: bool
    note: str = ""

    def __str__(self) -> str:
        if self.error is None:
            return "-"
        return f"{self.error:.0e}" if self.passed else f"WRONG {self.error:.0e}"


def contrib_body(vector: Vector) -> Outputs:
    """The body of one GroupQueryAttention in ONNX Runtime.

    Raises:
        UsageError: it does not serve the call.
    """
    starts = [start for start, _ in spans(vector.inputs)]
    if vector.inputs["query"].shape[1] > 1 and len(starts) > 1 and any(starts):
        raise UsageError("GroupQueryAttention takes a chunk after a past for one sequence at a time")
    return _run_session(vector, "contrib", None)


def standard_body(vector: Vector) -> Outputs:
    """The body in standard ops, in ONNX Runtime.

    Raises:
        UsageError: it does not serve the call.
    """
    return _run_session(vector, "pure", None)


def reference_evaluator(vector: Vector) -> Outputs:
    """The body in standard ops, in onnx's reference evaluator.

    Raises:
        UsageError: it does not serve the call.
    """
    return dict(zip(OUTPUTS, ReferenceEvaluator(one_node(vector, "pure")).run(None, dict(vector.inputs)), strict=True))


def native_kernel(vector: Vector) -> Outputs:
    """The native kernel, without a body to fall back to.

    Raises:
        UsageError: it is not built.
    """
    library = library_path()
    if library is None:
        raise UsageError("it is not built: python -m diffquant.onnx.native")
    return _run_session(vector, None, library)


IMPLEMENTATIONS: Mapping[str, Callable[[Vector], Outputs]] = {
    "GroupQueryAttention body": contrib_body,
    "standard body": standard_body,
    "native kernel": native_kernel,
    "reference evaluator": reference_evaluator,
}


def judge(vector: Vector, implementation: Callable[[Vector], Outputs]) -> Verdict:
    """Run one test vector on an implementation."""
    try:
        outputs = implementation(vector)
    except UsageError as reason:
        return Verdict(None, True, str(reason))
    except Exception as failure:  # runtimes have exception types of their own
        return Verdict(math.inf, False, str(failure).split("\n")[0])
    tolerance, kept = TOLERANCES[vector.inputs["query"].dtype]
    errors, notes = [], []
    for b, (start, end) in enumerate(spans(vector.inputs)):
        rows = slice(end - start)
        got, wanted = (side["output"][b, rows].astype(np.float64) for side in (outputs, vector.outputs))
        errors.append(np.abs(got - wanted).max())
        for name in OUTPUTS[1:]:
            cached, expected = (side[name][b, :, :end].astype(np.float64) for side in (outputs, vector.outputs))
            allowed = 0.0 if vector.attributes.kv_bit_width else kept
            if not np.abs(cached - expected).max() <= allowed:
                notes.append(f"{name} differs")
    # NumPy's maximum is NaN where one is, and NaN is within no tolerance.
    error = float(np.max(errors))
    return Verdict(error, error <= tolerance and not notes, "; ".join(dict.fromkeys(notes)))


def _run_session(vector: Vector, kind: BodyKind | None, library: Path | None) -> Outputs:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    model = one_node(vector, kind).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return dict(zip(OUTPUTS, session.run(None, dict(vector.inputs)), strict=True))
