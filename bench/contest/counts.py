"""Operations counted and bytes moved by each way to compute an attention, in closed form.

Operations are two a multiply-add of the two matrix products, over the entries a causal mask leaves (all
entries where a way computes all of them). Bytes are those a way must move if every kernel reads its inputs
and writes its outputs once: what a roofline needs, not what caches make of it.

A map's QK takes d multiply-adds an entry and its PV as many as V is wide. So of a V1 pair, in units of
d an entry: fused 6 (2·1 + 2·2); two calls the same, V read twice; four calls with halves of V 8, since QK runs
twice; the matched Transformer's two heads 4; exact simulated logits 8, with one more QK for their scales.
"""

from dataclasses import dataclass

from diffquant.bench.contest.workloads import Workload, seen_entries


@dataclass(frozen=True)
class Count:
    """Cost of a call: its operations, and the bytes it moves."""

    operations: int
    bytes: int


def fused(work: Workload, *, key_bytes: float | None = None, value_bytes: float | None = None) -> Count:
    """Count of both maps in one kernel; caches may take fewer bytes an element."""
    return Count(_operations(work, qk=2, pv=2), _bytes(work, 1, 1, 1, key_bytes, value_bytes))


def two_calls(work: Workload) -> Count:
    """Count of a call a map; V is read by both, outputs are written, read and combined.

    V2 makes it one grouped call.
    """
    reads = 1 if work.model.shares_keys else 2
    return Count(_operations(work, qk=2, pv=2), _bytes(work, 1, reads, 2 + 2 + 1))


def four_calls(work: Workload) -> Count:
    """Count of a call a map and half of V; where V is as wide as K there is one half, and these are two calls."""
    if work.model.value_width == work.model.width:
        return two_calls(work)
    return Count(_operations(work, qk=4, pv=2), _bytes(work, 2, 2, 2 + 2 + 1))


def simulated(work: Workload) -> Count:
    """Count of simulated logits, computed twice: once for their scales, once to be rounded."""
    return Count(_operations(work, qk=4, pv=2), _bytes(work, 2, 1, 1))


def eager(work: Workload) -> Count:
    """Count of whole maps in memory.

    Logits are written, read and written by softmax, and read by the difference, which PV reads.
    """
    model, entries = work.model, work.queries * work.keys * work.batch * work.model.pairs
    operations = 2 * entries * (2 * model.width + model.value_width)
    # Both maps: out of QK, in and out of softmax, into the difference; one map out of it, into PV.
    return Count(operations, _bytes(work, 1, 1, 1) + (2 * 4 + 2) * entries * _element(work))


def eager_halves(work: Workload) -> Count:
    """Count of whole maps twice, for each half of V, as transformers' DiffLlama computes them."""
    model, entries = work.model, work.queries * work.keys * work.batch * work.model.pairs
    operations = 2 * entries * (4 * model.width + 2 * model.value_width)
    # Each of four maps: out of QK, in and out of softmax, into PV.
    return Count(operations, _bytes(work, 2, 2, 2 + 2 + 1) + 4 * 4 * entries * _element(work))


def transformer(work: Workload) -> Count:
    """Count of the matched Transformer: 2h heads of d, fused."""
    model = work.model
    entries = seen_entries(work.queries, work.keys) * work.batch * 2 * model.pairs
    kv_heads = model.kv_pairs if model.shares_keys else 2 * model.kv_pairs
    q = work.batch * work.queries * 2 * model.pairs * model.width
    kv = work.batch * work.keys * kv_heads * model.width
    return Count(2 * entries * 2 * model.width, (2 * q + 2 * kv) * _element(work))


def _operations(work: Workload, *, qk: int, pv: int) -> int:
    entries = seen_entries(work.queries, work.keys) * work.batch * work.model.pairs
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
