"""Multi-needle retrieval: the magic numbers of a few cities, hidden in prose, of which some are asked for.

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
from diffquant.evals.encoding import PairEncoder
from diffquant.evals.language_model import LanguageModel
from diffquant.evals.scoring import score
from diffquant.support.progress import Progress, silent

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
# Changes with how items are made, so that results of other items are not taken for these.
ITEMS_FORMAT = 1
# Not after a title, of which novels are full.
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+")
# Sentences that must be there for haystacks to differ.
_FEWEST_SENTENCES = 20


@dataclass(frozen=True)
class Plan:
    """Which items are made.

    Attributes:
        needles: N, pairs of city and number in a context.
        asked: R, how many of them are asked for.
        lengths: tokens of a prompt, the question included, at most.
        samples: items of each depth and length.
        seed: of everything drawn.
    """

    needles: int = 1
    asked: int = 1
    lengths: tuple[int, ...] = LENGTHS
    samples: int = SAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.asked <= self.needles <= len(CITIES):
            raise UsageError(
                f"needle: of {self.needles} needles {self.asked} are to be asked for; give 1 to {len(CITIES)} needles "
                "and at most as many to ask for"
            )
        if not self.lengths or min(self.lengths) < 1 or self.samples < 1:
            raise UsageError(f"needle: lengths {list(self.lengths)} and samples {self.samples} must be 1 or more")


@dataclass(frozen=True)
class Item:
    """A context and what is asked of it.

    Attributes:
        context: prose with the needles in it.
        asked: (city, number) in the order they are asked for.
        depth: where they stand, 0 at the start of the context.
        length: tokens that the prompt may have.
    """

    context: str
    asked: tuple[tuple[str, str], ...]
    depth: float
    length: int

    def requests(self) -> list[tuple[str, str]]:
        """(prompt, continuation) of every city asked for, the right answers before it given."""
        pairs, said = [], self.context
        for city, number in self.asked:
            before, after = statement(city, number).split(f" {number}")
            pairs.append((f"{said} {before}", f" {number}"))
            said += f" {before} {number}{after}"
        return pairs


@dataclass(frozen=True)
class Outcome:
    """What a model retrieved: for every item the share of its cities whose number greedy decoding gives."""

    items: list[Item]
    retrieved: list[float]

    def by_place(self) -> list[dict[str, float]]:
        """Mean accuracy of each length and depth: the grid of figure 5."""
        cells: dict[tuple[int, float], list[float]] = {}
        for item, share in zip(self.items, self.retrieved, strict=True):
            cells.setdefault((item.length, item.depth), []).append(share)
        return [
            {"length": length, "depth": depth, "accuracy": sum(shares) / len(shares), "n": len(shares)}
            for (length, depth), shares in sorted(cells.items())
        ]


def evaluate(
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    plan: Plan,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> Outcome:
    """Make the items for a tokenizer, the first `limit` of them, and score them.

    Raises:
        UsageError: the model cannot see a length, the text is too poor, or the needles do not fit.
    """
    items = items_for(model, tokenizer, text, plan)[:limit]
    encoder = PairEncoder(tokenizer, model.max_length(tokenizer))
    requests = encoder.requests(pair for item in items for pair in item.requests())
    scores = iter(score(model, requests, batch_tokens, progress))
    # Greedy decoding gives a whole answer where each of its tokens is the likeliest after those before it.
    retrieved = [sum(next(scores).greedy for _ in item.asked) / len(item.asked) for item in items]
    return Outcome(items, retrieved)


def items_for(model: LanguageModel, tokenizer: "PreTrainedTokenizerBase", text: str, plan: Plan) -> list[Item]:
    """`make_items` where a model can see them.

    Raises:
        UsageError: the model cannot see a length, the text is too poor, or the needles do not fit.
    """
    seen = model.max_length(tokenizer)
    if max(plan.lengths) > seen:
        raise UsageError(f"needle: the model sees {seen} tokens, fewer than {max(plan.lengths)}; give --lengths")
    return make_items(tokenizer, text, plan)


def make_items(tokenizer: "PreTrainedTokenizerBase", text: str, plan: Plan) -> list[Item]:
    """Items that depend on arguments alone; a depth and length after another, so that any first part is balanced.

    The same plan at more samples, and any order of lengths, gives the same items again.

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
    """A text's sentences in order, with the tokens each has; what the tokenizer cannot spell is left out.

    Raises:
        UsageError: too few are left.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", text: str) -> None:
        self.tokenizer = tokenizer
        every = sentences(text)
        spelled = tokenizer([f" {s}" for s in every], add_special_tokens=False)["input_ids"]
        known = [(s, len(ids)) for s, ids in zip(every, spelled, strict=True) if tokenizer.unk_token_id not in ids]
        if len(known) < _FEWEST_SENTENCES:
            raise UsageError(
                f"needle: the tokenizer can spell {len(known)} of the text's {len(every)} sentences; "
                "give another --text"
            )
        self.sentences = known

    def item(self, plan: Plan, length: int, depth: float, sample: int) -> Item:
        """One item; its haystack starts anywhere in the text and goes on from its beginning at its end.

        Raises:
            UsageError: the needles alone are longer than the length.
        """
        rng = random.Random(f"{plan.seed} {plan.needles} {plan.asked} {length} {depth} {sample}")
        cities = rng.sample(CITIES, plan.needles)
        pairs = [(city, rng.choice(NUMBERS)) for city in cities]
        asked, others = tuple(pairs[: plan.asked]), pairs[plan.asked :]
        first = rng.randrange(len(self.sentences))
        places = [rng.random() for _ in others]
        taken = self._fill(length, asked, others, first)
        while True:
            item = Item(_assemble(taken, asked, others, depth, places), asked, depth, length)
            prompt, answer = item.requests()[-1]
            if len(self.tokenizer.encode(prompt + answer)) <= length:
                return item
            if not taken:
                raise UsageError(
                    f"needle: {plan.needles} needles do not fit into {length} tokens; give longer --lengths"
                )
            # Rarely: tokens can differ where sentences meet.
            taken = taken[:-1]

    def _fill(
        self, length: int, asked: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]], first: int
    ) -> list[str]:
        """Sentences in order from the first on, as many as there is room for beside the needles and questions."""
        told = [statement(*pair) for pair in (*asked, *others, *asked)]
        room = length - len(self.tokenizer.encode(" ".join(told)))
        taken: list[str] = []
        for sentence, tokens in cycle([*self.sentences[first:], *self.sentences[:first]]):
            if tokens > room:
                break
            taken.append(sentence)
            room -= tokens
        return taken


@lru_cache(maxsize=1)
def _haystack(tokenizer: "PreTrainedTokenizerBase", text: str) -> Haystack:
    """Kept for the next cell of a sweep, which asks for the same."""
    return Haystack(tokenizer, text)


def statement(city: str, number: str) -> str:
    return f"The magic number for {city} is {number}."


def sentences(text: str) -> list[str]:
    """Sentences in order, on one line each, with straight apostrophes."""
    return [s for s in _SENTENCE_END.split(" ".join(text.replace("’", "'").split())) if s]


def identity(items: Iterable[Item]) -> str:
    """One digest for items in order."""
    lines = (json.dumps([item.context, item.asked, item.depth, item.length]) for item in items)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _assemble(
    prose: Sequence[str],
    asked: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]],
    depth: float,
    places: Sequence[float],
) -> str:
    """The needles asked for at the end of a sentence near their depth, the others likewise at places of their own."""
    ends = [0, *accumulate(map(len, prose))]
    placed: dict[int, list[str]] = {}
    for place, pair in [*zip(places, others, strict=True), *((depth, pair) for pair in asked)]:
        nearest = min(range(len(ends)), key=lambda end: abs(ends[end] - place * ends[-1]))
        placed.setdefault(nearest, []).append(statement(*pair))
    parts = [*placed.get(0, [])]
    for number, sentence in enumerate(prose, 1):
        parts += [sentence, *placed.get(number, [])]
    return " ".join(parts)
