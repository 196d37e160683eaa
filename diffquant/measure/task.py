"""The interface of tasks, and their options. No torch here, since the command line reads the options."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar, cast

from diffquant.errors import UsageError
from diffquant.measure.cells import Cell
from diffquant.measure.results import Columns, TaskResult
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.measure.language_model import LanguageModel, ModelOutputs

# Largest number of tokens per pass, cached context and padding included.
BATCH_TOKENS = 4096
# An estimate: a CUDA device needs about as long for fewer tokens, and each pass costs kernel launches on the host.
_CUDA_BATCH_TOKENS = 16384
# Approximate number of English characters per token, to estimate the time of a run.
CHARACTERS_PER_TOKEN = 4
# Default lengths of needle prompts in tokens, for the command line and for Python.
NEEDLE_LENGTHS = (256,)

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class TaskOption(Generic[T_co]):
    """An option of one or more tasks, for the command line and for Python.

    Attributes:
        name: name in Python; the command line uses dashes for underscores.
        default: value if the option is not given.
        help: sentence for the command line's help.
        kind: type on the command line: int, str, Path or bool.
        minimum: smallest number that the command line accepts, or None if there is no limit.
        written: default as a user would write it on the command line, if `read` converts that; otherwise None.
        read: function that converts the command line's value, or None to use the value unchanged.
    """

    name: str
    default: T_co
    help: str
    kind: type
    minimum: int | None = None
    written: str | None = None
    read: Callable[[str], T_co] | Callable[[int], T_co] | None = None

    def value_in(self, values: Mapping[str, object]) -> T_co:
        """Return this option's value in `values`, or its default."""
        return cast(T_co, values.get(self.name, self.default))


def read_positive_option(option: TaskOption[int | None], values: Mapping[str, object]) -> int | None:
    """Return an option's value in `values`, or its default; a number must be 1 or more.

    Raises:
        UsageError: the value is below 1.
    """
    count = option.value_in(values)
    if count is not None and count < 1:
        raise UsageError(f"{option.name} must be 1 or more, got {count}")
    return count


def _all_if_zero(count: int) -> int | None:
    return count or None


LIMIT = TaskOption[int | None]("limit", None, "Number of items per task; all by default.", int, minimum=2)
TEXT = TaskOption[Path | None]("text", None, "Text for perplexity and needle; by default the bundled text.", Path)
CHARACTERS = TaskOption[int | None](
    "characters", 65536, "Number of characters of the text to read; 0 reads all.", int, minimum=0, read=_all_if_zero
)
WINDOW = TaskOption("window", 1024, "Number of tokens in a window of the text.", int)
STRIDE = TaskOption("stride", 512, "Number of tokens from one window to the next.", int)


def batch_tokens_on(device: str) -> int:
    """Return the default of `batch_tokens`, the largest number of tokens per pass, on a device such as "cuda:1"."""
    return _CUDA_BATCH_TOKENS if device.startswith("cuda") else BATCH_TOKENS


# A function that draws measured cells of a task, each with its model's name, into a file; it raises UsageError if there
# is nothing to draw.
Draw = Callable[[Sequence[tuple[str, Cell]], Path], None]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task: something to measure on a language model.

    A subclass is a frozen dataclass of plain data in its own file in `diffquant.measure.tasks`, decorated with
    `@register`. It imports torch inside `run`, never at the top.

    Attributes:
        kind: the part of its names before the first colon, such as "needle".
        usage: form of its names, such as "needle[:N[:R]]", for help and errors.
        options: options that `parse` reads.
        columns: columns with which tables show its results.
        plots: functions that draw files beside a sweep's table, by file name.
        compares_with_16_bits: whether `run` takes a reference, which `compute_reference` computes from the 16-bit
            model.
        batch_tokens: largest number of tokens per pass; bounds memory.
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
        """Make the task with this name, and read its items or text.

        Args:
            values: values of options by name; `TaskOption.value_in` adds the defaults.

        Raises:
            UsageError: the name or an option is malformed, or the task's items or text cannot be read.
            MissingDependencyError: a package that the task needs is not installed.
        """

    @property
    def name(self) -> str:
        """The kind and any parameters after it, such as "needle:4:2"."""
        return self.kind

    @abstractmethod
    def identity(self) -> JsonObject:
        """Return everything on which the result depends, except model and recipe, as plain data."""

    @property
    def total_tokens(self) -> int | None:
        """Approximate number of tokens that a model reads for all items together, or None if unknown."""
        return None

    def untracked_inputs(self) -> list[str]:
        """Describe each input that `identity` does not cover, such as a dataset on the hub.

        Stored results are reused even if such an input changed.
        """
        return []

    @abstractmethod
    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:
        """Measure a model.

        Args:
            reference: result of `compute_reference` for the 16-bit model, if there is one to compare with.
        """

    def compute_reference(self, model: "LanguageModel", progress: Progress) -> "ModelOutputs | None":  # noqa: ARG002
        """Compute the outputs of the 16-bit model with which `run` compares other models, or None if it needs none."""
        return None

    def with_batch_tokens(self, tokens: int) -> Self:
        """Return the same task with `batch_tokens` lowered to `tokens` if it is larger."""
        return replace(self, batch_tokens=min(self.batch_tokens, tokens))

    @classmethod
    def make_name_error(cls, name: str, example: str = "") -> UsageError:
        """Return the error for a task name that does not have the form in `usage`; `example` is a correct name."""
        return UsageError(
            f"cannot read task {name[:80]!r}: expected {cls.usage}" + (f", such as {example}" if example else "")
        )
