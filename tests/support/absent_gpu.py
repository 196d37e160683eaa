"""Plans launches for a GPU that is not there, with tensors on the CPU."""

from contextlib import AbstractContextManager
from unittest.mock import patch

from diffquant.kernels import gpu

H100 = gpu.Gpu((9, 0), 232_448, 132, 3.35e12 * gpu.COPY_REACHES)


def simulate_gpu(absent: gpu.Gpu) -> AbstractContextManager[object]:
    """Within a context, launch code sees these properties on every device."""
    return patch.object(gpu, "gpu_of", lambda _: absent)
