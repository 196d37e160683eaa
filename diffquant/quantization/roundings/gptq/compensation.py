"""Error-compensated rounding of a weight: a column's rounding error is compensated in later columns.

Meanwhile codes are represented by their levels, as floats; they are converted to integer codes at the end.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1. Its pass over the columns is followed by passes of
coordinate descent on the same error, ||X·(W - Q)ᵀ||², in which codes and scales are updated if that lowers it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.quantization.roundings.nearest import level_codes, nearest_levels, search_scale, search_scales
from diffquant.recipe.numbers.formats import NumberFormat
from diffquant.recipe.scheme import Scheme

# Fraction of the mean diagonal that is added to the diagonal, so that constant inputs do not make it singular.
_DAMPING = 0.01
# Number of columns whose accumulated updates are applied to all later columns at once.
_BLOCK = 128
# Passes of coordinate descent; more improve the error little.
_PASSES = 2


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Second moments of a linear module's inputs, and the order in which its weight's columns are rounded.

    X [N, in] are the inputs of N tokens.

    Attributes:
        products: XᵀX [in, in] float32, damped.
        factor: upper Cholesky factor [in, in] float32 of the inverse of the products, with rows and columns in `order`.
        order: order in which columns are rounded, int64 [in]; or None if that is the stored order.
    """

    products: Tensor
    factor: Tensor
    order: Tensor | None = None

    @classmethod
    def factorize(cls, products: Tensor, by_activation: bool = False) -> "InputStatistics":
        """Compute `factor` and `order` from damped second moments.

        Args:
            products: as in the attributes.
            by_activation: whether columns are rounded in descending order of their inputs' second moments.
        """
        if by_activation:
            order = products.diagonal().argsort(descending=True, stable=True)
            return cls(products, cls.factorize(products[order][:, order]).factor, order)
        # The Cholesky factor of the products with both axes reversed is, reversed back, the inverse of `factor`.
        reversed_factor = torch.linalg.cholesky(products.double().flip(0, 1)).flip(0, 1)
        identity = torch.eye(len(products), dtype=torch.float64)
        return cls(products, torch.linalg.solve_triangular(reversed_factor, identity, upper=True).float())


def damp(products: Tensor) -> Tensor:
    """Return XᵀX [in, in] with enough added to its diagonal that it can be inverted."""
    diagonal = products.diagonal()
    return products + torch.diag_embed(torch.full_like(diagonal, float(_DAMPING * diagonal.mean() + 1e-12)))


def compute_retargeting(products: Tensor, lost: Tensor) -> Tensor:
    """Return R [in, in] by which a weight W [out, in] is changed to W + W·R, to compensate for errors in its input.

    X [N, in] is the module's input, and Y [N, in] the same input in the 16-bit model. W + W·R is the weight whose
    output on X is nearest to W·Yᵀ, regularized towards W by the damping. Its rounding error is weighted by the same
    H = XᵀX + damping as that of W.

    Args:
        products: H [in, in].
        lost: (Y - X)ᵀX [in, in].

    Returns:
        R = (Y - X)ᵀX·H⁻¹, float32.

    Source: the target is that of Li et al., GPTAQ, arXiv 2504.02692, equation 5, solved for all columns at once.
    """
    solution: Tensor = torch.linalg.solve(products.double(), lost.double(), left=False)
    return solution.float()


