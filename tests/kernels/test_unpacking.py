"""The assembly that unpacks, run instruction by instruction as the PTX manual defines it: no interpreter does."""

import re

import numpy as np
import pytest
import torch

from diffquant.kernels.linear.unpacking import make_product_ptx, make_unpack_ptx
from tests.support.tables import in_one_test

PLAIN = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "xor": lambda a, b: a ^ b,
    "shr": lambda a, n: a >> n,
    "shl": lambda a, n: a << n & 0xFFFFFFFF,
}


def halves(register, dtype):
    """The two numbers of a 32-bit register, low one first."""
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.int16).view(dtype)


def lookup(a, b, c, table):
    """lop3: bit i of the result is the table's bit at (a, b, c)."""
    bits = [(table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32)]
    return sum(bits)


def run(program, *operands):
    """The pair in register $0, its products and sums rounded once."""
    registers = {f"${i}": value for i, value in enumerate(operands, 1)}
    result = None

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    for line in program.strip("{}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        opcode, target, *sources = re.split(r"[\s,]+", line)
        name, *suffixes = opcode.split(".")
        if name == "fma":
            dtype = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}[suffixes[1]]
            a, b, c = (halves(value(source), dtype).double() for source in sources)
            result = (a * b + c).to(dtype)
            assert target == "$0"
        elif name == "lop3":
            registers[target] = lookup(*map(value, sources))
        else:
            registers[target] = PLAIN[name](*map(value, sources))
    return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_every_code_of_every_field(bits, dtype):
    fields, width = (2, 8) if bits == 8 else (4, 4)
    noise = np.random.default_rng(0)
    for field in range(fields):
        program = make_unpack_ptx(bits, field, dtype == torch.float16)
        for stored in range(1 << bits):
            pair = stored, (stored * 37 + 11) % (1 << bits)
            words = bytes_of = 0
            for half, value in enumerate(pair):
                # Other fields hold anything.
                others = int(noise.integers(1 << 16)) & ~(((1 << width) - 1) << (width * field))
                low = value & 255 if bits == 8 else value & 15
                words |= (others | low << (width * field)) << (16 * half)
                rest = int(noise.integers(256)) & ~(3 << (2 * field))
                bytes_of |= (rest | value >> 4 << (2 * field)) << (16 * half)
            codes = run(program, words, *([bytes_of] if bits == 6 else []))
            assert codes.tolist() == [value - (1 << (bits - 1)) for value in pair]


@in_one_test("dtype", [torch.float16, torch.bfloat16])
def test_products_are_rounded_once(dtype):
    a, b = torch.randn(2, 200, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    for x, y in zip(a, b, strict=True):
        registers = [int.from_bytes(pair.view(torch.uint8).numpy().tobytes(), "little") for pair in (x, y)]
        assert torch.equal(run(make_product_ptx(dtype == torch.float16), *registers), x * y)
