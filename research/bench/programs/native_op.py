"""The native kernel against the op's function body in ONNX Runtime: decode, prefill, float and quantized caches.

`python -m research.bench.programs.native_op --json` prints medians and best times of interleaved repeats, and
their ratios.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnxruntime as ort
import typer

from diffquant.benchmarks.measuring import describe_environment, run_in_turns
from diffquant.errors import MissingDependencyError, UsageError
from diffquant.onnx import native
from diffquant.onnx.graph.op import AttentionAttributes
from diffquant.onnx.runtime.session import session_options
from tests.conformance.op_call import Made, Vector, one_node, random_inputs
from tests.support.apart import CORES, Threads, second_call


@dataclass(frozen=True)
class OpShape:
    """Shape of one layer's attention.

    Attributes:
        generation: 1 or 2, of the DIFF Transformer.
        pairs, kv_pairs: h and h_kv.
        width: width d of a query or key of one map.
    """

    generation: int
    pairs: int
    kv_pairs: int
    width: int


@dataclass(frozen=True)
class OpWorkload:
    """New tokens at the end of a context, over a cache that is extended in place.

    Attributes:
        context: tokens of the context, the new ones included.
        tokens: number of new tokens.
        kv_bits: bits of the cache; 0 where it has the dtype.
        dtype: "float32" or "float16".
    """

    context: int
    tokens: int
    kv_bits: int
    dtype: str = "float32"


SHAPES = {
    "v1 8/8": OpShape(1, 8, 8, 64),
    "v1 16/4": OpShape(1, 16, 4, 64),
    "v1 8/8 d128": OpShape(1, 8, 8, 128),
    "v2 9/3": OpShape(2, 9, 3, 64),
    "v2 16/4 d128": OpShape(2, 16, 4, 128),
}
WORKLOADS = [
    OpWorkload(4096, 1, 0),
    OpWorkload(1024, 1024, 0),
    OpWorkload(4096, 1, 8),
    OpWorkload(1024, 1024, 8),
    OpWorkload(4096, 1, 4),
    OpWorkload(4096, 1, 0, "float16"),
    OpWorkload(1024, 1024, 0, "float16"),
]


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    threads: Threads = CORES,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 21,
    shapes: Annotated[str, typer.Option(help=f"Some of {', '.join(SHAPES)}; all by default.")] = "",
) -> None:
    """Measure the native kernel against the op's function body in ONNX Runtime."""
    names = [name.strip() for name in shapes.split(",") if name.strip()] or list(SHAPES)
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise UsageError(f"unknown shape {', '.join(map(repr, unknown))}; choose from {', '.join(SHAPES)}")
    library = native.library_path()
    if library is None:
        raise MissingDependencyError("the native kernel is not built: python -m diffquant.onnx.native")
    results = [
        entry_of(name, workload, compare_kernel(name, workload, library, threads, repeats))
        for name in names
        for workload in WORKLOADS
    ]
    if as_json:
        about = {
            "environment": describe_environment(),
            "onnxruntime": ort.__version__,
            "kernel": native.attention_instruction_set(),
        }
        print(json.dumps(about | {"threads": threads, "results": results}, indent=2))
    else:
        print("\n".join(map(times_line, results)))


def compare_kernel(
    name: str, workload: OpWorkload, library: Path, threads: int, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of the body and of the kernel, in turns, so that what else the machine does falls on both."""
    calls = {
        path: partial(second_call, prepared_call(SHAPES[name], workload, taken, threads))
        for path, taken in {"body": None, "native": library}.items()
    }
    return run_in_turns(calls, repeats)


def entry_of(name: str, workload: OpWorkload, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians and best times of a workload, and how many times faster the native kernel is by each."""
    body, kernel = times["body"], times["native"]
    return {
        "shape": name,
        **asdict(workload),
        "body_ms": median(body),
        "native_ms": median(kernel),
        "ratio": median(body) / median(kernel),
        "body_best_ms": min(body),
        "native_best_ms": min(kernel),
        "ratio_of_best": min(body) / min(kernel),
    }


def times_line(entry: Mapping[str, Any]) -> str:
    """Line of text for one workload."""
    cache = entry["kv_bits"] or "as is"
    what = f"{entry['tokens']} of {entry['context']} tokens, {entry['dtype']}, cache {cache}"
    times = f"body {entry['body_ms']:8.3f} ms  native {entry['native_ms']:8.3f} ms"
    return f"{entry['shape']:13} {what:42} {times}  {entry['ratio']:5.2f}x  best {entry['ratio_of_best']:5.2f}x"


def prepared_call(shape: OpShape, workload: OpWorkload, library: Path | None, threads: int) -> Callable[[], None]:
    """Call of the op on random inputs, everything bound beforehand and the cache extended in place."""
    options = session_options(threads, native=library is not None)
    # Waiting threads of one session must not take the other's processors.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    call = random_call(shape, workload)
    model = one_node(call, "contrib").SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in call.inputs.items()}
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output", "cpu")
    for part in ("key", "value"):
        binding.bind_ortvalue_output(f"present_{part}", inputs[f"past_{part}"])
    return lambda: session.run_with_iobinding(binding)


def random_call(shape: OpShape, workload: OpWorkload) -> Vector:
    """A call on random inputs, whose outputs have their shapes alone."""
    attributes = AttentionAttributes(
        num_pairs=shape.pairs,
        num_kv_pairs=shape.kv_pairs,
        generation=shape.generation,
        scale=shape.width**-0.5,
        do_rotary=1,
        rotary_interleaved=1,
        kv_bit_width=workload.kv_bits,
    )
    made = Made(
        {},
        lengths=(workload.context,),
        new=workload.tokens,
        past=workload.context,
        per_token=shape.generation == 2,
        half=workload.dtype == "float16",
    )
    inputs = random_inputs(attributes, made, shape.width, np.random.default_rng(0))
    row = shape.width * (2 if shape.generation == 1 else 1)
    output = np.empty((1, workload.tokens, shape.pairs * row), inputs["query"].dtype)
    caches = {f"present_{part}": inputs[f"past_{part}"] for part in ("key", "value")}
    return Vector("", attributes, inputs, {"output": output, **caches})


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
