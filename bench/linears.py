"""Speed of linear layers, quantized and dense."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from diffquant.benchmarks.cells import BenchCell
from diffquant.benchmarks.contest import TOLERANCES, format_error
from diffquant.benchmarks.measuring import make_timer, run_in_turns
from diffquant.benchmarks.workloads import Model
from diffquant.recipe.numbers.formats import format_named
from diffquant.support.progress import Progress, report_nothing

SECTION = "linear"
DENSE = "dense"
_GROUPS = (128, 64, 32, 16)
# Total size of the weights that a timed call goes through, large enough that none is still in a cache the next time.
_COLD_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
# Largest allowed relative error of a rounded weight, by bits.
_ROUNDING = {16: 0.0, 8: 2e-2, 6: 5e-2, 4: 0.2}


# Linear layers with weights [out, in]: a function that multiplies x [tokens, in] with the i-th transposed weight, the
# stored bytes of one weight, scales included, and the dequantized values [out, in] of the first weight.
Layers = tuple[Callable[[Tensor, int], Tensor], int, Tensor]
Make = Callable[[list[Tensor]], Layers]


def _dense(weights: list[Tensor]) -> Layers:
    return lambda x, i: linear(x, weights[i]), weights[0].nbytes, weights[0]


def _ours(bits: int) -> Make:
    def make(weights: list[Tensor]) -> Layers:
        from diffquant.kernels.linear.linear import linear as multiply_packed

        group = choose_group(weights[0].shape[1])
        first, stored = pack_weight_for_kernels(weights[0], bits, group)
        packed = [first, *(pack_weight_for_kernels(weight, bits, group)[0] for weight in weights[1:])]
        return lambda x, i: multiply_packed(x, packed[i]), first.nbytes, stored

    return make


def pack_weight_for_kernels(weight: Tensor, bits: int, group: int) -> tuple[Any, Tensor]:
    """Quantize and pack a weight [out, in] for the linear kernels, with a scale for each `group` columns of a row.

    Returns:
        The packed weight, and its dequantized values [out, in] in float32.
    """
    from diffquant.kernels.linear.repack import repack

    groups = weight.float().unflatten(-1, (-1, group))
    integers = format_named(str(bits))
    scale = integers.compute_scale(groups, -1, torch.float32)
    codes = integers.encode(groups, scale)
    words = integers.pack(codes.flatten(-2))
    packed = repack(words, scale.squeeze(-1), bits, weight.shape[1], weight.dtype)
    return packed, integers.decode(codes, scale).flatten(-2)


def choose_group(width: int) -> int:
    """Return the largest group size that divides a width, or 128, which the kernels then refuse, if none does."""
    return next((size for size in _GROUPS if width % size == 0), _GROUPS[0])


PATHS: dict[str, tuple[Make, int]] = {
    DENSE: (_dense, 16),
    **{f"packed, {bits} bits": (_ours(bits), bits) for bits in (8, 6, 4)},
}


@torch.inference_mode()
def run_linears(
    models: Sequence[Model], tokens: Sequence[int], dtype: str, device: str, repeats: int, *,
    graph: bool = False, progress: Progress = report_nothing,
) -> list[BenchCell]:  # fmt: skip
    """Time every path in `PATHS` on the first MLP matrix of each model.

    Args:
        models: models whose sizes are used.
        tokens: numbers of tokens to measure with; an input has one row per token.
        dtype: name of the torch dtype of inputs and dense weights.
        device: "cpu" or "cuda".
        repeats: number of timed repeats of each path.
        graph: whether to time replays of a CUDA graph.
    """
    cells = []
    for done, model in enumerate(models):
        progress(done, len(models), f"linear: {model.name}")
        for count in tokens:
            cells += _measure_paths(model, count, dtype, device, repeats, graph)
    return cells


def _measure_paths(model: Model, tokens: int, dtype: str, device: str, repeats: int, graph: bool) -> list[BenchCell]:
    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    bytes_of_one = model.inner * model.hidden * kind.itemsize
    # Even packed to 4 bits, all copies together must exceed the caches.
    copies = max(1, -(-_COLD_BYTES[device] * kind.itemsize * 2 // bytes_of_one))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(kind)

    weights = [normal(model.inner, model.hidden) * 0.02 for _ in range(copies)]
    x = normal(tokens, model.hidden)
    workload = f"{model.hidden} -> {model.inner}, {tokens} tokens, {dtype}"
    cells: dict[str, BenchCell] = {}
    calls = {}
    for name, (make, bits) in PATHS.items():
        cell = BenchCell(SECTION, workload, name, baseline=DENSE)
        try:
            layers = make(weights)
            cells[name] = cell = _check(cell, layers, x, weights[0], bits)
            if cell.missing is None:
                calls[name] = make_timer(_run_all_copies(layers[0], x, copies), device, graph=graph)
        except Exception as error:  # a path may fail with anything, which the table reports
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            cells[name] = replace(cell, missing=f"{absent} is not installed" if absent else format_error(error))
    times = run_in_turns(calls, repeats)
    return [replace(cell, values=tuple(ms / copies for ms in times.get(name, ()))) for name, cell in cells.items()]


def _run_all_copies(product: Callable[[Tensor, int], Any], x: Tensor, copies: int) -> Callable[[], None]:
    def call() -> None:
        for i in range(copies):
            product(x, i)

    return call


def _check(cell: BenchCell, layers: Layers, x: Tensor, weight: Tensor, bits: int) -> BenchCell:
    """Return a cell with its errors; `missing` is the reason if the path must not be timed.

    The result is compared with a matmul of the dequantized values, so that rounding does not hide a wrong kernel. The
    dequantized values are compared with the original weight.
    """
    product, nbytes, stored = layers
    error = _relative(product(x, 0), linear(x.float(), stored.float()))
    rounding = _relative(stored, weight)
    allowed = TOLERANCES[x.dtype]
    reason = None
    if not error <= allowed:
        reason = f"wrong result: error {error:.1e} against the dequantized weight (limit {allowed:.0e})"
    elif not rounding <= _ROUNDING[bits]:
        reason = f"wrong weight: rounding error {rounding:.1e} (limit {_ROUNDING[bits]:.0e})"
    facts = {"stored bytes": float(nbytes), "rounding error": rounding}
    return replace(cell, error=error, tolerance=allowed, missing=reason, facts=facts)


def _relative(values: Tensor, wanted: Tensor) -> float:
    return float((values.float() - wanted.float()).norm() / wanted.float().norm())
