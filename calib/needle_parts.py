"""A needle prompt's tokens, and which part of it each belongs to."""

import re
from dataclasses import dataclass
from typing import Any

from diffquant.errors import UsageError
from diffquant.evals.encoding import PairEncoder
from diffquant.evals.needle import Item, statement

# The number asked for, the rest of its sentence, the sentences of other needles, prose, the question, and the
# first token, which a softmax that has nowhere else to go attends to. A token on the border of two belongs to
# the one named first; the first token to none but its own.
PARTS = ("answer", "sentence", "others", "prose", "question", "first")
_ANSWER, _SENTENCE, _OTHERS, _PROSE, _QUESTION, _FIRST = range(len(PARTS))
_STATEMENT = re.compile(statement(r"\w+", r"(\d+)"))


@dataclass(frozen=True)
class Prompt:
    """Tokens [T], the index into `PARTS` of each, and the first token of the right answer."""

    ids: list[int]
    parts: list[int]
    answer: int


def make_prompt(tokenizer: Any, item: Item) -> Prompt:
    """The prompt of an item's first question.

    Raises:
        UsageError: the tokenizer cannot say where in the text its tokens stand.
    """
    if not tokenizer.is_fast:
        raise UsageError("the tokenizer does not say where its tokens stand; the folder needs a tokenizer.json")
    prompt, answer = item.requests()[0]
    encoded = tokenizer(prompt, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    characters = _parts_of_characters(item, len(prompt))
    parts = [min(characters[first:last], default=_QUESTION) for first, last in encoded["offset_mapping"]]
    expected = PairEncoder(tokenizer, len(ids) + item.length).request(prompt, answer).continuation[0]
    return Prompt(ids, [_FIRST, *parts[1:]], expected)


def _parts_of_characters(item: Item, length: int) -> list[int]:
    parts = [_PROSE] * len(item.context) + [_QUESTION] * (length - len(item.context))
    asked = statement(*item.asked[0])
    for found in _STATEMENT.finditer(item.context):
        first, last = found.span()
        parts[first:last] = [_SENTENCE if found[0] == asked else _OTHERS] * (last - first)
        if found[0] == asked:
            first, last = found.span(1)
            parts[first:last] = [_ANSWER] * (last - first)
    return parts
