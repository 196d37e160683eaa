"""Lists faults of a data file for an error message. No torch here."""

_NAMED_FAULTS = 5


def first_few(faults: list[str]) -> str:
    """The first faults, and the number of others."""
    more = f"; and {len(faults) - _NAMED_FAULTS} more" if len(faults) > _NAMED_FAULTS else ""
    return "; ".join(faults[:_NAMED_FAULTS]) + more
