"""Paths of a linear layer at one token and at many: packed weights, bitsandbytes and torchao beside dense ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from diffquant.bench.cells import BenchCell
from diffquant.bench.contest import kernels
from diffquant.bench.contest.peers import TOLERANCES
from diffquant.bench.contest.workloads import Model
from diffquant.bench.timing import interleaved, prepare
from diffquant.errors import MissingDependencyError
from diffquant.support.progress import Progress, silent

SECTION = "linear"
DENSE = "dense"
_GROUPS = (128, 64, 32, 16)
# Weights are taken in turns, so that none is still in a cache when its turn comes again.
_COLD_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
# Largest relative error of a rounded weight.
_ROUNDING = {16: 0.0, 8: 2e-2, 6: 5e-2, 4: 0.2}


@dataclass(frozen=True)
class Layers:
    """Linear layers of some weights [N, K], ready to multiply.

    Attributes:
        product: function of x [M, K] and a weight's number; gives x times the weight, transposed.
        nbytes: bytes that one weight stores, scales included.
        stored: values [N, K] that the first weight stands for as it is stored.
    """

    product: Callable[[Tensor, int], Tensor]
    nbytes: int
    stored: Tensor


Make = Callable[[list[Tensor]], Layers]


def _dense(weights: list[Tensor]) -> Layers:
    return Layers(lambda x, i: linear(x, weights[i]), weights[0].nbytes, weights[0])


def _ours(bits: int) -> Make:
    def make(weights: list[Tensor]) -> Layers:
        group = _group(weights[0].shape[1])
        first, stored = kernels.packed_weight(weights[0], bits, group)
        packed = [first, *(kernels.packed_weight(weight, bits, group)[0] for weight in weights[1:])]
        return Layers(lambda x, i: kernels.packed_product(x, packed[i]), first.nbytes, stored)

    return make


def _bitsandbytes(weights: list[Tensor]) -> Layers:
    _require("bitsandbytes")
    import bitsandbytes as bnb

    layers = []
    for weight in weights:
        layer = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, compute_dtype=weight.dtype)
        layer.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
        layers.append(layer.to(weight.device))
    first = layers[0].weight
    stored = bnb.functional.dequantize_4bit(first.data, first.quant_state)
    # A state dict has all that a checkpoint would: codes, scales, the table of levels.
    nbytes = sum(tensor.nbytes for tensor in layers[0].state_dict().values())
    return Layers(lambda x, i: layers[i](x), nbytes, stored)


def _torchao(weights: list[Tensor]) -> Layers:
    _require("torchao")
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    layers = []
    for weight in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(layer, Int4WeightOnlyConfig(group_size=_group(weight.shape[1])))
        layers.append(layer)
    first: Any = layers[0].weight
    return Layers(lambda x, i: layers[i](x), _bytes_within(first), first.dequantize())


def _bytes_within(tensor: Any) -> int:
    """Bytes of the plain tensors that a tensor subclass is made of: codes, scales and zero points."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes_within(getattr(tensor, name)) for name in names)


def _group(width: int) -> int:
    """The largest group that divides a width; where none does, the kernels say so."""
    return next((size for size in _GROUPS if width % size == 0), _GROUPS[0])


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise MissingDependencyError(f"{package} is not installed")


PATHS: dict[str, tuple[Make, int]] = {
    DENSE: (_dense, 16),
    **{f"packed, {bits} bits": (_ours(bits), bits) for bits in (8, 6, 4)},
    "bitsandbytes, NF4": (_bitsandbytes, 4),
    "torchao, int4": (_torchao, 4),
}


@torch.inference_mode()
def run_linears(
    models: Sequence[Model], tokens: Sequence[int], dtype: str, device: str, repeats: int, *,
    graph: bool = False, progress: Progress = silent,
) -> list[BenchCell]:  # fmt: skip
    """Cells of every path through the first feed-forward matrix of each model."""
    cells = []
    for done, model in enumerate(models):
        progress(done, len(models), f"linear: {model.name}")
        for count in tokens:
            cells += _measure(model, count, dtype, device, repeats, graph)
    return cells


def _measure(model: Model, tokens: int, dtype: str, device: str, repeats: int, graph: bool) -> list[BenchCell]:
    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    bytes_of_one = model.inner * model.hidden * kind.itemsize
    # Packed to 4 bits, all of them together must still exceed the caches.
    copies = max(1, -(-_COLD_BYTES[device] * kind.itemsize * 2 // bytes_of_one))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(kind)

    weights = [normal(model.inner, model.hidden) * 0.02 for _ in range(copies)]
    x = normal(tokens, model.hidden)
    workload = f"{model.hidden} -> {model.inner}, {tokens} tokens, {dtype}"
    cells: dict[str, BenchCell] = {}
    calls = {}
    for name, (make, bits) in PATHS.items():
        cell = BenchCell(SECTION, workload, name, baseline=DENSE, operations=2 * tokens * model.inner * model.hidden)
        try:
            layers = make(weights)
            cell = _checked(cell, layers, x, weights[0], bits)
            moved = layers.nbytes + x.nbytes + tokens * model.inner * kind.itemsize
            cells[name] = cell = replace(cell, bytes=moved, touched=copies * moved)
            if cell.missing is None:
                calls[name] = prepare(_all_of(layers.product, x, copies), device, graph=graph)
        except Exception as error:  # a peer may fail with anything; the table says it
            cells[name] = replace(cell, missing=f"{type(error).__name__}: {error}".splitlines()[0])
    times = interleaved(calls, repeats)
    return [replace(cell, values=tuple(ms / copies for ms in times.get(name, ()))) for name, cell in cells.items()]


def _all_of(product: Callable[[Tensor, int], Any], x: Tensor, copies: int) -> Callable[[], None]:
    def call() -> None:
        for i in range(copies):
            product(x, i)

    return call


def _checked(cell: BenchCell, layers: Layers, x: Tensor, weight: Tensor, bits: int) -> BenchCell:
    """The cell with its errors; `missing` says why it must not be timed.

    A product is compared with that of the values stored, so that rounding does not hide a wrong kernel; these
    values are compared with the weight that was given.
    """
    error = _relative(layers.product(x, 0), linear(x.float(), layers.stored.float()))
    rounding = _relative(layers.stored, weight)
    allowed = TOLERANCES[x.dtype]
    reason = None
    if not error <= allowed:
        reason = f"wrong: {error:.1e} from the product with the values stored, {allowed:.0e} allowed"
    elif not rounding <= _ROUNDING[bits]:
        reason = f"wrong: the values stored are {rounding:.1e} from the weight, {_ROUNDING[bits]:.0e} allowed"
    facts = {"stored bytes": float(layers.nbytes), "rounding error": rounding}
    return replace(cell, error=error, tolerance=allowed, missing=reason, facts=facts)


def _relative(values: Tensor, wanted: Tensor) -> float:
    return float((values.float() - wanted.float()).norm() / wanted.float().norm())
