"""Exceptions for what a user can cause; each message says what happened, where, and what to do."""


class DiffQuantError(Exception):
    """Base of every error a user can cause. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(DiffQuantError):
    """An option, a scheme's text or a recipe is malformed."""

    exit_code = 2


class CheckpointError(DiffQuantError):
    """A checkpoint is incomplete, damaged or of a kind that is not read."""


class UnknownModelTypeError(CheckpointError):
    """No adapter reads this `model_type`."""


class GroupSizeError(CheckpointError):
    """A group size does not divide the width of a tensor."""


class NonFiniteError(CheckpointError):
    """A tensor holds NaN or infinity."""


class OutputExistsError(DiffQuantError):
    """The destination is already there and it may not be overwritten."""


class NotFiredError(DiffQuantError):
    """A layer that should have quantized its logits did not."""


class FailedCellsError(DiffQuantError):
    """A sweep finished, some of its cells did not."""

    exit_code = 3


class ToleranceError(DiffQuantError):
    """Two computations that must agree differ by more than the tolerance.

    Attributes:
        report: dataclass of all that was compared; None where the message says it all.
    """

    exit_code = 4

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class MissingDependencyError(DiffQuantError):
    """A package that this operation needs is not installed."""

    exit_code = 5
