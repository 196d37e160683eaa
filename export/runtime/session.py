"""An exported folder in a session of ONNX Runtime: opened, fed, its cache kept in place."""

import logging
import os
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from diffquant.errors import CheckpointError
from diffquant.export.files import model_file
from diffquant.export.graph.external import follow_links, has_linked_data, load_graph
from diffquant.export.graph.matmul import MATMUL
from diffquant.export.graph.op import CONTRIB, DOMAIN, NAME
from diffquant.export.graph.padding import give_every_position
from diffquant.export.graph.quantized_attention import QUANTIZED_ATTENTION
from diffquant.export.native import OVERRIDE, library_path
from diffquant.export.runtime.device import RuntimeDevice, nodes_on_cpu
from diffquant.export.runtime.interface import CacheShape, read_interface
from diffquant.support.spelling import spelled

# The ops that the library has kernels of.
_NATIVE = {(DOMAIN, name) for name in (NAME, QUANTIZED_ATTENTION, MATMUL)}


class GraphError(CheckpointError):
    """ONNX Runtime fails in the middle of a graph."""


class OnnxModel:
    """An exported model in a session.

    Attributes:
        folder: folder that holds the model.
        cache: shape of the KV cache, or None if the model has none.
        vocabulary: number of tokens that have a logit.
        dtype: dtype of the logits.
        device: where it runs.
        gives_every_position: whether there are logits of every new token, and not of each sequence's last one alone.
    """

    def __init__(
        self,
        folder: Path,
        threads: int = 0,
        extra_outputs: tuple[str, ...] = (),
        every_position: bool = False,
        accuracy_level: int | None = None,
        native: bool = True,
        device: str = "auto",
        spins: bool = True,
    ) -> None:
        """Open a folder.

        Args:
            threads: number of threads that share one node's work; 0 takes all cores.
            extra_outputs: values inside the graph to return as well.
            every_position: whether to compute the logits of every new token where the folder gives the last one's.
            accuracy_level: precision of every product with codes; the model's own by default.
            native: whether the op's native kernel computes it where it is built, and not the model's function body;
                it is the processor's alone.
            device: "auto", "cpu", "cuda" or "cuda:N".
            spins: whether threads wait for work in a loop, which saves microseconds and takes a core.

        Raises:
            CheckpointError: the folder is damaged, or the runtime refuses the model.
            MissingDependencyError: the runtime cannot use the device.
        """
        self.device = RuntimeDevice.parse(device)
        self.device.check()
        graph = load_graph(folder)
        self.folder = folder
        is_changed = bool(extra_outputs) or accuracy_level is not None or has_linked_data(graph, model_file(folder))
        if every_position:
            is_changed |= give_every_position(graph)
        interface = read_interface(graph.graph, model_file(folder))
        self.cache = interface.cache
        self.vocabulary = interface.vocabulary
        self.dtype = interface.dtype
        self.gives_every_position = interface.gives_every_position
        if extra_outputs:
            own_kinds = {value.name: value.type.tensor_type.elem_type for value in graph.graph.value_info}
            graph.graph.output.extend(
                helper.make_tensor_value_info(name, own_kinds.get(name, interface.kind), None) for name in extra_outputs
            )
        if accuracy_level is not None:
            _set_accuracy(graph, accuracy_level)
        native = native and self.device.kind == "cpu"
        if native and lacks_kernels(graph):
            _say_once_that_bodies_run()
        options = session_options(threads, native)
        if not spins:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.device.prepare(options)
        self.session = _open(folder, options, self.device, graph if is_changed else None)
        self.device.check_taken(self.session)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Number of nodes by operator that the processor runs although another device was asked for."""
        return {} if self.device.kind == "cpu" else nodes_on_cpu(self.session)

    def check_cache(self) -> CacheShape:
        """The shape of the cache.

        Raises:
            CheckpointError: the model was exported without one.
        """
        if self.cache is None:
            raise CheckpointError(
                f"{self.folder} was exported without a cache; export it again without {spelled('cache', False)}"
            )
        return self.cache

    def empty_cache(self, batch: int, rows: int = 0) -> list[ort.OrtValue]:
        """Caches on the device that hold no token: those of `cache.inputs`, with room for `rows` tokens, and states."""
        if self.cache is None:
            return []
        shape = (batch, self.cache.kv_pairs, rows, self.cache.width)
        of_tokens = [self.device.value(np.zeros(shape, self.cache.dtype)) for _ in self.cache.inputs]
        return of_tokens + self.empty_states(batch)

    def empty_states(self, batch: int) -> list[ort.OrtValue]:
        """States on the device as they are before the first token, in the order of `cache.states`."""
        states = () if self.cache is None else self.cache.states
        return [self.device.value(np.zeros((batch, *state.sizes), state.dtype)) for state in states]

    def run(
        self, ids: np.ndarray, mask: np.ndarray, past: list[ort.OrtValue], outputs: tuple[str, ...] = ("logits",)
    ) -> tuple[list[np.ndarray], list[ort.OrtValue]]:
        """The named outputs of one call, and the caches after it, which have grown and stay on the device.

        Args:
            ids: int64 [B, T].
            mask: int64 [B, S], a column for each token of this and of earlier calls, 0 for padding on any side.
            past: caches that `empty_cache` or the last call gave.
        """
        binding = self.session.io_binding()
        bind_tokens(binding, ids, mask)
        for name in outputs:
            binding.bind_output(name)
        if self.cache is not None:
            states = self.cache.states
            taken = (*self.cache.inputs, *(state.input for state in states))
            for name, value in zip(taken, past, strict=True):
                binding.bind_ortvalue_input(name, value)
            for name in (*self.cache.outputs, *(state.output for state in states)):
                binding.bind_output(name, self.device.kind, self.device.index)
        self.run_bound(binding)
        results = binding.get_outputs()
        return [value.numpy() for value in results[: len(outputs)]], results[len(outputs) :]

    def run_bound(self, binding: ort.IOBinding) -> None:
        """Compute the outputs that are bound of the inputs that are.

        Raises:
            GraphError: the runtime fails, as it does where a damaged graph contradicts itself.
        """
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:  # the runtime's own exception types differ between its versions
            file = model_file(self.folder)
            raise GraphError(f"ONNX Runtime {ort.__version__} fails in {file}: {error}") from error


class InPlaceDecoder:
    """Decoding of one batch with caches that stay where they are: nothing is copied from step to step."""

    def __init__(self, model: OnnxModel, batch: int, rows: int) -> None:
        self.cache = model.check_cache()
        self.model = model
        self.batch = batch
        self.rows = rows
        self.length = 0
        self._binding = model.session.io_binding()
        tokens = len(self.cache.inputs)
        buffers = model.empty_cache(batch, rows)
        self._buffers, states = buffers[:tokens], buffers[tokens:]
        for past, present, buffer in zip(self.cache.inputs, self.cache.outputs, self._buffers, strict=True):
            self._binding.bind_ortvalue_input(past, buffer)
            self._binding.bind_ortvalue_output(present, buffer)
        # A state is replaced as a whole, which nobody promises to do in its own place: calls alternate between two.
        self._states, self._next_states = states, model.empty_states(batch)

    @property
    def nbytes(self) -> int:
        """Size of the caches."""
        return self.batch * (self.cache.row_bytes * self.rows + 2 * self.cache.state_bytes)

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Append tokens [B, T] to the batch, and return their logits [B, T, V], or the last one's alone [B, 1, V]."""
        self.length += ids.shape[1]
        bind_tokens(self._binding, ids, np.ones((self.batch, self.length), np.int64))
        for state, past, present in zip(self.cache.states, self._states, self._next_states, strict=True):
            self._binding.bind_ortvalue_input(state.input, past)
            self._binding.bind_ortvalue_output(state.output, present)
        self._states, self._next_states = self._next_states, self._states
        positions = ids.shape[1] if self.model.gives_every_position else 1
        # Bound to an array of ours: the runtime's own output would be copied into one.
        logits = np.empty((self.batch, positions, self.model.vocabulary), self.model.dtype)
        self._binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        self.model.run_bound(self._binding)
        return logits