def compensate(values: Tensor, inputs: InputStatistics, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round some rows of a weight with error compensation.

    Args:
        values: [rows, in] float32.
        inputs: second moments of the module's inputs.
        scheme: scheme of granularity row or group.
        dtype: dtype of the stored scale.

    Returns:
        Codes int8 [rows, in], and scales [rows, in/g] for groups of g inputs, or [rows, 1].
    """
    # Columns are processed one after another, so each is made contiguous.
    columns, size = values.mT.contiguous(), scheme.granularity_size or values.shape[1]
    if inputs.order is None:
        codes, scales = round_in_one_pass(columns, inputs.factor, scheme.format, size, dtype)
    else:
        codes, scales = round_in_order(columns, inputs, inputs.order, scheme.format, size, dtype)
    for _ in range(_PASSES):
        codes, scales = _descend(columns, codes, scales, inputs.products, scheme.format, size)
    return level_codes(codes.mT.contiguous(), scheme.format), scales.mT.contiguous()


def round_in_one_pass(
    values: Tensor, factor: Tensor, levels: NumberFormat, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run GPTQ's pass over some rows of a weight, with columns in the stored order.

    Args:
        values: [in, rows] float32, the transposed rows.
        factor: as in `InputStatistics`.
        levels: number format of the codes.
        size: number of neighbouring columns of the weight that share a scale.
        dtype: dtype of the stored scales.

    Returns:
        Levels float32 [in, rows], and scales [in/size, rows].
    """
    codes, scales = torch.empty_like(values), torch.empty(len(values) // size, values.shape[1], dtype=dtype)
    # Loss per squared error in a column, after later columns have compensated for it.
    costs, diagonal = factor.diagonal().square().reciprocal(), factor.diagonal().tolist()
    work, divisors, bound = values.clone(), torch.empty_like(values[0]), levels

    def find_scales(columns: slice, levels: NumberFormat) -> Tensor:
        groups = work[columns].mT.contiguous().unflatten(1, (-1, size))
        return search_scale(groups, levels, dtype, costs[columns].unflatten(0, (-1, size)))

    def start(columns: slice) -> None:
        nonlocal bound
        if ahead := _columns_of_step(columns, levels):
            bound = levels.with_fitted_step(find_scales(ahead, levels), 1)
        scale = find_scales(columns, bound).flatten()
        scales[columns.start // size] = scale
        divisors.copy_(scale)

    def settle(column: int) -> Tensor:
        weight, code = work[column], codes[column]
        levels.round_to_all_levels_(torch.div(weight, divisors, out=code))
        return torch.addcmul(weight, code, divisors, value=-1).div_(diagonal[column])

    _walk(work, factor, size, start, settle)
    return codes, scales


def round_in_order(
    values: Tensor, inputs: InputStatistics, order: Tensor, levels: NumberFormat, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run GPTQ's pass as `round_in_one_pass` does, but with the weight's columns in the given order.

    A group consists of neighbours in the stored order, so scales are chosen before the pass.

    Args:
        order: int64 [in], indices of the columns in the order in which they are rounded.

    Returns:
        As `round_in_one_pass`, with the columns in the stored order.
    """
    sizes = -1, levels.scales_per_step, size
    parts, weights = values.unflatten(0, sizes), inputs.products.diagonal().unflatten(0, sizes)
    found = [search_scales(p.movedim(-1, 0), levels, dtype, w) for p, w in zip(parts, weights, strict=True)]
    scales = torch.cat([scale.squeeze(-1).mT for scale in found])
    codes, work, columns = torch.empty_like(values), values[order], order.tolist()

    def settle(place: int) -> Tensor:
        column, weight = columns[place], work[place]
        scale = scales[column // size].float()
        code = nearest_levels(weight, scale, levels)
        codes[column] = code
        return (weight - code * scale) / inputs.factor[place, place]

    _walk(work, inputs.factor, len(order), lambda _: None, settle)
    return codes, scales


def _descend(
    values: Tensor, codes: Tensor, scale: Tensor, products: Tensor, levels: NumberFormat, size: int
) -> tuple[Tensor, Tensor]:
    """Run one pass of coordinate descent: minimize the error over each group's scale and then each of its codes.

    Returns:
        The new codes and scales.
    """
    codes, scales, diagonal = codes.clone(), scale.float(), products.diagonal().tolist()
    # Minus half the gradient of the error with respect to each weight.
    pull = products @ (values - codes * scales.repeat_interleave(size, 0))
    bound = levels

    def start(columns: slice) -> None:
        nonlocal bound
        if ahead := _columns_of_step(columns, levels):
            bound = levels.with_fitted_step(scales[ahead.start // size : ahead.stop // size], 0)
        group, old = codes[columns], scales[columns.start // size]
        seen = products[columns, columns] @ group
        curvature = (seen * group).sum(0).clamp(min=torch.finfo(torch.float32).tiny)
        force = (pull[columns] * group).sum(0)
        new = bound.round_scale(old + force / curvature, scale.dtype).flatten()
        change = new.float() - old
        change = change.where(change * (2 * force - change * curvature) > 0, 0.0)
        old += change
        pull[columns.start :].addmm_(products[columns.start :, columns], change * group, alpha=-1)

    def settle(column: int) -> Tensor:
        code, step = codes[column], scales[column // size]
        new = torch.addcdiv(code, pull[column], step, value=1 / diagonal[column])
        levels.round_to_all_levels_(new)
        moved = torch.sub(new, code).mul_(step)
        code.copy_(new)
        return moved

    _walk(pull, products, size, start, settle)
    return codes, scales.to(scale.dtype)


def _columns_of_step(group: slice, levels: NumberFormat) -> slice | None:
    """Return the columns whose scales share a step if a group's columns are the first of them, otherwise None."""
    width = (group.stop - group.start) * levels.scales_per_step
    is_first = levels.scales_per_step > 1 and group.start % width == 0
    return slice(group.start, group.start + width) if is_first else None


def _walk(
    work: Tensor, matrix: Tensor, size: int, start: Callable[[slice], None], settle: Callable[[int], Tensor]
) -> None:
    """Process columns in order, subtracting the matrix's row times each column's change from the later columns.

    Args:
        work: [in, rows], changed in place.
        matrix: [in, in].
        size: number of columns per group.
        start: function called with each group's columns before its first column.
        settle: function that processes a column by its index and returns its change [rows].
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
