"""Durations for people."""


def spoken(seconds: float) -> str:
    """A duration in a fitting unit: 8 s, 12 min, or 2 h 5 min."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
