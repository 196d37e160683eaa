"""The verb `inspect`: what a checkpoint is."""

from typing import TYPE_CHECKING

from diffquant.errors import UnknownModelTypeError
from diffquant.verbs import kinds
from diffquant.verbs.checked import checked
from diffquant.verbs.hub import at_revision

if TYPE_CHECKING:
    from diffquant.inspection import Inspection, WeightInspection


@checked
def inspect(model: kinds.PathModel, *, revision: kinds.Name | None = None) -> "Inspection | WeightInspection":
    """Say what a checkpoint is: its kind, λ, and sizes.

        diffquant inspect model
        print(diffquant.inspect("model"))

    It reads only headers and λ parameters, and gives sizes at several widths.

    Args:
        model, revision: as `quantize` takes them.

    Returns:
        What is known of a model, or of the weights of an architecture that is not known.

    Raises:
        CheckpointError: it is damaged or incomplete.
    """
    from diffquant.inspection import inspect_checkpoint, inspect_weights

    path = at_revision(model, revision)
    try:
        return inspect_checkpoint(path)
    except UnknownModelTypeError:
        return inspect_weights(path)
