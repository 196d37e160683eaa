"""The time that a demo may take."""

import time


class Budget:
    """Seconds from now on.

    Attributes:
        seconds: length of the whole.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = time.monotonic()

    def items(self, seconds_per_item: float, most: int) -> int:
        """The number of items that what is left allows, at least 10 whatever is left."""
        left = self.seconds - (time.monotonic() - self._started)
        return min(most, max(10, int(left / seconds_per_item)))
