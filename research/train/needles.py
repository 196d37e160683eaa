"""Training sequences of the needle task: cities and their numbers in prose, then questions.

A sequence is what `diffquant.measure.protocols.needle` shows a model, but for two things. At its end several
questions follow one another, so that one sequence teaches many retrievals. And short sequences, which come first, hold
no prose and say "Paris is 42." alone: more answers a token, and no far way to any.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffquant.errors import UsageError
from diffquant.measure.protocols.needle import CITIES, NUMBERS, needle_sentence
from research.train.words import simple_sentences, split, word_tokenizer

_FEWEST_SENTENCES = 100


class Needles:
    """Batches that depend on the seed and the step alone.

    Args:
        text: English prose.
        context: tokens that the tokenizer says a model sees.
        frequent: number of the text's commonest words that the vocabulary takes.
        most_words: largest number of words in a sentence.
        needles: numbers of needles that a sequence may hold, drawn evenly from those that fit.
        brief: largest number of tokens of a short sequence.
        growth: number of cities and numbers at the start, and the batches between which the others join them, such as
            [4, 600, 2000]: the first 600 batches draw from 4 cities and 4 numbers, on which models learn to retrieve
            sooner; the next ones from evenly more, and those from 2000 on from all.
        prose: weight of all other tokens together, where the answers weigh 1.
    """

    def __init__(
        self,
        text: str,
        context: int,
        frequent: int,
        most_words: int,
        needles: list[int],
        brief: int,
        growth: tuple[int, int, int],
        prose: float,
    ) -> None:
        known = [*split(needle_sentence("", "")), *map(str.lower, CITIES), *NUMBERS]
        known_sentences, words = simple_sentences(text, known, frequent, most_words)
        if len(known_sentences) < _FEWEST_SENTENCES:
            raise UsageError(
                f"the text has {len(known_sentences)} sentences in its {frequent} commonest words; give more text"
            )
        self.tokenizer: PreTrainedTokenizerFast = word_tokenizer(words, context)
        self.needles = needles
        self.brief = brief
        self.growth = growth
        self.prose = prose
        self._sentences = [self._encode(sentence) for sentence in known_sentences]
        self._cities = [self._encode(city)[0] for city in CITIES]
        self._numbers = [self._encode(number)[0] for number in NUMBERS]
        *self._before, _, self._is, _, self._stop = self._encode(needle_sentence(CITIES[0], NUMBERS[0]))

    def batch(self, seed: int, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids [rows, length + 1] and the weight [rows, length] of each predicted token."""
        rng = np.random.default_rng((seed, step))
        made = [self._sequence(rng, step, length, self.needles) for _ in range(rows)]
        ids = torch.tensor([ids for ids, _ in made])
        answers = torch.tensor([answers for _, answers in made])[:, 1:]
        return ids, torch.where(answers, 1 / answers.sum(), self.prose / (~answers).sum())

    def questions(self, seed: int, step: int, rows: int, length: int, needles: int) -> list[tuple[list[int], int]]:
        """Contexts with a number of needles, as in sequences of this length, up to a first question's number.

        Returns:
            the prompt's tokens and the number that answers it, `rows` times.

        Raises:
            UsageError: the needles do not fit into the length.
        """
        rng = np.random.default_rng((seed, step))
        made = [self._sequence(rng, step, length, [needles]) for _ in range(rows)]
        ends = [answers.index(True) for _, answers in made]
        return [(ids[:end], ids[end]) for (ids, _), end in zip(made, ends, strict=True)]

    def describe(self) -> dict[str, int]:
        return {"vocabulary": len(self.tokenizer), "sentences": len(self._sentences)}

    def _sequence(
        self, rng: np.random.Generator, step: int, length: int, needles: Sequence[int]
    ) -> tuple[list[int], list[bool]]:
        """Sequence of length + 1 tokens with one of these numbers of needles, and which of its tokens are answers."""
        before = [] if length <= self.brief else self._before
        size = len(before) + 4
        known = self._known(self._cities, step)
        fitting = [n for n in needles if 2 * n * size <= length and n <= len(known)]
        if not fitting:
            raise UsageError(
                f"of {list(needles)} needles, {size} tokens each, none fit twice into {length} tokens of "
                f"{len(known)} cities; give longer sequences"
            )
        count = int(rng.choice(fitting))
        cities = rng.choice(known, count, replace=False).tolist()
        numbers = rng.choice(self._known(self._numbers, step), count).tolist()
        told = [[*before, c, self._is, n, self._stop] for c, n in zip(cities, numbers, strict=True)]
        haystack = [*told] if not before else self._haystack(rng, told, length - 2 * count * size)
        ids = [self.tokenizer.bos_token_id, *(token for part in haystack for token in part)]
        answers = [False] * len(ids)
        while len(ids) <= length:
            # Drawn anew each time: among cities asked for in turn, those not yet said would be a hint.
            ids += told[rng.integers(count)]
            answers += [place == size - 2 for place in range(size)]
        return ids[: length + 1], answers[: length + 1]

    def _known(self, words: list[int], step: int) -> list[int]:
        """Words that a batch at this step draws from."""
        few, start, end = self.growth
        grown = min(max(0.0, (step - start) / max(1, end - start)), 1.0)
        return words[: few + round(grown * (len(words) - few))]

    def _haystack(self, rng: np.random.Generator, told: list[list[int]], room: int) -> list[list[int]]:
        """Sentences of at most `room` tokens together, with the needles anywhere among them."""
        taken: list[list[int]] = []
        while len(sentence := self._sentences[rng.integers(len(self._sentences))]) <= room:
            taken.append(sentence)
            room -= len(sentence)
        for needle in told:
            taken.insert(int(rng.integers(len(taken) + 1)), needle)
        return taken

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