def bind_tokens(binding: ort.IOBinding, ids: np.ndarray, mask: np.ndarray) -> None:
    """Bind the inputs that every call has, from the host."""
    binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids, np.int64))
    binding.bind_cpu_input("attention_mask", np.ascontiguousarray(mask, np.int64))


def session_options(threads: int = 0, native: bool = True) -> ort.SessionOptions:
    """Options of a quiet session on this many threads, with the op's native kernel where it is wanted and built."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    library = library_path() if native else None
    if library is not None:
        options.register_custom_ops_library(str(library))
    return options


def lacks_kernels(graph: onnx.ModelProto) -> bool:
    """Whether the graph has ops that the native library computes, and none was built or named."""
    return library_path() is None and any((node.domain, node.op_type) in _NATIVE for node in graph.graph.node)


@cache
def _say_once_that_bodies_run() -> None:
    # An empty name says that no library is wanted.
    if OVERRIDE not in os.environ:
        logging.getLogger(__name__).warning(
            "no native library is built: ONNX Runtime computes the model by the ops' function bodies, which is slower; "
            "python -m diffquant.export.native builds one"
        )


def _set_accuracy(graph: onnx.ModelProto, level: int) -> None:
    """Have every product with codes computed by ONNX Runtime's own op at this level."""
    for node in graph.graph.node:
        if node.op_type != MATMUL:
            continue
        # The native library's products round activations whatever the level is.
        node.domain = CONTRIB
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = level


def _open(
    folder: Path, options: ort.SessionOptions, device: RuntimeDevice, changed: onnx.ModelProto | None
) -> ort.InferenceSession:
    """A session on the folder's model, or on a changed copy of it that has the same data."""
    file = model_file(folder)
    try:
        if changed is None:
            return ort.InferenceSession(str(file), options, providers=device.providers)
        # A model from memory has no folder of its own to look for its data in.
        data = follow_links(changed, file)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(data))
        return ort.InferenceSession(changed.SerializeToString(), options, providers=device.providers)
    except Exception as error:  # the runtime's own exception types differ between its versions
        raise CheckpointError(f"ONNX Runtime {ort.__version__} cannot open {file}: {error}") from error
