"""The ways in which a folder is opened to be compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffquant.export.native import library_path
from diffquant.export.runtime.session import OnnxModel
from diffquant.export.verification.reference import Reference


@dataclass(frozen=True)
class Session:
    """One way of opening a folder, with every stage's output to be seen.

    Attributes:
        name: what users call it.
        rounds: whether its products round activations to int8.
        accuracy_level: precision of products with codes; None for the folder's own.
        runs_body: whether attention is the function body although there is a native kernel.
        is_folder: whether it computes what the folder does where nothing is changed.
    """

    name: str
    rounds: bool
    accuracy_level: int | None = None
    runs_body: bool = False
    is_folder: bool = False

    def open(self, folder: Path, threads: int, seen: Sequence[str], device: str) -> OnnxModel:
        """The folder as this session opens it, with these values of the graph to be seen."""
        return OnnxModel(
            folder,
            threads,
            tuple(seen),
            every_position=True,
            accuracy_level=self.accuracy_level,
            native=not self.runs_body,
            device=device,
            spins=False,
        )


def sessions_of(reference: Reference, rounds: bool, device: str) -> list[Session]:
    """The folder as it is, with float32 products where it rounds activations, and without the native kernel."""
    sessions = [Session("int8 activations" if rounds else "as exported", rounds, is_folder=True)]
    if rounds:
        # What rounding hides is seen here: nothing but float32 arithmetic lies between this and torch.
        sessions.append(Session("float32 products", False, 1))
    # A Transformer's attention over a float cache is ONNX Runtime's own either way.
    has_kernel = reference.model.config.diff_spec.maps > 1 or reference.cache is not None
    if library_path() is not None and device == "cpu" and has_kernel:
        sessions.append(Session("function body", False, 1 if rounds else None, runs_body=True))
    return sessions
