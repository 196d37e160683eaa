"""Weights chosen to break quantization: whatever their size, each is off by half a step and the scale's own rounding.

A seed is a tensor: of any exponents, with an outlier, at its dtype's ends, subnormal, on the middle between two codes.
It is packed at every width, granularity and dtype, unpacked, and compared in float64.

    python -m tests.fuzz.numbers --count 1000
"""

import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_tensors import unpack_weight
from diffquant.recipe.numbers.absmax import max_code
from diffquant.recipe.scheme import Scheme
from tests.fuzz.program import run
from tests.support.nearest_weights import pack_weight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCHEMES = tuple(f"{bits}:{granularity}" for bits, granularity in product(range(2, 9), ("tensor", "row", "g8", "g16")))
_ROWS, _COLUMNS = 3, 32
# Products and quotients are rounded in float32.
_FLOAT32 = 1e-4

# Numbers of a dtype between its ends, as float64 [rows, columns].
Make = Callable[[torch.Generator, torch.finfo], Tensor]


def _exponents(generator: torch.Generator, numbers: torch.finfo) -> Tensor:
    low, high = torch.tensor([numbers.tiny * numbers.eps, numbers.max], dtype=torch.float64).log2()
    where = torch.rand(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
    return 2 ** (low + where * (high - low)) * _signs(generator)


def _one_size(generator: torch.Generator, numbers: torch.finfo) -> Tensor:
    return _exponents(generator, numbers)[:1, :1] * _normal(generator)


def _outlier(generator: torch.Generator, _: torch.finfo) -> Tensor:
    values = _normal(generator)
    values[0, int(torch.randint(_COLUMNS, (), generator=generator))] *= 1e4
    return values


def _largest(generator: torch.Generator, numbers: torch.finfo) -> Tensor:
    return numbers.max * (1 - 0.01 * torch.rand(_ROWS, _COLUMNS, generator=generator).double()) * _signs(generator)


def _subnormal(generator: torch.Generator, numbers: torch.finfo) -> Tensor:
    return numbers.tiny * torch.rand(_ROWS, _COLUMNS, generator=generator).double() * _signs(generator)


def _small(generator: torch.Generator, numbers: torch.finfo) -> Tensor:
    """Weights whose scale is subnormal though they are not."""
    return 100 * _subnormal(generator, numbers)


def _halfway(generator: torch.Generator, _: torch.finfo) -> Tensor:
    halves = torch.randint(-254, 255, (_ROWS, _COLUMNS), generator=generator).double() / 2
    halves[:, ::8] = 127
    return halves


def _hardly_any(generator: torch.Generator, _: torch.finfo) -> Tensor:
    return _normal(generator) * (torch.rand(_ROWS, _COLUMNS, generator=generator) < 0.05)


def _normal(generator: torch.Generator) -> Tensor:
    return torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)


def _signs(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (_ROWS, _COLUMNS), generator=generator).double() * 2 - 1


MAKES: tuple[Make, ...] = (_exponents, _one_size, _outlier, _largest, _subnormal, _small, _halfway, _hardly_any)


def weight_of(seed: int, dtype: torch.dtype) -> Tensor:
    """The weight [rows, columns] of a seed."""
    numbers = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    values = random.Random(seed).choice(MAKES)(generator, numbers)
    return values.clamp(-numbers.max, numbers.max).to(dtype)


def problem_with(weight: Tensor, scheme: Scheme) -> str | None:
    """What is wrong with a weight's codes and scales; None where each is what it may be."""
    packed = pack_weight(weight, scheme)
    scale = packed["weight_scale"].double()
    decoded = unpack_weight(*(packed[f"weight_{part}"] for part in ("packed", "scale", "shape")), scheme).double()
    if not (torch.isfinite(decoded).all() and torch.isfinite(scale).all() and (scale > 0).all()):
        return "values or scales are not finite and positive"
    size = {"tensor": weight.numel(), "row": _COLUMNS}.get(scheme.granularity, scheme.granularity_size or 0)
    exact = weight.double().reshape(-1, size).abs().amax(1) / max_code(scheme.bits)
    too_small = (exact - scale.flatten()).clamp(min=0)
    numbers = torch.finfo(scheme.format.scale_dtype(weight.dtype))
    # A scale is rounded to nearest, upwards where it is subnormal, and down where codes would leave its dtype's range.
    allowed = torch.where(scale.flatten() < numbers.tiny, 0.0, exact * numbers.eps / 2)
    allowed = torch.where(
        exact * max_code(scheme.bits) > numbers.max * (1 - 2 * numbers.eps), 2 * exact * numbers.eps, allowed
    )
    if (too_small > allowed * (1 + _FLOAT32)).any():
        return f"a scale is {float((too_small / exact).nan_to_num().max()):.2g} of itself too small"
    error = (weight.double() - decoded).reshape(-1, size).abs().amax(1)
    bound = scale.flatten() / 2 * (1 + _FLOAT32) + max_code(scheme.bits) * too_small
    return None if (error <= bound).all() else f"an error is {float((error / bound).max()):.3g} times its bound"


def try_numbers(_: Path, seeds: range) -> tuple[dict[str, Counter[str]], list[str]]:
    """Pack the weights of many seeds; by dtype how many came to what, and a line for each that went wrong."""
    counts: dict[str, Counter[str]] = {str(dtype).removeprefix("torch."): Counter() for dtype in DTYPES}
    wrong = []
    for seed, dtype, text in product(seeds, DTYPES, SCHEMES):
        problem = problem_with(weight_of(seed, dtype), Scheme.parse(text))
        counts[str(dtype).removeprefix("torch.")]["wrong" if problem else "works"] += 1
        if problem:
            wrong.append(f"seed {seed}, {dtype}, {text}: {problem}")
    return counts, wrong


if __name__ == "__main__":
    raise SystemExit(run(__doc__.splitlines()[0], try_numbers))
