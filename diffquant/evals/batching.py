"""Batches sequences within a token budget, trading padding against the number of passes."""

from collections.abc import Sequence

# Fixed cost of a forward pass, in tokens. The CPU's number was measured on two cores with a model of 135 M
# parameters; the one for CUDA estimates how much a device reads while the host launches a pass.
# It only trades padding against passes; results do not depend on it.
PASS_COST = 48
_CUDA_PASS_COST = 4096


def pass_cost_on(device_type: str) -> int:
    """Fixed cost of a forward pass in tokens on a type of device, such as "cuda"."""
    return _CUDA_PASS_COST if device_type == "cuda" else PASS_COST


def split_into_runs(lengths: Sequence[int], budget: int, cached: int = 0, pass_cost: int = PASS_COST) -> list[range]:
    """Cut a descending list of lengths into runs that minimize padded tokens plus `pass_cost` per run.

    Args:
        lengths: number of tokens in each sequence, longest first.
        budget: largest number of tokens in a run, padding and cached tokens included; a longer sequence runs alone.
        cached: number of tokens that each sequence already has in a cache.

    Returns:
        Consecutive ranges that cover every index.
    """
    first_as_long: list[int] = []
    for index, length in enumerate(lengths):
        is_shorter = index == 0 or length < lengths[index - 1]
        first_as_long.append(index if is_shorter else first_as_long[-1])
    cheapest, start_of = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        best, best_start, start = float("inf"), end - 1, end
        while start:
            length = lengths[start - 1]
            # Among sequences of one length, a run should take all that fit: leaving one out costs the run before at
            # least its length. So we try one start per length instead of one per sequence.
            farthest = max(first_as_long[start - 1], end - max(budget // (length + cached), 1))
            if farthest >= start:
                break
            cost = cheapest[farthest] + (end - farthest) * length + pass_cost
            if cost < best:
                best, best_start = cost, farthest
            start = farthest
            if start > first_as_long[start]:
                break
        cheapest.append(best)
        start_of.append(best_start)
    runs = []
    end = len(lengths)
    while end:
        runs.append(range(start_of[end], end))
        end = start_of[end]
    return runs[::-1]
