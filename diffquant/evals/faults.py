"""Faults of a data file as an error tells them. No torch here."""

_NAMED_FAULTS = 5


def first_few(faults: list[str]) -> str:
    """The first faults, and how many more there are."""
    more = f"; and {len(faults) - _NAMED_FAULTS} more" if len(faults) > _NAMED_FAULTS else ""
    return "; ".join(faults[:_NAMED_FAULTS]) + more
