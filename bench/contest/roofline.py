"""Roofline of this machine, measured: bytes a second of a copy, operations a second of a matrix product."""

import torch

from diffquant.bench.timing import interleaved, prepare, spread

_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
_SIDE = {"cpu": 1536, "cuda": 8192}


def measure_roofline(device: str, dtypes: list[str], repeats: int = 3) -> dict[str, dict[str, float]]:
    """Speeds of this machine, the best of the repeats.

    Returns:
        "copy": bytes read and written a second; "matmul": operations a second by dtype.
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
    return {"copy": {"bytes a second": 2 * data.nbytes / best["copy"]}, "matmul": matmul}
