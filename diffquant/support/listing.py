"""Lists what an error message names. No torch here."""

from collections.abc import Iterable

_NAMED = 5


def first_few(items: Iterable[object], between: str = "; ", most: int = _NAMED) -> str:
    """The first of some items and the number of others: a model has hundreds of tensors, and a message is read."""
    texts = list(map(str, items))
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join(texts[:most] + more)
