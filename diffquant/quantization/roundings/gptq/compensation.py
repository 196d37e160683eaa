"""Error-compensated codes of a weight: what one column loses is put on others, weighed by the inputs' products.

On the way a weight's code is its level, a float; codes in bytes are made of levels at the end.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1. Its pass over the columns is followed by passes of
coordinate descent on the same error, ||X·(W - Q)ᵀ||², which move codes and scales to where they lower it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.numbers.formats import NumberFormat
from diffquant.quantization.roundings.mse import all_levels, fitted_scale, level_codes
from diffquant.scheme import Scheme

# Share of the mean diagonal that is added to it, so that inputs that never vary do not make it singular.
_DAMPING = 0.01
# Columns after which what they moved is put on all later ones at once.
_BLOCK = 128
# Passes of coordinate descent; more gain little.
_PASSES = 2


@dataclass(frozen=True, eq=False)
class Inputs:
    """Second moments of a layer's inputs X [N, in].

    Attributes:
        products: XᵀX [in, in] float32, damped.
        factor: upper Cholesky factor of the inverse of the products [in, in] float32, their columns in `order`.
        order: columns in the order in which they are rounded, int64 [in]; None as they are stored.
    """

    products: Tensor
    factor: Tensor
    order: Tensor | None = None

    @classmethod
    def of(cls, products: Tensor, by_activation: bool = False) -> "Inputs":
        """The second moments that damped products are, with their factor.

        Args:
            by_activation: whether the columns of the largest inputs are rounded first.
        """
        if by_activation:
            order = products.diagonal().argsort(descending=True, stable=True)
            return cls(products, cls.of(products[order][:, order]).factor, order)
        # With both axes reversed, the factor of the products themselves is the inverse of the one that is wanted.
        reversed_factor = torch.linalg.cholesky(products.double().flip(0, 1)).flip(0, 1)
        identity = torch.eye(len(products), dtype=torch.float64)
        return cls(products, torch.linalg.solve_triangular(reversed_factor, identity, upper=True).float())


def damped(products: Tensor) -> Tensor:
    """XᵀX [in, in] with enough on its diagonal that it can be inverted."""
    diagonal = products.diagonal()
    return products + torch.diag_embed(torch.full_like(diagonal, float(_DAMPING * diagonal.mean() + 1e-12)))


def retargeting(products: Tensor, lost: Tensor) -> Tensor:
    """The matrix R [in, in] for which W + W·R gives the 16-bit model's outputs, for a weight W [out, in].

    With X what the layer reads, Y what the 16-bit model has there and H = XᵀX + damping, the weight that comes nearest
    to W·Yᵀ on X, as far as damping lets it go from W, is W + W·(Y - X)ᵀX·H⁻¹. What rounding it then adds is weighed by
    H as before.

    Args:
        products: H [in, in].
        lost: (Y - X)ᵀX [in, in].

    Returns:
        (Y - X)ᵀX·H⁻¹ [in, in] float32.

    Source: the target is that of Li et al., GPTAQ, arXiv 2504.02692, equation 5, solved for all columns at once.
    """
    solution: Tensor = torch.linalg.solve(products.double(), lost.double(), left=False)
    return solution.float()


def compensate(values: Tensor, inputs: Inputs, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of some rows.

    Args:
        values: [rows, in] float32.
        inputs: second moments of the layer's inputs.
        scheme: granularity row or group.
        dtype: dtype of the stored scale.

    Returns:
        int8 [rows, in], and the scale [rows, in/g] or [rows, 1].
    """
    # Columns are read one after another; each has its rows side by side in what follows.
    columns, size = values.mT.contiguous(), scheme.size or values.shape[1]
    if inputs.order is None:
        codes, scales = in_one_pass(columns, inputs.factor, scheme.format, size, dtype)
    else:
        codes, scales = in_order_of_inputs(columns, inputs, inputs.order, scheme.format, size, dtype)
    for _ in range(_PASSES):
        codes, scales = _descended(columns, codes, scales, inputs.products, scheme.format, size)
    return level_codes(codes.mT.contiguous(), scheme.format), scales.mT.contiguous()


