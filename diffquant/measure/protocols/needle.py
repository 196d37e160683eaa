"""The protocol of multi-needle retrieval: magic numbers of cities are hidden in prose, and some are queried.

The queried needles are next to each other at one depth of the context; the others are anywhere. The prompt is the
context and a queried needle's sentence up to its number, which the model has to continue with.

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
from diffquant.measure.language_model import LanguageModel, RequestEncoder
from diffquant.measure.scoring import score
from diffquant.measure.task import BATCH_TOKENS, NEEDLE_LENGTHS
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, report_nothing

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
# Raise it when items are made differently, so that stored results of other items are not reused. In format 1 two cities
# of a context could have the same number; all other contexts are unchanged.
ITEMS_FORMAT = 2
# A title such as "Mr.", frequent in novels, does not end a sentence.
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+")
# Number of sentences below which haystacks would hardly differ.
_FEWEST_SENTENCES = 20


@dataclass(frozen=True)
class NeedlePlan:
    """Settings that determine the items.

    Attributes:
        needles: N, number of cities in a context, each with its magic number.
        asked: R, number of queried cities.
        lengths: prompt lengths in tokens, each an upper bound that includes the question.
        samples: number of items for each depth and length.
        seed: seed of all random draws.
    """

    needles: int = 1
    asked: int = 1
    lengths: tuple[int, ...] = NEEDLE_LENGTHS
    samples: int = 50
    seed: int = 0

    @property
    def item_lengths(self) -> list[int]:
        """Largest number of tokens in each item's prompt, in the order of the items."""
        return [length for _ in range(self.samples) for length in self.lengths for _ in DEPTHS]

    def __post_init__(self) -> None:
        if not 1 <= self.asked <= self.needles <= len(CITIES):
            raise UsageError(
                f"needle: {self.asked} of {self.needles} needles cannot be queried; give 1 to {len(CITIES)} needles "
                "and at most as many queries"
            )
        if not self.lengths or min(self.lengths) < 1 or self.samples < 1:
            raise UsageError(f"needle: lengths {list(self.lengths)} and samples {self.samples} must be 1 or more")


@dataclass(frozen=True)
class NeedleItem:
    """A context and the queries on it.

    Attributes:
        context: prose with the needles in it.
        asked: (city, number) of each query, in order.
        depth: position of the queried needles, 0 at the start of the context, 1 at its end.
        length: largest number of tokens in the prompt.
    """

    context: str
    asked: tuple[tuple[str, str], ...]
    depth: float
    length: int

    def query_texts(self) -> list[tuple[str, str]]:
        """Return (prompt, continuation) of every queried city; a prompt holds the right answers to earlier queries."""
        texts, so_far = [], self.context
        for city, number in self.asked:
            before, after = needle_sentence(city, number).split(f" {number}")
            texts.append((f"{so_far} {before}", f" {number}"))
            so_far += f" {before} {number}{after}"
        return texts


def evaluate_needle(
    model: LanguageModel,
    text: str,
    plan: NeedlePlan,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
) -> tuple[list[NeedleItem], list[float]]:
    """Make the items of a plan with a model's tokenizer, and score the first `limit` of them.

    Returns:
        The items, and for each the fraction of queried cities whose number greedy decoding produces.

    Raises:
        UsageError: a length exceeds the model's context, the text has too few usable sentences, or the needles do not
            fit.
    """
    items = make_checked_items(model, text, plan)[:limit]
    encoder = RequestEncoder(model.tokenizer, model.max_length, model.vocabulary_size)
    requests = encoder.encode_requests(texts for item in items for texts in item.query_texts())
    scores = iter(score(model, requests, batch_tokens, progress))
    # Greedy decoding produces an answer if each of its tokens is the top-1 token after those before it.
    retrieved = [sum(next(scores)[1] for _ in item.asked) / len(item.asked) for item in items]
    return items, retrieved


def compute_accuracy_grid(items: Iterable[NeedleItem], retrieved: Iterable[float]) -> list[dict[str, float]]:
    """Compute the mean accuracy at each prompt length and depth, the grid of figure 5.

    Args:
        retrieved: fraction of each item's queries that were answered correctly.

    Returns:
        An object with length, depth, accuracy (from 0 to 1) and n, the number of items, for each cell of the grid.
    """
    cells: dict[tuple[int, float], list[float]] = {}
    for item, share in zip(items, retrieved, strict=True):
        cells.setdefault((item.length, item.depth), []).append(share)
    return [
        {"length": length, "depth": depth, "accuracy": sum(shares) / len(shares), "n": len(shares)}
        for (length, depth), shares in sorted(cells.items())
    ]


def make_checked_items(model: LanguageModel, text: str, plan: NeedlePlan) -> list[NeedleItem]:
    """Check that a plan's prompts fit into a model's context, and make its items with the model's tokenizer.

    Raises:
        UsageError: a length exceeds the model's context, the text has too few usable sentences, or the needles do not
            fit.
    """
    longest = model.max_length
    if max(plan.lengths) > longest:
        raise UsageError(
            f"needle: prompts of {max(plan.lengths)} tokens exceed the model's context of {longest}; give shorter "
            f"{option_name('lengths')}"
        )
    return make_items(model.tokenizer, text, plan)


