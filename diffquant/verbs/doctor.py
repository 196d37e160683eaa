"""The verb `doctor`: what is installed, and what each extra would add."""

from typing import TYPE_CHECKING

from diffquant.errors import MissingDependencyError
from diffquant.verbs.checked import checked

if TYPE_CHECKING:
    from diffquant.doctor import Diagnosis


@checked
def doctor() -> "Diagnosis":
    """Say what is installed, and what each extra would add.

        diffquant doctor

    Raises:
        MissingDependencyError: a required package is missing or of another version; its `result` is the diagnosis.
    """
    from diffquant.doctor import diagnose
    from diffquant.export.native import kernel_name
    from diffquant.support.installation import install_command

    diagnosis = diagnose(kernel_name())
    if not diagnosis.complete:
        raise MissingDependencyError(
            f"a required package is missing or not of a version that will do: {install_command()}", diagnosis
        )
    return diagnosis
