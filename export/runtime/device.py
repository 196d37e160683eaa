"""The device that ONNX Runtime computes on: the CPU, or a CUDA device with ONNX Runtime's kernels."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from diffquant.errors import MissingDependencyError, UsageError
from diffquant.support.installation import install_command
from diffquant.support.names import option_name

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
# Session option: record which provider runs which node.
_RECORD = "session.record_ep_graph_assignment_info"


@dataclass(frozen=True)
class RuntimeDevice:
    """A device that ONNX Runtime computes on.

    Attributes:
        kind: "cpu" or "cuda".
        index: index of the CUDA device; 0 on the CPU.
    """

    kind: str = "cpu"
    index: int = 0

    @classmethod
    def parse(cls, name: str) -> "RuntimeDevice":
        """Parse a name such as "cpu", "cuda" or "cuda:1"; "auto" is CUDA if ONNX Runtime can start on it.

        Raises:
            UsageError: the name has none of these forms.
        """
        if name == "auto":
            return cls("cuda" if _starts_on_cuda() else "cpu")
        kind, _, index = name.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
            raise UsageError(f"exported models run on auto, cpu, cuda or cuda:N, not on {name!r}")
        return cls(kind, int(index or 0))

    @property
    def name(self) -> str:
        """The device's name as `parse` accepts it."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def provider(self) -> str:
        return CUDA if self.kind == "cuda" else CPU

    @property
    def cuda_options(self) -> dict[str, str]:
        """Options of the CUDA provider."""
        # Without TF32, whose mantissa has 10 bits: float32 matmuls stay float32.
        return {"device_id": str(self.index), "use_tf32": "0"}

    @property
    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """Execution providers in order of priority.

        The CPU's comes last, for nodes that the device's provider does not support.
        """
        if self.kind == "cpu":
            return [CPU]
        return [(CUDA, self.cuda_options), CPU]

    def check(self) -> None:
        """Check that ONNX Runtime was built for the device.

        Raises:
            MissingDependencyError: the installed package has no provider for it.
        """
        if self.provider not in ort.get_available_providers():
            raise MissingDependencyError(
                f"this onnxruntime {ort.__version__} has no {self.provider}: "
                f"pip uninstall onnxruntime, then {install_command('onnx-gpu')}; or use {option_name('device', 'cpu')}"
            )

    def check_session(self, session: ort.InferenceSession) -> None:
        """Check that a session runs on the device: without CUDA's libraries, ONNX Runtime falls back to the CPU.

        Raises:
            MissingDependencyError: the session does not run on the device.
        """
        if self.provider not in session.get_providers():
            raise MissingDependencyError(
                f"ONNX Runtime {ort.__version__} could not start its {self.provider}: it needs an NVIDIA driver, and "
                "CUDA's and cuDNN's libraries, which pip install 'onnxruntime-gpu[cuda,cudnn]' brings; or use "
                f"{option_name('device', 'cpu')}"
            )

    def record_node_providers(self, options: ort.SessionOptions) -> None:
        """Set a session's option to record which provider runs each node, unless the device is the CPU."""
        if self.kind != "cpu":
            options.add_session_config_entry(_RECORD, "1")

    def copy_to_device(self, array: np.ndarray) -> ort.OrtValue:
        """Copy an array to the device."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.kind, self.index)


@cache
def _starts_on_cuda() -> bool:
    """Return whether ONNX Runtime was built for CUDA and can start on a device, by opening a small session."""
    if CUDA not in ort.get_available_providers():
        return False
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y])
    options = ort.SessionOptions()
    # Otherwise ONNX Runtime logs a page about missing libraries.
    options.log_severity_level = 4
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=[CUDA, CPU])
    return CUDA in session.get_providers()


def count_cpu_nodes(session: ort.InferenceSession) -> dict[str, int]:
    """Count a session's nodes that run on the CPU, by operator.

    The session's options must have been passed to `RuntimeDevice.record_node_providers`.
    """
    graphs = session.get_provider_graph_assignment_info()
    return dict(Counter(node.op_type for graph in graphs if graph.ep_name == CPU for node in graph.get_nodes()))


def cuda_notes(dtype: str, kv_bits: int, is_fused: bool) -> list[str]:
    """Return sentences on the parts of a model that a CUDA session runs on the CPU; empty if there are none.

    Args:
        dtype: type of the activations.
        kv_bits: width of the KV cache, or 16 if it is not quantized.
        is_fused: whether attention is ONNX Runtime's GroupQueryAttention, not standard operators.

    Source: docs/OperatorKernels.md of ONNX Runtime, at 001d12d2623f; not tested on a GPU.
    """
    advice = []
    if dtype == "float32":
        advice.append(f"takes only float16 activations; export with {option_name('dtype', 'float16')}")
    if kv_bits == 4:
        advice.append(f"has no cache of 4 bits; export with {option_name('kv', 8)} or {option_name('kv', 16)}")
    return [f"attention runs on the CPU: on CUDA, ONNX Runtime's {each}" for each in advice if is_fused]


def describe_cpu_nodes(nodes: dict[str, int]) -> str:
    """Return a sentence with the number of nodes that run on the CPU, by operator."""
    operators = ", ".join(f"{operator} {count}" for operator, count in sorted(nodes.items(), key=lambda x: -x[1]))
    return f"{sum(nodes.values())} nodes run on the CPU: {operators}"
