"""The protocol of multi-needle retrieval: magic numbers of cities are hidden in prose, and some are asked for.

The needles asked for stand together at a depth of the context, the others anywhere. The prompt is the
context and the needle's own sentence up to its number, which the model has to go on with.

Source: arXiv 2410.05258, section 3.4 (table 2 and figure 5).
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, cycle
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.evals.defaults import BATCH_TOKENS, LENGTHS, SAMPLES
from diffquant.evals.encoding import RequestEncoder
from diffquant.evals.language_model import LanguageModel
from diffquant.evals.scoring import score
from diffquant.support.progress import Progress, silent
from diffquant.support.spelling import spelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CITIES = (
    "Amsterdam Athens Baghdad Bangkok Barcelona Beijing Belgrade Berlin Bogota Boston Brussels Bucharest Budapest "
    "Cairo Calcutta Chicago Copenhagen Damascus Delhi Denver Dresden Dublin Edinburgh Florence Geneva Glasgow Hamburg "
    "Hanoi Havana Helsinki Houston Istanbul Jakarta Jerusalem Johannesburg Karachi Kyoto Lagos Lima Lisbon Liverpool "
    "London Lyon Madrid Manchester Manila Marseille Melbourne Miami Milan Montreal Moscow Munich Nairobi Naples Osaka "
    "Oslo Paris Prague Rome Seoul Shanghai Stockholm Sydney Tehran Tokyo Toronto Venice Vienna Warsaw Zurich"
)
CITIES = tuple(_CITIES.split())
NUMBERS = tuple(str(number) for number in range(10, 100))
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Changes with how items are made, so that results of other items are not taken for these. In format 1 two cities of a
# context could have one number; contexts in which none had are the same.
ITEMS_FORMAT = 2
# Not after a title, of which novels are full.
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+")
# Number of sentences below which haystacks would hardly differ.
_FEWEST_SENTENCES = 20


@dataclass(frozen=True)
class NeedlePlan:
    """Settings that decide which items are made.

    Attributes:
        needles: N, number of cities in a context, each with its magic number.
        asked: R, how many of them are asked for.
        lengths: largest numbers of tokens in a prompt, the question included.
        samples: number of items of each depth and length.
        seed: seed of everything drawn.
    """

    needles: int = 1
    asked: int = 1
    lengths: tuple[int, ...] = LENGTHS
    samples: int = SAMPLES
    seed: int = 0

    @property
    def item_lengths(self) -> list[int]:
        """Number of tokens that each item's prompt may have, in their order."""
        return [length for _ in range(self.samples) for length in self.lengths for _ in DEPTHS]

    def __post_init__(self) -> None:
        if not 1 <= self.asked <= self.needles <= len(CITIES):
            raise UsageError(
                f"needle: of {self.needles} needles {self.asked} are to be asked for; give 1 to {len(CITIES)} needles "
                "and at most as many to ask for"
            )
        if not self.lengths or min(self.lengths) < 1 or self.samples < 1:
            raise UsageError(f"needle: lengths {list(self.lengths)} and samples {self.samples} must be 1 or more")


@dataclass(frozen=True)
class NeedleItem:
    """A context and what is asked of it.

    Attributes:
        context: prose with the needles in it.
        asked: (city, number) in the order they are asked for.
        depth: place of the needles asked for, 0 at the start of the context, 1 at its end.
        length: number of tokens that the prompt may have.
    """

    context: str
    asked: tuple[tuple[str, str], ...]
    depth: float
    length: int

    def requests(self) -> list[tuple[str, str]]:
        """(prompt, continuation) of every city asked for, with the right answers to the ones before it."""
        texts, told = [], self.context
        for city, number in self.asked:
            before, after = statement(city, number).split(f" {number}")
            texts.append((f"{told} {before}", f" {number}"))
            told += f" {before} {number}{after}"
        return texts


