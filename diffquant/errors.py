"""Exceptions for what a user can cause; each message says what happened, where, and what to do."""


class DiffQuantError(Exception):
    """Base of every error a user can cause. `exit_code` is what the command line returns.

    Attributes:
        result: what was computed before the error, such as the sweep whose cells partly failed, or None if nothing was.
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
    """diffquant has no adapter for this `model_type`."""


class GroupSizeError(CheckpointError):
    """A group size does not divide the width of a tensor."""


class NonFiniteError(CheckpointError):
    """A tensor holds NaN or infinity."""


class OutputExistsError(DiffQuantError):
    """The output already exists and may not be overwritten."""


class NotQuantizedError(DiffQuantError):
    """A layer that should have quantized its attention logits or operands did not."""


class FailedCellsError(DiffQuantError):
    """A sweep finished, but some of its cells failed."""

    exit_code = 3


class ToleranceError(DiffQuantError):
    """Two computations that must agree differ by more than the tolerance."""

    exit_code = 4


class MissingDependencyError(DiffQuantError):
    """A package that this operation needs is not installed."""

    exit_code = 5
