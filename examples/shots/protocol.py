"""The protocol of many-shot classification: labelled texts as demonstrations, then a text whose label is asked for.

Demonstrations are balanced over the classes, in random order, and the same for all texts. The answer is
decoded greedily among the labels.

Source: arXiv 2410.05258, section 3.5 (figure 6); the protocol is that of Bertsch et al., arXiv 2405.00200.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile, zip_longest

from diffquant.errors import UsageError
from diffquant.measure.language_model import LanguageModel, RequestEncoder
from diffquant.measure.task import BATCH_TOKENS
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, report_nothing
from examples.shots.constrained import choose
from examples.shots.labelled import Dataset, Example

QUERY = "Question: {text}\nType:"
DEMONSTRATION = QUERY + " {label}"
BETWEEN = "\n\n"
# Raise it when prompts change, so that older results are not mixed with new ones.
PROMPT_FORMAT = 1


@dataclass(frozen=True)
class ManyShotPlan:
    """The parameters that determine the prompts.

    Attributes:
        shots: number of demonstrations in a prompt, or None to fill the model's context.
        draws: number of times that demonstrations are drawn; every text is asked for after each draw.
        seed: seed of everything drawn.
    """

    shots: int | None
    draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 1 or (self.shots is not None and self.shots < 1):
            raise UsageError(f"many-shot: {self.shots} demonstrations, {self.draws} draws; both must be 1 or more")

    def prompts(self, train: Sequence[Example], shots: int) -> list[str]:
        """The demonstrations' text of every draw."""
        return [prompt(demonstrations(train, self.seed, draw), shots, self.seed) for draw in range(self.draws)]

    def check(self, data: Dataset) -> None:
        """Check that there are enough examples.

        Raises:
            UsageError: there are too few.
        """
        if self.shots is not None and self.shots > len(data.train):
            raise UsageError(
                f"many-shot: {self.shots} demonstrations are asked for and {option_name('train')} has "
                f"{len(data.train)}; ask for fewer, or for many-shot:all"
            )


@dataclass(frozen=True)
class OrderPlan(ManyShotPlan):
    """A plan of one set of demonstrations in several orders, which stand in the place of draws.

    Attributes:
        alternates: whether each order goes round the classes, and not from any example to any other.

    Source: arXiv 2410.05258, section 3.5 (figure 7): demonstrations randomly arranged, and alternately by class.
    """

    alternates: bool = False

    def prompts(self, train: Sequence[Example], shots: int) -> list[str]:
        shown = demonstrations(train, self.seed, 0)[:shots]
        orders = (random.Random(f"{self.seed} order {number}").sample(shown, shots) for number in range(self.draws))
        return [BETWEEN.join(map(demonstration, _alternating(o) if self.alternates else o)) for o in orders]


@dataclass(frozen=True)
class ManyShotOutcome:
    """A model's answers.

    Attributes:
        shots: number of demonstrations in a prompt.
        tokens: length of the longest prompt, the question and its label included.
        labels: label of every class.
        right: index of each text's label.
        choices: by draw, the index of the label decoded for each text.
    """

    shots: int
    tokens: int
    labels: tuple[str, ...]
    right: list[int]
    choices: list[list[int]]

    @property
    def correct(self) -> list[float]:
        """Each text's share of draws with the right answer."""
        return [
            sum(choice == label for choice in answers) / len(answers)
            for label, *answers in zip(self.right, *self.choices, strict=True)
        ]

    @property
    def by_draw(self) -> list[float]:
        """Accuracy after each draw of demonstrations."""
        return [
            sum(choice == label for choice, label in zip(answers, self.right, strict=True)) / len(self.right)
            for answers in self.choices
        ]


def evaluate_many_shot(
    model: LanguageModel,
    data: Dataset,
    plan: ManyShotPlan,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
) -> ManyShotOutcome:
    """Ask for the labels of the first `limit` test texts, in an order drawn once.

    Raises:
        UsageError: the prompts do not fit the model's context, or its tokenizer cannot tell labels apart.
    """
    encoder = RequestEncoder(model.tokenizer, model.max_length, model.vocabulary_size)
    asked = question_order(data.test, plan.seed)[:limit]
    labels = label_tokens(encoder, data.labels)
    queries = query_tokens(encoder, [example.text for example in asked], data.train[0])
    after = max(map(len, queries)) + max(map(len, labels))
    room = encoder.max_length - after
    shots = _most_shots(encoder, data.train, plan, room) if plan.shots is None else plan.shots
    prompts = [encoder.encode(text) for text in plan.prompts(data.train, shots)]
    longest = max(map(len, prompts))
    if longest > room:
        raise UsageError(
            f"many-shot: {shots} demonstrations and the longest question with its label take {longest + after} tokens, "
            f"and the model sees {encoder.max_length}; ask for fewer, or for many-shot:all"
        )

    def choices_of(draw: int) -> list[int]:
        def tell(done: float, total: float, what: str) -> None:
            progress(draw * total + done, plan.draws * total, what)

        return choose(model, prompts[draw], queries, labels, batch_tokens, tell)

    return ManyShotOutcome(
        shots=shots,
        tokens=longest + after,
        labels=data.labels,
        right=[data.labels.index(example.label) for example in asked],
        choices=[choices_of(draw) for draw in range(plan.draws)],
    )


