"""The library's products with codes against ONNX Runtime's own MatMulNBits, for each shape, number of rows and format.

`python -m research.bench.programs.products --json FILE` times single products in turns: for few rows, as a model
decodes, as many matrices one after another as fill a processor's caches more than once; for many rows two of them.
With one thread the process's seconds on a processor count, which nothing that runs beside it takes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnxruntime as ort
import typer
from onnx import ModelProto, TensorProto, helper, numpy_helper

from diffquant.benchmarks.measuring import describe_environment, run_in_turns
from diffquant.errors import MissingDependencyError, UsageError
from diffquant.onnx import native
from diffquant.onnx.graph.op import CONTRIB, DOMAIN, VERSION
from diffquant.onnx.graph.ops import MATMUL
from diffquant.onnx.options import DEFAULT_OPSET, IR_VERSION
from diffquant.onnx.runtime.session import session_options
from diffquant.support.files import write_json
from tests.support.apart import CORES, JsonFile, Threads, second_call
from tests.support.native_kernels import matmul_instruction_set, use_matmul_kernel

STOCK = "ONNX Runtime"
# Of SmolLM2-135M: query, key and value in one, the attention's output, gate and up in one, down, and the head.
SHAPES = {"qkv": (576, 960), "o": (576, 576), "gate+up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
ROWS = (1, 4, 16, 64, 128, 1024)
# A scale for each channel is stored as one for each of its longest blocks: 64 columns of 576, 256 of 1536.
FORMATS: dict[str, tuple[int, int | None]] = {
    f"{bits}:g{block}": (bits, block) for bits in (4, 8) for block in (32, 64, 128)
}
FORMATS |= {f"{bits}:channel": (bits, None) for bits in (4, 8)}
# The head gives the last position alone, and batches of them.
_HEAD_ROWS = 16
_FEW_ROWS = 16
_COLD_BYTES = 64 << 20


@dataclass(frozen=True)
class Product:
    """A product with codes.

    Attributes:
        shape: name of its matrix in SHAPES.
        rows: rows of activations.
        bits: 4 or 8.
        block: columns that share a scale.
    """

    shape: str
    rows: int
    bits: int
    block: int

    @property
    def matrices(self) -> int:
        """How many matrices take turns, so that few rows find their codes in memory as a model's do."""
        width, channels = SHAPES[self.shape]
        return max(2, -(-_COLD_BYTES * 8 // (width * channels * self.bits))) if self.rows <= _FEW_ROWS else 2


def products(formats: Sequence[str]) -> list[Product]:
    """Every product to be measured in these formats of FORMATS."""
    found = []
    for bits, block in map(FORMATS.__getitem__, formats):
        for shape, (width, _) in SHAPES.items():
            shared = block or max(size for size in (64, 128, 256) if width % size == 0)
            for rows in ROWS:
                product = Product(shape, rows, bits, shared)
                if product not in found and (shape != "head" or rows <= _HEAD_ROWS):
                    found.append(product)
    return found


def main(
    file: JsonFile = None,
    kernels: Annotated[
        str, typer.Option(help="Instruction sets of the library, with commas; its own choice by default.")
    ] = "",
    formats: Annotated[str, typer.Option(help=f"Some of {', '.join(FORMATS)}; all by default.")] = "",
    threads: Threads = CORES,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 7,
) -> None:
    """Measure products with codes against ONNX Runtime's own."""
    if native.library_path() is None:
        raise MissingDependencyError("the native library is not built: python -m diffquant.onnx.native")
    chosen = [name.strip() for name in formats.split(",") if name.strip()] or list(FORMATS)
    if unread := [name for name in chosen if name not in FORMATS]:
        raise UsageError(f"unknown format {', '.join(map(repr, unread))}; choose from {', '.join(FORMATS)}")
    names = [name.strip() for name in kernels.split(",") if name.strip()] or [matmul_instruction_set() or ""]
    unknown = [name for name in names if not use_matmul_kernel(name)]
    if unknown:
        raise UsageError(
            f"this processor runs no kernel called {', '.join(map(repr, unknown))}; name others by --kernels"
        )
    rows = []
    for product in products(chosen):
        times = measure(product, names, threads, repeats)
        rows.append(asdict(product) | {"matrices": product.matrices, "ms": times} | ratios(times))
        print(line(product, times), flush=True)
    if file:
        about = {"environment": describe_environment("onnx", "onnxruntime"), "threads": threads, "shapes": SHAPES}
        write_json(file, about | {"products": rows})


def measure(product: Product, kernels: Sequence[str], threads: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of a product by ONNX Runtime and by each kernel, in turns."""
    model = products_model(product)
    calls = {STOCK: prepared_call(model, product, threads, stock=True)}
    for name in kernels:
        use_matmul_kernel(name)
        calls[name] = prepared_call(model, product, threads, stock=False)
    # What runs beside a single thread does not count.
    clock = time.process_time if threads == 1 else time.perf_counter
    times = run_in_turns({name: partial(second_call, call, clock) for name, call in calls.items()}, repeats)
    return {name: [ms / product.matrices for ms in turns] for name, turns in times.items()}


def ratios(times: dict[str, list[float]]) -> dict[str, Any]:
    """How many times as fast as ONNX Runtime each kernel is, by medians and by best times."""
    stock = times[STOCK]
    others = {name: ms for name, ms in times.items() if name != STOCK}
    return {
        "ratio": {name: median(stock) / median(ms) for name, ms in others.items()},
        "ratio_of_best": {name: min(stock) / min(ms) for name, ms in others.items()},
    }


def line(product: Product, times: dict[str, list[float]]) -> str:
    """Line of text for one product."""
    width, channels = SHAPES[product.shape]
    speeds = {name: product.rows * width * channels / median(ms) / 1e6 for name, ms in times.items()}
    told = "  ".join(f"{name} {speed:7.1f}" for name, speed in speeds.items())
    gained = "  ".join(f"{ratio:5.2f}x" for ratio in ratios(times)["ratio"].values())
    what = f"{product.bits}:g{product.block} {product.shape} {product.rows}"
    return f"{what:22} G multiply-adds/s: {told}  {gained}"


def prepared_call(model: ModelProto, product: Product, threads: int, stock: bool) -> Callable[[], object]:
    """Call of all matrices' products with one input, outputs bound beforehand."""
    options = session_options(threads, native=not stock)
    # Waiting threads of one session must not take the other's processors.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not stock:
        model = _in_domain(model, DOMAIN)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    width, channels = SHAPES[product.shape]
    x = np.random.default_rng(0).standard_normal((product.rows, width), np.float32)
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(x))
    y = ort.OrtValue.ortvalue_from_numpy(np.zeros((product.rows, channels), np.float32))
    for output in session.get_outputs():
        binding.bind_ortvalue_output(output.name, y)
    return lambda: session.run_with_iobinding(binding)


def products_model(product: Product) -> ModelProto:
    """Model of ONNX Runtime's own products of one x with random matrices of a shape."""
    rng = np.random.default_rng(0)
    width, channels = SHAPES[product.shape]
    blocks = -(-width // product.block)
    attributes: dict[str, Any] = {
        "K": width,
        "N": channels,
        "bits": product.bits,
        "block_size": product.block,
        "accuracy_level": 4,
    }
    constants, nodes = [], []
    for i in range(product.matrices):
        codes = rng.integers(0, 256, (channels, blocks, product.block * product.bits // 8), np.uint8)
        scales = rng.random((channels, blocks), np.float32) * 0.01
        constants += [numpy_helper.from_array(codes, f"codes{i}"), numpy_helper.from_array(scales, f"scales{i}")]
        inputs = ["x", f"codes{i}", f"scales{i}"]
        nodes.append(helper.make_node(MATMUL, inputs, [f"y{i}"], domain=CONTRIB, **attributes))
    declared = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", width])
    results = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["rows", channels]) for i in range(len(nodes))]
    domains = {"": DEFAULT_OPSET, CONTRIB: 1, DOMAIN: VERSION}
    return helper.make_model(
        helper.make_graph(nodes, "products", [declared], results, constants),
        opset_imports=[helper.make_opsetid(*domain) for domain in domains.items()],
        ir_version=IR_VERSION,
    )


def _in_domain(model: ModelProto, domain: str) -> ModelProto:
    moved = ModelProto()
    moved.CopyFrom(model)
    for node in moved.graph.node:
        node.domain = domain
    return moved


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
