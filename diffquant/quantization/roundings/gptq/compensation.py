"""Error-compensated codes of a weight: what one column loses is put on others, weighed by the inputs' products.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1. Its pass over the columns is followed by passes of
coordinate descent on the same error, ||X·(W - Q)ᵀ||², which move codes and scales to where they lower it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.numerics import max_code
from diffquant.quantization.roundings.mse import all_codes, fitted_scale, lowest_code, storable
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
    """What a weight [out, in] times it is to be moved by so that it gives the 16-bit model's outputs.

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
    size = scheme.size or values.shape[1]
    if inputs.order is None:
        codes, scale = in_one_pass(values, inputs.factor, scheme.bits, size, dtype)
    else:
        codes, scale = in_order_of_inputs(values, inputs, inputs.order, scheme.bits, size, dtype)
    for _ in range(_PASSES):
        codes, scale = _descended(values, codes, scale, inputs.products, scheme.bits, size)
    return codes.to(torch.int8), scale


def in_one_pass(values: Tensor, factor: Tensor, bits: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """GPTQ's pass: codes float32 [rows, in] and scales [rows, in/size]."""
    codes, scales = torch.empty_like(values), []
    # What an error in a column costs once those after it have made up for it.
    costs = factor.diagonal().square().reciprocal()

    def start(columns: slice, moved: Tensor) -> None:
        scales.append(fitted_scale(moved[:, columns], bits, dtype, costs[columns]))

    def settle(column: int, weight: Tensor) -> Tensor:
        code = all_codes(weight, scales[-1], bits).float()
        codes[:, column : column + 1] = code
        return (weight - code * scales[-1].float()) / factor[column, column]

    _walk(values.clone(), factor, size, start, settle)
    return codes, torch.cat(scales, 1)


def in_order_of_inputs(
    values: Tensor, inputs: Inputs, order: Tensor, bits: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """GPTQ's pass with the columns in another order: codes float32 [rows, in] and scales [rows, in/size].

    Groups stay where they are stored, so their scales are chosen before the pass.
    """
    groups, weights = values.unflatten(1, (-1, size)), inputs.products.diagonal().unflatten(0, (-1, size))
    scales = torch.cat([fitted_scale(groups[:, at], bits, dtype, of_group) for at, of_group in enumerate(weights)], 1)
    codes, column_scales = torch.empty_like(values), scales.float().repeat_interleave(size, 1)

    def settle(place: int, weight: Tensor) -> Tensor:
        column = int(order[place])
        scale = column_scales[:, column, None]
        codes[:, column, None] = code = all_codes(weight, scale, bits).float()
        return (weight - code * scale) / inputs.factor[place, place]

    _walk(values[:, order], inputs.factor, len(order), lambda *_: None, settle)
    return codes, scales


def _descended(
    values: Tensor, codes: Tensor, scale: Tensor, products: Tensor, bits: int, size: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales after each scale and then each code has gone, in turn, to where the error is least."""
    codes, scales = codes.clone(), scale.float()
    # Minus half the gradient of the error by each weight.
    pull = (values - codes * scales.repeat_interleave(size, 1)) @ products

    def start(columns: slice, pull: Tensor) -> None:
        at = columns.start // size
        group, old = codes[:, columns], scales[:, at : at + 1]
        seen = group @ products[columns, columns]
        curvature = (seen * group).sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        force = (pull[:, columns] * group).sum(1, keepdim=True)
        new = storable(old + force / curvature, bits, scale.dtype)
        change = new.float() - old
        change = change.where(change * (2 * force - change * curvature) > 0, 0.0)
        scales[:, at : at + 1] += change
        pull[:, columns.start :] -= (change * group) @ products[columns, columns.start :]

    def settle(column: int, pull: Tensor) -> Tensor:
        scale = scales[:, column // size, None]
        old = codes[:, column : column + 1]
        new = (old + pull / (scale * products[column, column])).round_().clamp_(lowest_code(bits), max_code(bits))
        moved = (new - old) * scale
        codes[:, column : column + 1] = new
        return moved

    _walk(pull, products, size, start, settle)
    return codes, scales.to(scale.dtype)


def _walk(
    work: Tensor,
    matrix: Tensor,
    size: int,
    start: Callable[[slice, Tensor], None],
    settle: Callable[[int, Tensor], Tensor],
) -> None:
    """Column by column, take what `settle` makes of it times the matrix's row from the columns after it.

    Args:
        work: [rows, in], changed in place.
        matrix: [in, in].
        size: columns that share a scale; `start` is called with each such group before its first column.
    """
    width = work.shape[1]
    for first in range(0, width, size):
        start(slice(first, first + size), work)
        for begin in range(first, first + size, _BLOCK):
            end = min(begin + _BLOCK, first + size)
            moved = torch.empty(len(work), end - begin)
            for column in range(begin, end):
                moved[:, column - begin, None] = change = settle(column, work[:, column : column + 1])
                work[:, column + 1 : end] -= change * matrix[column, column + 1 : end]
            work[:, end:] -= moved @ matrix[begin:end, end:]
