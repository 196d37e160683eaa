"""Sizes in one meaning: stored bits are those that are written, scales included, over the weights they stand for."""

from diffquant.report.tables import megabytes

# Sources this near to 16 bits a weight are not set beside 16 bits as well.
_ALIKE = 0.01


def stored_bits(nbytes: float, weights: int) -> float:
    """Bits that a weight takes where `weights` of them, with their scales, take `nbytes`."""
    return 8 * nbytes / max(1, weights)


def bytes_at_16_bits(weights: int) -> int:
    """Bytes of weights at 16 bits, whatever type their source holds them in."""
    return 2 * weights


def compared_size(nbytes: int, source_bytes: int, weights: int) -> str:
    """A size beside the source's files and, where those are not of 16 bits, beside 16 bits.

    Args:
        nbytes: bytes that were or would be written.
        source_bytes: bytes that the source takes.
        weights: number of weights of the source.
    """
    full = bytes_at_16_bits(weights)
    compared = f"{megabytes(nbytes)}, {_share(nbytes, source_bytes)} of the source's {megabytes(source_bytes)}"
    if abs(source_bytes / max(1, full) - 1) < _ALIKE:
        return compared
    return f"{compared} and {_share(nbytes, full)} of 16 bits' {megabytes(full)}"


def _share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.1%}"
