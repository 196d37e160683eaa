"""Random packed weights and their exact values, shared by interpreted tests and those on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffquant.kernels.linear.repack import PackedWeight, repack, repack_floats
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.numbers.packing import pack, unpack


def random_words(rows: int, width: int, bits: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """Random codes, the lowest of an asymmetric range included, as a checkpoint packs them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    return pack(torch.randint(low, high, (rows, width), generator=generator, dtype=torch.int8), bits).to(device)


def random_scale(
    rows: int, width: int, group: int | str, dtype: torch.dtype, device: str = "cpu", seed: int = 1
) -> Tensor:
    """Random scales of either sign; `group` is a number of columns, "row" or "tensor"."""
    if isinstance(group, int):
        shape: tuple[int, ...] = (rows, width // group)
    else:
        shape = {"row": (rows, 1), "tensor": (1,)}[group]
    uniform = 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1
    return (0.01 * uniform + 0.001 * uniform.sign()).to(dtype).to(device)


def exact_weight(words: Tensor, scale: Tensor, bits: int, width: int) -> Tensor:
    """Weight [N, K] that words and scales stand for, in float64."""
    codes = unpack(words, bits, width).double()
    return codes * scale.double().repeat_interleave(width // scale.shape[-1], -1)


def random_case(
    rows: int,
    width: int,
    bits: int,
    group: int | str,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[PackedWeight, Tensor]:
    """A random packed weight, and its values [N, K] in float64."""
    words = random_words(rows, width, bits, device, seed)
    scale = random_scale(rows, width, group, dtype, device, seed + 1)
    return repack(words, scale, bits, width), exact_weight(words, scale, bits, width)


def random_floats(rows: int, width: int, name: str, device: str = "cpu", seed: int = 0) -> tuple[PackedWeight, Tensor]:
    """A random weight of E2M1 floats, every code and the smallest scales among them, and its values in float64."""
    number_format = format_named(name)
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 256, (rows, width // 2), generator=generator, dtype=torch.uint8)
    group, (low, high) = (16, (0, 127)) if name == "nvfp4" else (32, (100, 118))
    scale = torch.randint(low, high, (rows, width // group), generator=generator, dtype=torch.uint8)
    divisor = torch.tensor([300.0]) if name == "nvfp4" else None
    values = number_format.levels_of(number_format.unpack(words, width), torch.float64)
    exact = values * number_format.unpack_scale(scale, divisor).double().repeat_interleave(group, -1)
    packed = repack_floats(words.to(device), scale.to(device), None if divisor is None else divisor.to(device), width)
    return packed, exact.to(device)


def random_activations(
    tokens: int, width: int, dtype: torch.dtype = torch.float16, device: str = "cpu", seed: int = 2
) -> Tensor:
    """Random activations [tokens, width]."""
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def relative_error(y: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    return float((y.double() - expected).norm() / expected.norm())


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill floating-point tensors that `new_empty` makes with NaN, which stays where nothing is written."""
    empty = torch.Tensor.new_empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
