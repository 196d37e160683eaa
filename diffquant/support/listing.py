"""Lists what an error message names. No torch here."""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TypeVar

NAMED = 5
_Item = TypeVar("_Item", bound=Hashable)


def first_few(items: Iterable[object], between: str = "; ", most: int = NAMED) -> str:
    """The first of some items and the number of others: a model has hundreds of tensors, and a message is read."""
    texts = list(map(str, items))
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join(texts[:most] + more)


def repeated(items: Iterable[_Item]) -> list[_Item]:
    """Items that occur more than once, in the order of their first occurrence."""
    return [item for item, times in Counter(items).items() if times > 1]