def demonstrations(train: Sequence[Example], seed: int, draw: int) -> list[Example]:
    """One draw: every example once, in rounds of one of each class, so that any first part is as balanced as can be."""
    rng = random.Random(f"{seed} {draw}")
    classes: dict[str, list[Example]] = {}
    for example in train:
        classes.setdefault(example.label, []).append(example)
    for examples in classes.values():
        rng.shuffle(examples)
    drawn: list[Example] = []
    while classes:
        drawn += [classes[label].pop() for label in rng.sample(sorted(classes), len(classes))]
        classes = {label: examples for label, examples in classes.items() if examples}
    return drawn


def prompt(drawn: Sequence[Example], shots: int, seed: int) -> str:
    """The text of a draw's first demonstrations, in random order."""
    shown = random.Random(f"{seed} {shots}").sample(drawn[:shots], shots)
    return BETWEEN.join(map(demonstration, shown))


def demonstration(example: Example) -> str:
    """The text of a question with its label."""
    return DEMONSTRATION.format(text=example.text, label=example.label)


def question_order(test: Sequence[Example], seed: int) -> list[Example]:
    """The test examples in random order: published files are sorted by class, and a first part of them must not be."""
    return random.Random(f"{seed} test").sample(test, len(test))


def query_tokens(encoder: RequestEncoder, texts: Sequence[str], shown: Example) -> list[tuple[int, ...]]:
    """Tokens of each question as they follow a demonstration; which one is shown does not matter."""
    questions = ((demonstration(shown), BETWEEN + QUERY.format(text=text)) for text in texts)
    return [request.continuation for request in encoder.encode_requests(questions)]


def label_tokens(encoder: RequestEncoder, labels: Sequence[str]) -> list[tuple[int, ...]]:
    """Tokens of each label as they follow a question, and the one after them, so that no label begins another.

    Raises:
        UsageError: two labels have the same tokens, as unknown words do.
    """
    before = QUERY.format(text="?")
    tokens = []
    for label in labels:
        label_alone = encoder.encode_request(before, f" {label}").continuation
        tokens.append(encoder.encode_request(before, f" {label}{BETWEEN}{QUERY}").continuation[: len(label_alone) + 1])
    for (a, one), (b, other) in pairwise(sorted(zip(tokens, labels, strict=True))):
        if b[: len(a)] == a:
            raise UsageError(f"many-shot: labels {one!r} and {other!r} are the same to the tokenizer; rename one")
    return tokens


def _alternating(examples: Sequence[Example]) -> list[Example]:
    """The examples in rounds of one of each class, as long as a class has some; classes and examples as they come."""
    classes: dict[str, list[Example]] = {}
    for example in examples:
        classes.setdefault(example.label, []).append(example)
    return [example for turn in zip_longest(*classes.values()) for example in turn if example is not None]


def _most_shots(encoder: RequestEncoder, train: Sequence[Example], plan: ManyShotPlan, room: int) -> int:
    """The largest number of demonstrations for which every draw has room.

    Raises:
        UsageError: not one has.
    """
    draws = (demonstrations(train, plan.seed, draw) for draw in range(plan.draws))
    fitting = (takewhile(lambda total: total <= room, accumulate(_lengths(encoder, drawn))) for drawn in draws)
    shots = min(sum(1 for _ in totals) for totals in fitting)
    # Rarely: tokens can differ where demonstrations meet.
    while shots and max(len(encoder.encode(text)) for text in plan.prompts(train, shots)) > room:
        shots -= 1
    if not shots:
        raise UsageError(f"many-shot: the model sees {encoder.max_length} tokens, which one demonstration does not fit")
    return shots


def _lengths(encoder: RequestEncoder, drawn: Sequence[Example]) -> Iterator[int]:
    """The number of tokens of each demonstration where it follows another."""
    first = demonstration(drawn[0])
    alone = len(encoder.encode(first))
    yield alone
    for example in drawn[1:]:
        yield len(encoder.encode(first + BETWEEN + demonstration(example))) - alone
