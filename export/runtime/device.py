"""Where ONNX Runtime computes: on the processor, or on a CUDA device by the kernels of its own that are made for it."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from diffquant.errors import MissingDependencyError, UsageError
from diffquant.support.installation import install_command
from diffquant.support.spelling import spelled

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
        """Device of a name such as "cpu", "cuda" or "cuda:1"; "auto" is CUDA where ONNX Runtime starts on it.

        Raises:
            UsageError: ONNX Runtime is not used on such a device here.
        """
        if name == "auto":
            return cls("cuda" if _starts_on_cuda() else "cpu")
        kind, _, index = name.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
            raise UsageError(f"exported models run on auto, cpu, cuda or cuda:N, not on {name!r}")
        return cls(kind, int(index or 0))

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

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
                f"pip uninstall onnxruntime, then {install_command('onnx-gpu')}; or use {spelled('device', 'cpu')}"
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
                f"{spelled('device', 'cpu')}"
            )

    def prepare(self, options: ort.SessionOptions) -> None:
        """Have a session record what runs where, if it is to be asked."""
        if self.kind != "cpu":
            options.add_session_config_entry(_RECORD, "1")

    def value(self, array: np.ndarray) -> ort.OrtValue:
        """A copy of an array where the device computes."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.kind, self.index)


@cache
def _starts_on_cuda() -> bool:
    """Whether ONNX Runtime was built for CUDA and finds a device and its libraries: only a session tells."""
    if CUDA not in ort.get_available_providers():
        return False
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y])
    options = ort.SessionOptions()
    # It would print a page about libraries that are missing.
    options.log_severity_level = 4
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=[CUDA, CPU])
    return CUDA in session.get_providers()


def nodes_on_cpu(session: ort.InferenceSession) -> dict[str, int]:
    """Number of a session's nodes by operator that the processor runs, of one that records where its nodes run."""
    graphs = session.get_provider_graph_assignment_info()
    return dict(Counter(node.op_type for graph in graphs if graph.ep_name == CPU for node in graph.get_nodes()))


def cuda_notes(dtype: str, kv_bits: int, is_fused: bool) -> list[str]:
    """Sentences on what a model's CUDA session leaves to the processor.

    Args:
        is_fused: whether attention is ONNX Runtime's GroupQueryAttention, and not written out in standard operators.

    Source: docs/OperatorKernels.md of ONNX Runtime, at 001d12d2623f; none of it has run here.
    """
    advice = []
    if dtype == "float32":
        advice.append(f"takes float16 activations alone; export with {spelled('dtype', 'float16')}")
    if kv_bits == 4:
        advice.append(f"has no cache of 4 bits; export with {spelled('kv', 8)} or {spelled('kv', 16)}")
    return [f"attention runs on the processor: on CUDA, ONNX Runtime's {each}" for each in advice if is_fused]


def on_cpu_text(nodes: dict[str, int]) -> str:
    """Text of a number of nodes by operator that the processor runs."""
    operators = ", ".join(f"{operator} {count}" for operator, count in sorted(nodes.items(), key=lambda x: -x[1]))
    return f"{sum(nodes.values())} nodes run on the processor: {operators}"
