"""Roofline: measured speeds of this machine, and counts of operations and bytes of implementations of attention.

Operations are two per multiply-add of the matmuls QK and PV, over the entries that a causal mask leaves visible, or
over all entries if an implementation computes all. Bytes assume that each kernel reads its inputs and writes its
outputs once, whatever caches do.

QK needs d multiply-adds per entry of a map, and PV dv. For a V1 pair (dv = 2d), in units of d per entry: fused 6
(2·1 + 2·2); two calls 6, with V read twice; four calls with halves of V 8, since QK runs twice; the matched
Transformer's two heads 4; exact simulated logits 8, with QK once more for their scales.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from diffquant.benchmarks.measuring import make_timer, run_in_turns
from diffquant.benchmarks.workloads import Workload
from diffquant.model.walk import count_visible_logits

_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
_SIDE = {"cpu": 1536, "cuda": 8192}
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def measure_roofline(device: str, dtypes: list[str]) -> dict[str, dict[str, float]]:
    """Measure the speeds of a device; each is the best of three measurements.

    Returns:
        "copy" has the bytes read and written per second, under "bytes a second"; "matmul" has operations per second by
        dtype; "cache" has the size of the largest cache, under "bytes", if the system reports it.
    """
    data = torch.ones(_COPY_BYTES[device] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(data)
    side = _SIDE[device]
    calls = {"copy": make_timer(lambda: target.copy_(data), device)}
    for name in dtypes:
        a, b = (torch.randn(side, side, device=device).to(getattr(torch, name)) for _ in range(2))
        calls[name] = make_timer(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    best = {name: min(times) / 1e3 for name, times in run_in_turns(calls, 3).items()}
    matmul = {name: 2 * side**3 / best[name] for name in dtypes}
    speeds = {"copy": {"bytes a second": 2 * data.nbytes / best["copy"]}, "matmul": matmul}
    cache = hardware_cache_bytes(device)
    return speeds if cache is None else speeds | {"cache": {"bytes": cache}}


def hardware_cache_bytes(device: str) -> int | None:
    """Return the size in bytes of a device's largest cache, which cores may share, or None if unknown."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    # Linux's format is "107520K".
    sizes = [file.read_text().strip() for file in _CPU_CACHES.glob("index*/size")]
    return max((1024 * int(size.removesuffix("K")) for size in sizes), default=None)


# Cost of a workload: its operations, and the bytes that are read and written. The functions below return it.
Count = tuple[int, int]


def count_fused_call(work: Workload, *, key_bytes: float | None = None, value_bytes: float | None = None) -> Count:
    """Count operations and bytes of one kernel that computes both maps.

    Args:
        key_bytes, value_bytes: stored bytes per element of a quantized cache's keys and values; by default those of the
            workload's dtype.
    """
    return _operations(work, qk=2, pv=2), _bytes(work, 1, 1, 1, key_bytes, value_bytes)


def count_cache(work: Workload, bits: int) -> Count:
    """Count operations and bytes of attention over a cache of this many bits, with 16-bit scales."""
    if bits == 16:
        return count_fused_call(work)
    key = bits + 16 / (64 if bits == 4 else work.model.width)
    return count_fused_call(work, key_bytes=key / 8, value_bytes=(bits + 16 / work.model.value_width) / 8)


def count_call_per_map(work: Workload) -> Count:
    """Count operations and bytes of one call per map, whose outputs are written, read again and combined.

    In V1 both calls read V. In V2 both maps are one grouped call, which reads V once.
    """
    reads = 1 if work.model.shares_keys else 2
    return _operations(work, qk=2, pv=2), _bytes(work, 1, reads, 2 + 2 + 1)


def count_call_per_half(work: Workload) -> Count:
    """Count operations and bytes of one call for each map and half of V, combined as in `count_call_per_map`.

    If a value is as wide as a key, V has no halves, and each map is one call.
    """
    if work.model.value_width == work.model.width:
        return count_call_per_map(work)
    return _operations(work, qk=4, pv=2), _bytes(work, 2, 2, 2 + 2 + 1)


def count_simulated_logits(work: Workload) -> Count:
    """Count operations and bytes with simulated quantized logits.

    Logits are computed twice: first to find their scales, then to round them.
    """
    return _operations(work, qk=4, pv=2), _bytes(work, 2, 1, 1)