def in_one_pass(
    values: Tensor, factor: Tensor, levels: NumberFormat, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """GPTQ's pass over values [in, rows]: codes float32 [in, rows] and scales [in/size, rows]."""
    codes, scales = torch.empty_like(values), torch.empty(len(values) // size, values.shape[1], dtype=dtype)
    # What an error in a column costs once those after it have made up for it.
    costs, diagonal = factor.diagonal().square().reciprocal(), factor.diagonal().tolist()
    work, divisors = values.clone(), torch.empty_like(values[0])

    def start(columns: slice) -> None:
        scale = fitted_scale(work[columns].mT.contiguous(), levels, dtype, costs[columns]).squeeze(1)
        scales[columns.start // size] = scale
        divisors.copy_(scale)

    def settle(column: int) -> Tensor:
        weight, code = work[column], codes[column]
        levels.nearest_(torch.div(weight, divisors, out=code))
        return torch.addcmul(weight, code, divisors, value=-1).div_(diagonal[column])

    _walk(work, factor, size, start, settle)
    return codes, scales


def in_order_of_inputs(
    values: Tensor, inputs: Inputs, order: Tensor, levels: NumberFormat, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """GPTQ's pass with the columns in another order: codes float32 [in, rows] and scales [in/size, rows].

    Groups stay where they are stored, so their scales are chosen before the pass.
    """
    groups, weights = values.unflatten(0, (-1, size)), inputs.products.diagonal().unflatten(0, (-1, size))
    scales = torch.cat([fitted_scale(g.mT, levels, dtype, w).mT for g, w in zip(groups, weights, strict=True)])
    codes, work, columns = torch.empty_like(values), values[order], order.tolist()

    def settle(place: int) -> Tensor:
        column, weight = columns[place], work[place]
        scale = scales[column // size].float()
        code = all_levels(weight, scale, levels)
        codes[column] = code
        return (weight - code * scale) / inputs.factor[place, place]

    _walk(work, inputs.factor, len(order), lambda _: None, settle)
    return codes, scales


def _descended(
    values: Tensor, codes: Tensor, scale: Tensor, products: Tensor, levels: NumberFormat, size: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales after each scale and then each code has gone, in turn, to where the error is least."""
    codes, scales, diagonal = codes.clone(), scale.float(), products.diagonal().tolist()
    # Minus half the gradient of the error by each weight.
    pull = products @ (values - codes * scales.repeat_interleave(size, 0))

    def start(columns: slice) -> None:
        group, old = codes[columns], scales[columns.start // size]
        seen = products[columns, columns] @ group
        curvature = (seen * group).sum(0).clamp(min=torch.finfo(torch.float32).tiny)
        force = (pull[columns] * group).sum(0)
        new = levels.storable(old + force / curvature, scale.dtype)
        change = new.float() - old
        change = change.where(change * (2 * force - change * curvature) > 0, 0.0)
        old += change
        pull[columns.start :].addmm_(products[columns.start :, columns], change * group, alpha=-1)

    def settle(column: int) -> Tensor:
        code, step = codes[column], scales[column // size]
        new = torch.addcdiv(code, pull[column], step, value=1 / diagonal[column])
        levels.nearest_(new)
        moved = torch.sub(new, code).mul_(step)
        code.copy_(new)
        return moved

    _walk(pull, products, size, start, settle)
    return codes, scales.to(scale.dtype)


def _walk(
    work: Tensor, matrix: Tensor, size: int, start: Callable[[slice], None], settle: Callable[[int], Tensor]
) -> None:
    """Column by column, take what `settle` makes of it times the matrix's row from the columns after it.

    Args:
        work: [in, rows], changed in place.
        matrix: [in, in].
        size: columns that share a scale; `start` is called with each such group before its first column.
    """
    width, rows = work.shape
    for first in range(0, width, size):
        start(slice(first, first + size))
        for begin in range(first, first + size, _BLOCK):
            end = min(begin + _BLOCK, first + size)
            moved = torch.empty(end - begin, rows)
            for column in range(begin, end):
                moved[column - begin] = change = settle(column)
                work[column + 1 : end].addr_(matrix[column, column + 1 : end], change, alpha=-1)
            work[end:].addmm_(matrix[begin:end, end:].mT, moved, alpha=-1)
