"""The demands of tensor descriptors made inside a kernel (Hopper's bulk copies) on its launch."""

import torch
import triton
from torch import Tensor


def describable(*tensors: Tensor) -> bool:
    """Whether descriptors can read these tensors: the last axis contiguous, all else aligned to 16 bytes."""
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(
            stride * x.element_size() % 16 == 0
            for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
            if size > 1
        )
        for x in tensors
    )


def allow_descriptors() -> None:
    """Let the next launch in this thread place its descriptors in torch's memory, on its stream."""
    # Triton keeps the allocator a thread (a context variable), so once at import would not do.
    triton.set_allocator(_allocate)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    # torch aligns to 512 bytes, which is more than any descriptor asks.
    return torch.empty(size, dtype=torch.int8, device="cuda")
