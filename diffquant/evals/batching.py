"""Batches of sequences that run together, with as little padding as pays, within a token budget."""

from collections.abc import Sequence

# What one forward pass costs beyond its tokens, in tokens. On a CPU it was measured, on two cores with a model of
# 135 M parameters; on a CUDA device it is an estimate, of what such a device reads while the host launches a pass.
# It only trades padding against passes; results do not depend on it.
PASS_COST = 48
_CUDA_PASS_COST = 4096


def pass_cost_on(device_type: str) -> int:
    """Tokens that a forward pass costs beyond its own on a type of device, such as "cuda"."""
    return _CUDA_PASS_COST if device_type == "cuda" else PASS_COST


def split_into_runs(lengths: Sequence[int], budget: int, cached: int = 0, pass_cost: int = PASS_COST) -> list[range]:
    """Cut a descending list into runs so that padded tokens plus `pass_cost` a run are fewest.

    Args:
        lengths: number of tokens in each sequence, longest first.
        budget: most tokens in a run, padding and cached tokens included; a sequence beyond it runs alone.
        cached: number of tokens that each sequence has in a cache before it runs.

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
            # Of sequences of one length, the more that fit the better: one that a run leaves out costs the run before
            # at least its length. So there is one start to try for each length, and not for each sequence.
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