def make_items(tokenizer: "PreTrainedTokenizerBase", text: str, plan: NeedlePlan) -> list[NeedleItem]:
    """Make the items of a plan.

    Items cycle over depths and lengths, so any number of first items covers these about equally. An item depends
    only on the tokenizer, the text, the plan's seed and numbers of needles, and its own length, depth and sample
    number. So a plan with more samples, or with its lengths in another order, contains the same items.

    Raises:
        UsageError: the tokenizer can encode too few of the text's sentences, or the needles do not fit.
    """
    known = encodable_sentences(tokenizer, text)
    return [
        _make_item(tokenizer, known, plan, length, depth, sample)
        for sample in range(plan.samples)
        for length in plan.lengths
        for depth in DEPTHS
    ]


@lru_cache(maxsize=1)  # A sweep's next cell reads the same text.
def encodable_sentences(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[tuple[str, int]]:
    """Return the sentences of a text that the tokenizer can encode, in order, each with its number of tokens.

    Raises:
        UsageError: the tokenizer can encode too few sentences.
    """
    in_text = split_sentences(text)
    encoded = tokenizer([f" {s}" for s in in_text], add_special_tokens=False)["input_ids"]
    known = [(s, len(ids)) for s, ids in zip(in_text, encoded, strict=True) if tokenizer.unk_token_id not in ids]
    if len(known) < _FEWEST_SENTENCES:
        raise UsageError(
            f"needle: the tokenizer can encode only {len(known)} of the text's {len(in_text)} sentences; "
            f"give another {option_name('text')}"
        )
    return known


def _make_item(
    tokenizer: "PreTrainedTokenizerBase",
    known: Sequence[tuple[str, int]],
    plan: NeedlePlan,
    length: int,
    depth: float,
    sample: int,
) -> NeedleItem:
    """Make one item; its haystack starts anywhere in the text and wraps around at the end.

    Raises:
        UsageError: the needles and questions are longer than the prompt may be.
    """
    rng = random.Random(f"{plan.seed} {plan.needles} {plan.asked} {length} {depth} {sample}")
    cities = rng.sample(CITIES, plan.needles)
    needles = list(zip(cities, _draw_numbers(rng, plan.needles), strict=True))
    asked, others = tuple(needles[: plan.asked]), needles[plan.asked :]
    first = rng.randrange(len(known))
    places = [rng.random() for _ in others]
    prose = _fill(tokenizer, [*known[first:], *known[:first]], length, asked, others)
    while True:
        item = NeedleItem(_assemble(prose, asked, others, depth, places), asked, depth, length)
        prompt, answer = item.query_texts()[-1]
        if len(tokenizer.encode(prompt + answer)) <= length:
            return item
        if not prose:
            raise UsageError(
                f"needle: {plan.needles} needles do not fit into {length} tokens; give longer {option_name('lengths')}"
            )
        # Rarely needed: where sentences meet, tokens can differ from those of the single sentences.
        prose = prose[:-1]


def _fill(
    tokenizer: "PreTrainedTokenizerBase",
    known: Sequence[tuple[str, int]],
    length: int,
    asked: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]],
) -> list[str]:
    """Take sentences in order, as many as fit with the needles and questions."""
    statements = [needle_sentence(*needle) for needle in (*asked, *others, *asked)]
    room = length - len(tokenizer.encode(" ".join(statements)))
    prose: list[str] = []
    for sentence, tokens in cycle(known):
        if tokens > room:
            break
        prose.append(sentence)
        room -= tokens
    return prose


def _draw_numbers(rng: random.Random, count: int) -> list[str]:
    """Draw distinct numbers, so that an answer identifies its city."""
    drawn: list[str] = []
    while len(drawn) < count:
        number = rng.choice(NUMBERS)
        if number not in drawn:
            drawn.append(number)
    return drawn


def needle_sentence(city: str, number: str) -> str:
    """Return the needle: the sentence that states a city's magic number."""
    return f"The magic number for {city} is {number}."


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, replacing line breaks by spaces and curly apostrophes by straight ones."""
    return [s for s in _SENTENCE_END.split(" ".join(text.replace("’", "'").split())) if s]


def needle_digest(items: Iterable[NeedleItem]) -> str:
    """Compute a digest of the items in their order."""
    lines = (json.dumps([item.context, item.asked, item.depth, item.length]) for item in items)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _assemble(
    prose: Sequence[str],
    asked: Sequence[tuple[str, str]],
    others: Sequence[tuple[str, str]],
    depth: float,
    places: Sequence[float],
) -> str:
    """Insert the queried needles at their depth, and each other needle at its own place, between sentences."""
    ends = [0, *accumulate(map(len, prose))]
    placed: dict[int, list[str]] = {}
    for place, needle in [*zip(places, others, strict=True), *((depth, needle) for needle in asked)]:
        nearest = min(range(len(ends)), key=lambda end: abs(ends[end] - place * ends[-1]))
        placed.setdefault(nearest, []).append(needle_sentence(*needle))
    parts = [*placed.get(0, [])]
    for number, sentence in enumerate(prose, 1):
        parts += [sentence, *placed.get(number, [])]
    return " ".join(parts)
