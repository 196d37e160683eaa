"""Exceptions for what a user can cause; each message says what happened, where, and what to do."""


class DiffQuantError(Exception):
    """Base of every error that a user can cause.

    Attributes:
        exit_code: exit code of the command line.
        result: what was computed before the error, such as a sweep in which some cells failed, or None.
    """

    exit_code = 1

    def __init__(self, message: str = "", result: object = None) -> None:
        super().__init__(message)
        self.result = result


class UsageError(DiffQuantError):
    """An option, a scheme's text or a recipe is malformed, or cannot be applied to this model, device or data."""

    exit_code = 2


class CheckpointError(DiffQuantError):
    """A checkpoint is incomplete, damaged or of an unsupported kind."""


class UnknownModelTypeError(CheckpointError):
    """The checkpoint's `model_type` is not supported."""


class GroupSizeError(CheckpointError):
    """A group size does not divide the width of a tensor."""


class NonFiniteError(CheckpointError):
    """A tensor, or a number computed with a model, is NaN or infinite."""


class OutputExistsError(DiffQuantError):
    """The output already exists and may not be overwritten."""


class FailedCellsError(DiffQuantError):
    """A sweep or bench finished, but some of its measurements failed."""

    exit_code = 3


class ToleranceError(DiffQuantError):
    """Two computations that must agree differ by more than the tolerance."""

    exit_code = 4


class MissingDependencyError(DiffQuantError):
    """A package that this operation needs is not installed."""

    exit_code = 5