def count_eager(work: Workload) -> Count:
    """Count operations and bytes of an implementation that stores whole attention maps in memory.

    Logits are written, read and written by softmax, and read by the subtraction; PV reads the result.
    """
    model, entries = work.model, work.queries * work.keys * work.batch * work.model.pairs
    operations = 2 * entries * (2 * model.width + model.value_width)
    # Each of two maps: written by QK, read and written by softmax, read by the subtraction. Their difference: written,
    # read by PV.
    return operations, _bytes(work, 1, 1, 1) + (2 * 4 + 2) * entries * _element(work)


def count_eager_halves(work: Workload) -> Count:
    """Count operations and bytes of an implementation that computes whole maps once for each half of V.

    DiffLlama of transformers does so.
    """
    model, entries = work.model, work.queries * work.keys * work.batch * work.model.pairs
    operations = 2 * entries * (4 * model.width + 2 * model.value_width)
    # Each of four maps: written by QK, read and written by softmax, read by PV.
    return operations, _bytes(work, 2, 2, 2 + 2 + 1) + 4 * 4 * entries * _element(work)


def count_transformer(work: Workload) -> Count:
    """Count operations and bytes of one fused kernel for the matched Transformer, with 2h heads for h DIFF pairs."""
    model = work.model
    entries = count_visible_logits(work.batch * 2 * model.pairs, work.queries, work.keys)
    kv_heads = model.kv_pairs if model.shares_keys else 2 * model.kv_pairs
    q = work.batch * work.queries * 2 * model.pairs * model.width
    kv = work.batch * work.keys * kv_heads * model.width
    return 2 * entries * 2 * model.width, (2 * q + 2 * kv) * _element(work)


def _operations(work: Workload, *, qk: int, pv: int) -> int:
    entries = count_visible_logits(work.batch * work.model.pairs, work.queries, work.keys)
    return 2 * entries * (qk * work.model.width + pv * work.model.value_width)


def _bytes(
    work: Workload,
    qk_reads: int,
    v_reads: int,
    outputs: int,
    key_bytes: float | None = None,
    value_bytes: float | None = None,
) -> int:
    model, element = work.model, _element(work)
    q = work.batch * work.queries * 2 * model.pairs * model.width
    k = work.batch * work.keys * (1 if model.shares_keys else 2) * model.kv_pairs * model.width
    v = work.batch * work.keys * model.kv_pairs * model.value_width
    out = work.batch * work.queries * model.pairs * model.value_width
    stored = qk_reads * k * (key_bytes or element) + v_reads * v * (value_bytes or element)
    return round((qk_reads * q + outputs * out) * element + stored)


def _element(work: Workload) -> int:
    return work.torch_dtype.itemsize


_SIMULATED = dict.fromkeys(
    ("DIFF, simulated logits 8:row", "DIFF, simulated logits 8:row:shift"), count_simulated_logits
)
# How to count a peer of `diffquant bench` by its name; others run one kernel that computes both maps.
COUNTS: Mapping[str, Callable[[Workload], Count]] = {
    "DIFF, eager": count_eager,
    "DIFF, simulated logits 8:row, eager": count_eager,
    "transformers' DiffLlama, eager": count_eager_halves,
    "transformers' DiffLlama, sdpa": count_call_per_half,
    "DIFF, simulated logits 8:row": count_simulated_logits,
    "DIFF, simulated logits 8:row:shift": count_simulated_logits,
    **{f"DIFF, {bits}-bit cache, unpacked": partial(count_cache, bits=bits) for bits in (8, 6, 4)},
    **{f"DIFF, fused, {bits}-bit cache": partial(count_cache, bits=bits) for bits in (16, 8, 6, 4)},
}
_COUNTS_BY_BEGINNING = {
    "Transformer": count_transformer, "FlashDiffAttn_1": count_call_per_map, "FlashDiffAttn_2": count_call_per_half
}  # fmt: skip


def count_call(path: str, work: Workload) -> dict[str, int]:
    """Count the operations of a peer's call, and the bytes that it reads and writes."""
    begins = (count for start, count in _COUNTS_BY_BEGINNING.items() if path.startswith(start))
    operations, moved = (COUNTS.get(path) or next(begins, count_fused_call))(work)
    return {"operations": operations, "bytes": moved}
