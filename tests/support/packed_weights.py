"""Random packed weights, and what they must compute: shared by interpreted tests and those on a GPU."""

import torch

from diffquant.kernels.linear.repack import repack
from diffquant.numerics import pack, unpack


def random_words(rows, width, bits, device="cpu", seed=0):
    """Every code, the lowest of an asymmetric range included, as a checkpoint packs them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    return pack(torch.randint(low, high, (rows, width), generator=generator, dtype=torch.int8), bits).to(device)


def random_scale(rows, width, group, dtype, device="cpu", seed=1):
    """Of either sign; `group` is a number of columns, "row" or "tensor"."""
    shape = {"row": (rows, 1), "tensor": (1,)}.get(group) or (rows, width // group)
    uniform = 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1
    return (0.01 * uniform + 0.001 * uniform.sign()).to(dtype).to(device)


def exact_weight(words, scale, bits, width):
    """float64 [N, K]."""
    codes = unpack(words, bits, width).double()
    return codes * scale.double().repeat_interleave(width // scale.shape[-1], -1)


def random_case(rows, width, bits, group, dtype=torch.float16, device="cpu"):
    """A packed weight, and W in float64."""
    words = random_words(rows, width, bits, device)
    scale = random_scale(rows, width, group, dtype, device)
    return repack(words, scale, bits, width), exact_weight(words, scale, bits, width)


def random_activations(tokens, width, dtype=torch.float16, device="cpu", seed=2):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def relative_error(y, expected):
    return float((y.double() - expected).norm() / expected.norm())


def poison(monkeypatch):
    """Floating-point tensors made by `new_empty` are NaN until they are written."""
    empty = torch.Tensor.new_empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
