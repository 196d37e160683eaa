"""Where ONNX Runtime computes: on the processor, or on a CUDA device by the kernels of its own that are made for it."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from diffquant.errors import MissingDependencyError, UsageError

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
# The session then knows afterwards which provider runs which node.
_RECORD = "session.record_ep_graph_assignment_info"


@dataclass(frozen=True)
class RuntimeDevice:
    """A device that ONNX Runtime computes on.

    Attributes:
        kind: "cpu" or "cuda".
        index: number of the CUDA device.
    """

    kind: str = "cpu"
    index: int = 0

    @classmethod
    def parse(cls, name: str) -> "RuntimeDevice":
        """Device of a name such as "cpu", "cuda" or "cuda:1".

        Raises:
            UsageError: ONNX Runtime is not used on such a device here.
        """
        kind, _, index = name.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
            raise UsageError(f"exported models run on cpu, cuda or cuda:N, not on {name!r}")
        return cls(kind, int(index or 0))

    @property
    def provider(self) -> str:
        return CUDA if self.kind == "cuda" else CPU

    @property
    def cuda_options(self) -> dict[str, str]:
        """Options of the CUDA provider."""
        # Products of float32 stay float32: TF32 keeps 10 bits of a mantissa.
        return {"device_id": str(self.index), "use_tf32": "0"}

    @property
    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """Execution providers of a session, the first one first asked; what it does not run falls to the processor."""
        if self.kind == "cpu":
            return [CPU]
        return [(CUDA, self.cuda_options), CPU]

    def check(self) -> None:
        """Check that ONNX Runtime was built for the device.

        Raises:
            MissingDependencyError: it was not.
        """
        if self.provider not in ort.get_available_providers():
            raise MissingDependencyError(
                f"this onnxruntime {ort.__version__} has no {self.provider}: "
                "pip uninstall onnxruntime, then pip install 'diffquant[onnx-gpu]'; or use --device cpu"
            )

    def check_taken(self, session: ort.InferenceSession) -> None:
        """Check that a session uses the device: where its libraries are missing, it goes on without.

        Raises:
            MissingDependencyError: it does not.
        """
        if self.provider not in session.get_providers():
            raise MissingDependencyError(
                f"ONNX Runtime {ort.__version__} could not start its {self.provider}: it needs an NVIDIA driver, and "
                "CUDA's and cuDNN's libraries, which pip install 'onnxruntime-gpu[cuda,cudnn]' brings; or use "
                "--device cpu"
            )

    def prepare(self, options: ort.SessionOptions) -> None:
        """Have a session record what runs where, if it is to be asked."""
        if self.kind != "cpu":
            options.add_session_config_entry(_RECORD, "1")

    def value(self, array: np.ndarray) -> ort.OrtValue:
        """A copy of an array where the device computes."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.kind, self.index)


def nodes_on_cpu(session: ort.InferenceSession) -> dict[str, int]:
    """Number of a session's nodes by operator that the processor runs, of one that records where its nodes run."""
    graphs = session.get_provider_graph_assignment_info()
    return dict(Counter(node.op_type for graph in graphs if graph.ep_name == CPU for node in graph.get_nodes()))


def on_cpu_text(nodes: dict[str, int]) -> str:
    """Text of a number of nodes by operator that the processor runs."""
    operators = ", ".join(f"{operator} {count}" for operator, count in sorted(nodes.items(), key=lambda x: -x[1]))
    return f"{sum(nodes.values())} nodes run on the processor: {operators}"