def evaluate_needle(
    model: LanguageModel,
    text: str,
    plan: NeedlePlan,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> tuple[list[NeedleItem], list[float]]:
    """Make the items for a model's tokenizer, the first `limit` of them, and score them.

    Returns:
        The items, and each one's share of the cities asked for whose number greedy decoding gives.

    Raises:
        UsageError: the model cannot see a length, the text is too poor, or the needles do not fit.
    """
    items = make_items_for(model, text, plan)[:limit]
    encoder = RequestEncoder(model.tokenizer, model.max_length, model.vocabulary)
    requests = encoder.requests(texts for item in items for texts in item.requests())
    scores = iter(score(model, requests, batch_tokens, progress))
    # Greedy decoding gives a whole answer where each of its tokens is the likeliest after those before it.
    retrieved = [sum(next(scores).greedy for _ in item.asked) / len(item.asked) for item in items]
    return items, retrieved


def by_place(items: Iterable[NeedleItem], retrieved: Iterable[float]) -> list[dict[str, float]]:
    """Mean accuracy of each length and depth: the grid of figure 5."""
    cells: dict[tuple[int, float], list[float]] = {}
    for item, share in zip(items, retrieved, strict=True):
        cells.setdefault((item.length, item.depth), []).append(share)
    return [
        {"length": length, "depth": depth, "accuracy": sum(shares) / len(shares), "n": len(shares)}
        for (length, depth), shares in sorted(cells.items())
    ]


def make_items_for(model: LanguageModel, text: str, plan: NeedlePlan) -> list[NeedleItem]:
    """The items of a plan, checked to fit the model.

    Raises:
        UsageError: the model cannot see a length, the text is too poor, or the needles do not fit.
    """
    seen = model.max_length
    if max(plan.lengths) > seen:
        raise UsageError(
            f"needle: the model sees {seen} tokens, fewer than {max(plan.lengths)}; give {spelled('lengths')}"
        )
    return make_items(model.tokenizer, text, plan)


def make_items(tokenizer: "PreTrainedTokenizerBase", text: str, plan: NeedlePlan) -> list[NeedleItem]:
    """The items of a plan, one depth and length after another, so that any first part of them is balanced.

    They depend on the arguments alone: a plan with more samples, or another order of lengths, has the same items.

    Raises:
        UsageError: the tokenizer can spell too few of the text's sentences, or the needles do not fit.
    """
    haystack = _haystack(tokenizer, text)
    return [
        haystack.item(plan, length, depth, sample)
        for sample in range(plan.samples)
        for length in plan.lengths
        for depth in DEPTHS
    ]


class Haystack:
    """A text's sentences in order, with the number of tokens each has; those the tokenizer cannot spell are left out.

    Raises:
        UsageError: too few are left.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", text: str) -> None:
        self.tokenizer = tokenizer
        in_text = sentences(text)
        encoded = tokenizer([f" {s}" for s in in_text], add_special_tokens=False)["input_ids"]
        known = [(s, len(ids)) for s, ids in zip(in_text, encoded, strict=True) if tokenizer.unk_token_id not in ids]
        if len(known) < _FEWEST_SENTENCES:
            raise UsageError(
                f"needle: the tokenizer can spell {len(known)} of the text's {len(in_text)} sentences; "
                f"give another {spelled('text')}"
            )
        self.sentences = known

    def item(self, plan: NeedlePlan, length: int, depth: float, sample: int) -> NeedleItem:
        """One item; its haystack starts anywhere in the text and goes on from its beginning at its end.

        Raises:
            UsageError: the needles alone are longer than the length.
        """
        rng = random.Random(f"{plan.seed} {plan.needles} {plan.asked} {length} {depth} {sample}")
        cities = rng.sample(CITIES, plan.needles)
        needles = list(zip(cities, _draw_numbers(rng, plan.needles), strict=True))
        asked, others = tuple(needles[: plan.asked]), needles[plan.asked :]
        first = rng.randrange(len(self.sentences))
        places = [rng.random() for _ in others]
        prose = self._fill(length, asked, others, first)
        while True:
            item = NeedleItem(_assemble(prose, asked, others, depth, places), asked, depth, length)
            prompt, answer = item.requests()[-1]
            if len(self.tokenizer.encode(prompt + answer)) <= length:
                return item
            if not prose:
                raise UsageError(
                    f"needle: {plan.needles} needles do not fit into {length} tokens; give longer {spelled('lengths')}"
                )
            # Rarely: tokens can differ where sentences meet.
            prose = prose[:-1]

    def _fill(
        self, length: int, asked: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]], first: int
    ) -> list[str]:
        """Sentences in order from the first on, as many as there is room for beside the needles and questions."""
        statements = [statement(*needle) for needle in (*asked, *others, *asked)]
        room = length - len(self.tokenizer.encode(" ".join(statements)))
        prose: list[str] = []
        for sentence, tokens in cycle([*self.sentences[first:], *self.sentences[:first]]):
            if tokens > room:
                break
            prose.append(sentence)
            room -= tokens
        return prose


def _draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Numbers that differ: were two the same, an answer would not say which city it is of."""
    drawn: list[str] = []
    while len(drawn) < count:
        number = rng.choice(NUMBERS)
        if number not in drawn:
            drawn.append(number)
    return drawn


# The last one is kept, since a sweep's next cell asks for the same.
_haystack = lru_cache(maxsize=1)(Haystack)


def statement(city: str, number: str) -> str:
    """The needle's sentence."""
    return f"The magic number for {city} is {number}."


def sentences(text: str) -> list[str]:
    """A text's sentences in order, each on one line, with straight apostrophes."""
    return [s for s in _SENTENCE_END.split(" ".join(text.replace("’", "'").split())) if s]


def needle_digest(items: Iterable[NeedleItem]) -> str:
    """A digest that changes with any item and with their order."""
    lines = (json.dumps([item.context, item.asked, item.depth, item.length]) for item in items)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _assemble(
    prose: Sequence[str],
    asked: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]],
    depth: float,
    places: Sequence[float],
) -> str:
    """A context: the needles asked for follow a sentence near their depth, the others one near places of their own."""
    ends = [0, *accumulate(map(len, prose))]
    placed: dict[int, list[str]] = {}
    for place, needle in [*zip(places, others, strict=True), *((depth, needle) for needle in asked)]:
        nearest = min(range(len(ends)), key=lambda end: abs(ends[end] - place * ends[-1]))
        placed.setdefault(nearest, []).append(statement(*needle))
    parts = [*placed.get(0, [])]
    for number, sentence in enumerate(prose, 1):
        parts += [sentence, *placed.get(number, [])]
    return " ".join(parts)
