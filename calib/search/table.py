"""The table of a search: candidates on the text held out, and a sentence that compares them."""

import itertools
import math

from diffquant.calib.search.result import Candidate, SearchResult
from diffquant.calib.search.roles import roles_table
from diffquant.report.tables import aligned, megabytes

HEADS = ("recipe", "stored bits", "checkpoint", "perplexity", "KL", "predicted KL")

# Shares of a way from one width to the next that count as the same place.
_ALIKE = 0.02


def search_table(result: SearchResult) -> str:
    """A table of the candidates on the text held out, and how the search compares with uniform bits of its size.

    Where parts were measured, a table of what each kind of tensor pays for its bits comes between them.
    """
    parts = [] if result.parts is None else [*aligned(*roles_table(result), names=2), ""]
    return "\n".join([*aligned(HEADS, table_lines(result), names=2), "", *parts, verdict(result)])


def table_lines(result: SearchResult) -> list[list[str]]:
    """Lines of the table under `HEADS`, 16 bits first."""
    return [["16 bits", "16", "", f"{result.perplexity:.3f}", "", ""], *map(_cells, result.candidates)]


def verdict(result: SearchResult) -> str:
    """A sentence that compares the searched recipe with uniform bits of the same size, by the KL measured."""
    searched = result.candidates[0]
    uniform = uniform_kl(result)
    rival = "" if uniform is None else f"{uniform:.4g} of uniform widths that store as much (interpolated), "
    even = next(c for c in result.candidates if c.name == "spread evenly")
    return (
        f"budget {result.budget}: KL {searched.kl:.4g} on text held out, against {rival}{even.kl:.4g} of the same "
        "widths spread evenly"
    )


def uniform_kl(result: SearchResult) -> float | None:
    """The KL of uniform widths at the searched recipe's stored bits, between two of them interpolated in log KL.

    None if no two enclose it, the targets lie at different points between them, or a width changes nothing.
    """
    searched = result.candidates[0].bits
    uniform = [candidate for candidate in result.candidates if candidate.name.startswith("uniform")]
    for low, high in itertools.pairwise(uniform):
        steps = {target: high.bits[target] - low.bits[target] for target in searched}
        # Short rows end in a half-filled word, where a wider code may come for nothing.
        if not all(steps.values()) or min(low.kl, high.kl) <= 0:
            continue
        shares = [(searched[target] - low.bits[target]) / step for target, step in steps.items()]
        if min(shares) >= 0 and max(shares) <= min(1, min(shares) + _ALIKE):
            return math.exp((1 - shares[0]) * math.log(low.kl) + shares[0] * math.log(high.kl))
    return None


def _cells(candidate: Candidate) -> list[str]:
    bits = ", ".join(
        f"{mean:.2f}" if len(candidate.bits) == 1 else f"{t} {mean:.2f}" for t, mean in candidate.bits.items()
    )
    predicted = "-" if candidate.predicted is None else f"{candidate.predicted:.4g}"
    return [
        candidate.name,
        bits,
        megabytes(candidate.nbytes),
        f"{candidate.perplexity:.3f}",
        f"{candidate.kl:.4g}",
        predicted,
    ]
