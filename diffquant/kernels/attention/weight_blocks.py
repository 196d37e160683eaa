"""Softmax weights rounded to floats under a scale for each block of keys: OCP's MX formats and NVFP4 (Triton).

Exponentials differ in their last bits from device to device, so that weights at a border between two codes may have
either. Rounded weights are multiples of a unit that the kernel divides out with a row's sum, small enough that half
types hold them: 2^-14 for MX formats, whose scales are powers of two, and the inverse of NVFP4's tensor scale, beside
which its block scales are e4m3 numbers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

# Keys of a block, bits of mantissa, exponent of the smallest normal number, largest number, and the mantissa from which
# the exponent of a block's largest weight is raised; 0 where scales are no powers of two.
BLOCK_FORMATS = {
    "mxfp4": (32, 1, 0, 6.0, 2.0),
    "mxfp4_up": (32, 1, 0, 6.0, 1.75),
    "mxfp6": (32, 3, 0, 7.5, 2.0),
    "mxfp6_up": (32, 3, 0, 7.5, 1.9375),
    "mxfp6_e3m2": (32, 2, -2, 28.0, 2.0),
    "mxfp8": (32, 3, -6, 448.0, 2.0),
    "mxfp8_up": (32, 3, -6, 448.0, 1.75),
    "mxfp8_e5m2": (32, 2, -14, 57344.0, 2.0),
    "nvfp4": (16, 1, 0, 6.0, 0.0),
}
# NVFP4's scale of a tensor whose largest number is 1, and the block scale of zeros.
_DIVISOR, _OF_ZEROS = tl.constexpr(448.0 * 6.0), tl.constexpr(0.125)
TOP_EXPONENT = tl.constexpr(14)


@triton.constexpr_function
def exponent_of(number):
    """Exponent of a positive number that is no subnormal."""
    exponent = 0
    while 2.0 ** (exponent + 1) <= number:
        exponent += 1
    return exponent


@triton.constexpr_function
def mantissa_bits(number):
    """Bits of float32's mantissa of a number in [1, 2]."""
    return int((number - 1) * 2**23)


@triton.jit
def to_float(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """The float nearest to x of 0 or more, half to even, of so many bits of mantissa; normal from 2^LOWEST on."""
    binade = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (127 + LOWEST) << 23)
    # Adding and subtracting 1.5·2^23 steps of a binade rounds to a multiple of its step.
    steps = (binade + (((23 - MANTISSA) << 23) + (1 << 22))).to(tl.float32, bitcast=True)
    return (x + steps) - steps


@triton.jit
def inverse_unit(FORMAT: tl.constexpr):
    """Number of units of rounded weights in 1."""
    return 2.0**TOP_EXPONENT if FORMAT[4] > 0 else _DIVISOR


@triton.jit
def rounded_in_blocks(p, FORMAT: tl.constexpr, TOP: tl.constexpr):
    """Weights [rows, keys] in [0, 1] as an entry of `BLOCK_FORMATS` rounds them, in units.

    Of MX formats a unit is 2^-TOP: with 0 any magnitudes are rounded.
    """
    SIZE: tl.constexpr = FORMAT[0]
    ROWS: tl.constexpr = p.shape[0]
    KEYS: tl.constexpr = p.shape[1]
    blocks = p.reshape(ROWS, KEYS // SIZE, SIZE)
    largest = tl.max(blocks, 2)
    if FORMAT[4] > 0:
        bits = largest.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - exponent_of(FORMAT[3])
        if FORMAT[4] < 2.0:
            exponent += ((bits & 0x7FFFFF) >= mantissa_bits(FORMAT[4])).to(tl.int32)
        exponent = tl.maximum(exponent, 1)
        # Both are powers of two: products with them are exact.
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        unit = ((exponent + TOP) << 23).to(tl.float32, bitcast=True)
        ratio = blocks * inverse[:, :, None]
    else:
        # 448 is the largest e4m3 number, and the largest weight is 1.
        unit = to_float(largest * 448.0, 3, -6)
        unit = tl.where(unit == 0, _OF_ZEROS, unit)
        inverse = 448.0 * 6.0 / unit
        ratio = blocks * inverse[:, :, None]
    levels = tl.minimum(to_float(ratio, FORMAT[1], FORMAT[2]), FORMAT[3])
    return (levels * unit[:, :, None]).reshape(ROWS, KEYS)
