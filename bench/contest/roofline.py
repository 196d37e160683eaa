"""Roofline of this machine, measured: bytes a second of a copy, operations a second of a matrix product."""

from pathlib import Path

import torch

from diffquant.bench.timing import interleaved, prepare, spread

_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
_SIDE = {"cpu": 1536, "cuda": 8192}
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def measure_roofline(device: str, dtypes: list[str], repeats: int = 3) -> dict[str, dict[str, float]]:
    """Speeds of this machine, the best of the repeats.

    Returns:
        "copy": bytes read and written a second; "matmul": operations a second by dtype; "cache": bytes of the
        largest cache, where the system tells.
    """
    data = torch.ones(_COPY_BYTES[device] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(data)
    side = _SIDE[device]
    calls = {"copy": prepare(lambda: target.copy_(data), device)}
    for name in dtypes:
        a, b = (torch.randn(side, side, device=device).to(getattr(torch, name)) for _ in range(2))
        calls[name] = prepare(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    best = {name: spread(times).low / 1e3 for name, times in interleaved(calls, repeats).items()}
    matmul = {name: 2 * side**3 / best[name] for name in dtypes}
    speeds = {"copy": {"bytes a second": 2 * data.nbytes / best["copy"]}, "matmul": matmul}
    cache = largest_cache(device)
    return speeds if cache is None else speeds | {"cache": {"bytes": cache}}


def largest_cache(device: str) -> int | None:
    """Bytes of a device's largest cache, which other cores may share, or None if unknown."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    # Linux writes 107520K.
    sizes = [file.read_text().strip() for file in _CPU_CACHES.glob("index*/size")]
    return max((1024 * int(size.removesuffix("K")) for size in sizes), default=None)
