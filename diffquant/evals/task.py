"""Tasks: what each one is asked for by name, and measures. No torch here: the command line reads the tasks' options."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, Self, TypeVar, cast

from diffquant.errors import UsageError
from diffquant.evals import defaults
from diffquant.evals.columns import Columns
from diffquant.evals.task_result import TaskResult
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from diffquant.evals.language_model import LanguageModel, States

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class TaskOption(Generic[T_co]):
    """An option of one task or several, for the command line and for Python.

    Attributes:
        name: name in Python; dashes take the place of underscores on the command line.
        default: value where none is given.
        help: sentence of the command line's help.
        kind: type of what the command line takes: int, str, Path or bool.
        minimum: smallest number that the command line takes; None for any.
        written: default as the command line writes it, where `read` turns that into the value.
        read: function from what the command line takes to the value; None where they are the same.
    """

    name: str
    default: T_co
    help: str
    kind: type
    minimum: int | None = None
    written: str | None = None
    read: Callable[[str], T_co] | Callable[[int], T_co] | None = None

    def of(self, values: Mapping[str, object]) -> T_co:
        """The option's value among these, or its default."""
        return cast(T_co, values.get(self.name, self.default))


def at_least_one(option: TaskOption[int | None], values: Mapping[str, object]) -> int | None:
    """The value of an option that counts something.

    Raises:
        UsageError: it is below 1.
    """
    count = option.of(values)
    if count is not None and count < 1:
        raise UsageError(f"{option.name} must be 1 or more, got {count}")
    return count


def _all_if_zero(count: int) -> int | None:
    return count or None


LIMIT = TaskOption[int | None]("limit", None, "Number of items per task; all by default.", int, minimum=2)
TEXT = TaskOption[Path | None](
    "text", None, "Text for perplexity, nll and needle; by default the prose that ships.", Path
)
CHARACTERS = TaskOption[int | None](
    "characters", 65536, "Number of characters of the text to read; 0 reads all.", int, minimum=0, read=_all_if_zero
)
WINDOW = TaskOption("window", defaults.WINDOW, "Number of tokens that the model sees at once, of a text.", int)


@dataclass(frozen=True)
class PlottedCell:
    """A result as a task's own plots see it.

    Attributes:
        model: short name of the model.
        panel: title of what is quantized, such as "attention logits, per row".
        scheme: width and granularity, such as "4:row"; "16" at 16 bits.
        is_baseline: whether it is a model's 16 bits.
    """

    model: str
    panel: str
    scheme: str
    is_baseline: bool
    task: str
    result: TaskResult


class Draw(Protocol):
    """A function that draws a task's cells into a file."""

    def __call__(self, cells: Sequence[PlottedCell], path: Path) -> None:
        """Draw the cells.

        Raises:
            UsageError: there is nothing to draw.
        """


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task: something that is measured of a language model.

    A subclass is a frozen dataclass of plain data, in a file of its own in `diffquant.evals.tasks`, under
    `@register`. It imports torch where it runs, never at its top.

    Attributes:
        kind: word that its names begin with, up to the first colon.
        usage: grammar of its names, for help and errors.
        options: options that `parse` reads.
        columns: columns that a table shows of its results.
        plots: functions that draw files beside a sweep's table, by the files' names.
        compares_with_16_bits: whether `run` takes a reference, which `reference` makes of the 16-bit model.
        batch_tokens: most tokens of one pass; bounds memory.
    """

    kind: ClassVar[str]
    usage: ClassVar[str]
    options: ClassVar[tuple[TaskOption[object], ...]] = ()
    columns: ClassVar[Columns]
    plots: ClassVar[Mapping[str, Draw]] = {}
    compares_with_16_bits: ClassVar[bool] = False

    batch_tokens: int

    @classmethod
    @abstractmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        """The task of a name, its items or text read.

        Args:
            values: values of options by name; `TaskOption.of` knows the defaults.

        Raises:
            UsageError: the name or an option cannot be read, or the data they name.
            MissingDependencyError: a package that the task needs is not installed.
        """

    @property
    def name(self) -> str:
        """Name in full: two tasks that measure different things have different ones."""
        return self.kind

    @abstractmethod
    def identity(self) -> JsonObject:
        """All that the result depends on beside model and recipe."""

    def unseen(self) -> list[str]:
        """What the result depends on that `identity` cannot know: cells are kept when it changes."""
        return []

    @abstractmethod
    def run(
        self,
        model: "LanguageModel",
        tokenizer: "PreTrainedTokenizerBase",
        reference: "States | None",
        progress: Progress,
    ) -> TaskResult:
        """Measure a model.

        Args:
            reference: what `reference` made of the 16-bit model, where there is one to compare with.
        """

    def reference(
        self,
        model: "LanguageModel",  # noqa: ARG002
        tokenizer: "PreTrainedTokenizerBase",  # noqa: ARG002
        progress: Progress,  # noqa: ARG002
    ) -> "States | None":
        """What `run` compares other models with; None unless the task compares with 16 bits."""
        return None

    def in_batches_of(self, tokens: int) -> Self:
        """The same task in passes of at most this many tokens."""
        return replace(self, batch_tokens=min(self.batch_tokens, tokens))

    @classmethod
    def misread(cls, name: str, example: str = "") -> UsageError:
        """The error of a name that does not follow the grammar."""
        return UsageError(
            f"cannot read task {name[:80]!r}: expected {cls.usage}" + (f", such as {example}" if example else "")
        )
