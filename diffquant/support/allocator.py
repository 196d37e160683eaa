"""The C library's allocator: freed memory stays with the process while many large tensors come and go."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = 2**30
# What glibc itself goes up to as it sees larger blocks freed.
_USUAL_MMAP, _USUAL_TRIM = 2**25, 2**26


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """While it is open, up to a gigabyte of freed memory serves the next tensors; then it goes back to the system.

    Otherwise every large tensor is memory that the kernel has to clear and map page by page: a seventh of the CPU
    seconds of `verify`. Where the C library is not glibc, nothing changes.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        yield
        return
    # Older versions take no larger threshold than the usual one.
    if not library.mallopt(_MMAP_THRESHOLD, _KEPT):
        library.mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
        library.mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)
        library.malloc_trim(0)
