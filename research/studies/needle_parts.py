"""The tokens of a needle prompt, and the part of it that each belongs to."""

import re
from dataclasses import dataclass
from typing import Any

from diffquant.checkpoints.texts import check_tokens
from diffquant.errors import UsageError
from diffquant.measure.protocols.needle import NeedleItem, needle_sentence

# The number asked for, the rest of its sentence, the sentences of other needles, prose, the question, and the
# first token, which a softmax that has nowhere else to go attends to. A token on the border of two belongs to
# the one named first; the first token to none but its own.
PARTS = ("answer", "sentence", "others", "prose", "question", "first")
_ANSWER, _SENTENCE, _OTHERS, _PROSE, _QUESTION, _FIRST = range(len(PARTS))
_STATEMENT = re.compile(needle_sentence(r"\w+", r"(\d+)"))


@dataclass(frozen=True)
class Prompt:
    """A needle prompt up to the right number.

    Attributes:
        ids: token ids [T].
        parts: index into `PARTS` of each token, [T].
        answer: id of the number's first token.
    """

    ids: list[int]
    parts: list[int]
    answer: int


def make_prompt(tokenizer: Any, item: NeedleItem, vocabulary: int) -> Prompt:
    """The prompt of an item's first question, its tokens assigned to parts.

    Raises:
        UsageError: the tokenizer cannot say where in the text its tokens stand, or makes one that is not in the model's
            vocabulary.
    """
    if not tokenizer.is_fast:
        raise UsageError("the tokenizer does not say where its tokens stand; the folder needs a tokenizer.json")
    prompt, answer = item.query_texts()[0]
    encoded = tokenizer(prompt + answer, return_offsets_mapping=True)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    check_tokens(ids, vocabulary, tokenizer)
    # Where a space is a token of its own, the number's first token comes after it.
    start = len(prompt) + len(answer) - len(answer.lstrip())
    length = next(at for at, (_, last) in enumerate(places) if last > start)
    characters = _parts_of_characters(item, start)
    parts = [min(characters[first:last], default=_QUESTION) for first, last in places[:length]]
    return Prompt(ids[:length], [_FIRST, *parts[1:]], ids[length])


def _parts_of_characters(item: NeedleItem, length: int) -> list[int]:
    """Index into `PARTS` of each of the prompt's first `length` characters."""
    parts = [_PROSE] * len(item.context) + [_QUESTION] * (length - len(item.context))
    asked = needle_sentence(*item.asked[0])
    for needle in _STATEMENT.finditer(item.context):
        first, last = needle.span()
        parts[first:last] = [_SENTENCE if needle[0] == asked else _OTHERS] * (last - first)
        if needle[0] == asked:
            first, last = needle.span(1)
            parts[first:last] = [_ANSWER] * (last - first)
    return parts
