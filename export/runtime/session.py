"""Sessions of ONNX Runtime on an exported folder: opening one, running calls, and decoding with in-place caches."""

import logging
import os
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from diffquant.errors import CheckpointError
from diffquant.onnx.files import model_file
from diffquant.onnx.graph.op import DOMAIN, NAME
from diffquant.onnx.graph.ops import MATMUL, QUANTIZED_ATTENTION
from diffquant.onnx.graph.padding import enable_all_logits
from diffquant.onnx.native import OVERRIDE, library_path
from diffquant.onnx.runtime.device import RuntimeDevice, count_cpu_nodes
from diffquant.onnx.runtime.interface import (
    CacheShape,
    has_symlinked_data,
    load_graph,
    read_interface,
    resolve_data_links,
    set_accuracy_level,
)
from diffquant.support.names import option_name

# The ops for which the native library has kernels.
_NATIVE = {(DOMAIN, name) for name in (NAME, QUANTIZED_ATTENTION, MATMUL)}


class GraphError(CheckpointError):
    """ONNX Runtime failed while running a graph."""


class OnnxModel:
    """An exported model opened in a session.

    Attributes:
        folder: the model's folder.
        cache: shape of the cache, or None if the model has none.
        vocabulary: number of logits per token.
        dtype: dtype of the logits.
        device: device that the model runs on.
        gives_every_position: whether a call returns the logits of every new token, not only of each sequence's last
            token.
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
            threads: number of threads per node (intra-op); 0 uses all cores.
            extra_outputs: names of values inside the graph to add to the outputs.
            every_position: compute the logits of every new token, even if the exported graph computes only the last.
            accuracy_level: MatMulNBits' accuracy level for every quantized matmul; the model's by default.
            native: use the native library's CPU kernels if it was built, not the model's function bodies.
            device: "auto", "cpu", "cuda" or "cuda:N".
            spins: whether idle threads spin, which saves microseconds per call and keeps their cores busy.

        Raises:
            CheckpointError: the folder is damaged, or the runtime cannot load the model.
            MissingDependencyError: the runtime cannot use the device.
        """
        self.device = RuntimeDevice.parse(device)
        self.device.check()
        graph = load_graph(folder)
        self.folder = folder
        is_changed = bool(extra_outputs) or accuracy_level is not None or has_symlinked_data(graph, model_file(folder))
        if every_position:
            is_changed |= enable_all_logits(graph)
        self.cache, logits = read_interface(graph.graph, model_file(folder))
        _, positions, vocabulary = logits.shape.dim
        self.vocabulary: int = vocabulary.dim_value
        self.dtype = helper.tensor_dtype_to_np_dtype(logits.elem_type)
        self.gives_every_position: bool = positions.dim_value != 1
        if extra_outputs:
            own_kinds = {value.name: value.type.tensor_type.elem_type for value in graph.graph.value_info}
            graph.graph.output.extend(
                helper.make_tensor_value_info(name, own_kinds.get(name, logits.elem_type), None)
                for name in extra_outputs
            )
        expanded: dict[str, np.ndarray] = {}
        if accuracy_level is not None:
            expanded = set_accuracy_level(graph, accuracy_level, model_file(folder).parent)
        native = native and self.device.kind == "cpu"
        if native and lacks_kernels(graph):
            _say_once_that_bodies_run()
        options = session_options(threads, native)
        if not spins:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_external_initializers(
            list(expanded), list(map(ort.OrtValue.ortvalue_from_numpy, expanded.values()))
        )
        self.device.record_node_providers(options)
        self.session = _open(folder, options, self.device, graph if is_changed else None)
        self.device.check_session(self.session)

    @property
    def cpu_node_counts(self) -> dict[str, int]:
        """Number of nodes, by operator, that run on the CPU although another device was chosen; empty if none do."""
        return {} if self.device.kind == "cpu" else count_cpu_nodes(self.session)

    def require_cache(self) -> CacheShape:
        """Return the shape of the cache.

        Raises:
            CheckpointError: the model was exported without a cache.
        """
        if self.cache is None:
            raise CheckpointError(
                f"{self.folder} was exported without a cache; export it again without {option_name('cache', False)}"
            )
        return self.cache

    def allocate_cache(self, batch: int, token_capacity: int = 0) -> list[ort.OrtValue]:
        """Allocate caches and initial recurrent states on the device; return an empty list if the model has no cache.

        Args:
            batch: number of sequences.
            token_capacity: number of tokens per sequence for which each cache has space.

        Returns:
            Caches in the order of `cache.inputs`, then states in the order of `cache.states`.
        """
        if self.cache is None:
            return []
        shape = (batch, self.cache.kv_pairs, token_capacity, self.cache.width)
        of_tokens = [self.device.copy_to_device(np.zeros(shape, self.cache.dtype)) for _ in self.cache.inputs]
        return of_tokens + self.allocate_states(batch)

    def allocate_states(self, batch: int) -> list[ort.OrtValue]:
        """Allocate initial recurrent states on the device, in the order of `cache.states`; empty if there are none."""
        states = {} if self.cache is None else self.cache.states
        return [self.device.copy_to_device(np.repeat(state, batch, 0)) for state in states.values()]

    def run(
        self, ids: np.ndarray, mask: np.ndarray, past: list[ort.OrtValue], outputs: tuple[str, ...] = ("logits",)
    ) -> tuple[list[np.ndarray], list[ort.OrtValue]]:
        """Run one call; return the outputs as arrays, and the extended caches, which stay on the device.

        Args:
            ids: token ids, int64 [B, T].
            mask: attention mask, int64 [B, S], a column for each token of this and of earlier calls; 0 for padding on
                either side.
            past: caches from `allocate_cache` or from the previous call.
            outputs: names of the outputs to return.
        """
        binding = self.session.io_binding()
        bind_tokens(binding, ids, mask)
        for name in outputs:
            binding.bind_output(name)
        if self.cache is not None:
            for name, value in zip((*self.cache.inputs, *self.cache.states), past, strict=True):
                binding.bind_ortvalue_input(name, value)
            for name in (*self.cache.outputs, *self.cache.state_outputs):
                binding.bind_output(name, self.device.kind, self.device.index)
        self.run_bound(binding)
        results = binding.get_outputs()
        return [value.numpy() for value in results[: len(outputs)]], results[len(outputs) :]

    def run_bound(self, binding: ort.IOBinding) -> None:
        """Run the session with bound inputs and outputs.

        Raises:
            GraphError: the runtime fails, for example because a damaged graph is inconsistent.
        """
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:  # the runtime's own exception types differ between its versions
            file = model_file(self.folder)
            raise GraphError(f"ONNX Runtime {ort.__version__} fails in {file}: {error}") from error


class InPlaceDecoder:
    """Decodes one batch with preallocated caches: past and present share a buffer, so that no step copies them."""

    def __init__(self, model: OnnxModel, batch: int, token_capacity: int) -> None:
        """Allocate the caches.

        Args:
            batch: number of sequences.
            token_capacity: number of tokens per sequence for which the caches have space.
        """
        self.cache = model.require_cache()
        self.model = model
        self.batch = batch
        self.token_capacity = token_capacity
        self.length = 0
        self._binding = model.session.io_binding()
        tokens = len(self.cache.inputs)
        buffers = model.allocate_cache(batch, token_capacity)
        self._buffers, states = buffers[:tokens], buffers[tokens:]
        for past, present, buffer in zip(self.cache.inputs, self.cache.outputs, self._buffers, strict=True):
            self._binding.bind_ortvalue_input(past, buffer)
            self._binding.bind_ortvalue_output(present, buffer)
        # A recurrent state is replaced as a whole, and in-place updates are not guaranteed: calls alternate buffers.
        self._states, self._next_states = states, model.allocate_states(batch)

    @property
    def nbytes(self) -> int:
        """Size of the caches in bytes."""
        return self.batch * (self.cache.bytes_per_token * self.token_capacity + 2 * self.cache.state_bytes)

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Append token ids [B, T] to the batch, and return their logits [B, T, vocabulary].

        If the model computes only the last token's logits, the result is [B, 1, vocabulary].
        """
        self.length += ids.shape[1]
        bind_tokens(self._binding, ids, np.ones((self.batch, self.length), np.int64))
        for name, state in zip(self.cache.states, self._states, strict=True):
            self._binding.bind_ortvalue_input(name, state)
        for name, state in zip(self.cache.state_outputs, self._next_states, strict=True):
            self._binding.bind_ortvalue_output(name, state)
        self._states, self._next_states = self._next_states, self._states
        positions = ids.shape[1] if self.model.gives_every_position else 1
        # Bound to a NumPy array, since an output that the runtime allocates would be copied into one.
        logits = np.empty((self.batch, positions, self.model.vocabulary), self.model.dtype)
        self._binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        self.model.run_bound(self._binding)
        return logits


def bind_tokens(binding: ort.IOBinding, ids: np.ndarray, mask: np.ndarray) -> None:
    """Bind token ids and attention mask from host memory."""
    binding.bind_cpu_input("input_ids", np.ascontiguousarray(ids, np.int64))
    binding.bind_cpu_input("attention_mask", np.ascontiguousarray(mask, np.int64))


def session_options(threads: int = 0, native: bool = True) -> ort.SessionOptions:
    """Return session options with few log messages.

    Args:
        threads: number of threads per node (intra-op); 0 uses all cores.
        native: use the native library's kernels if it was built.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    library = library_path() if native else None
    if library is not None:
        options.register_custom_ops_library(str(library))
    return options


def lacks_kernels(graph: onnx.ModelProto) -> bool:
    """Return whether a graph has ops with native kernels, but the native library was not built."""
    return library_path() is None and any((node.domain, node.op_type) in _NATIVE for node in graph.graph.node)


@cache
def _say_once_that_bodies_run() -> None:
    # If the variable is empty, the user chose to run without a library.
    if OVERRIDE not in os.environ:
        logging.getLogger(__name__).warning(
            "no native library is built: ONNX Runtime computes the model by the ops' function bodies, which is slower; "
            "build it with python -m diffquant.onnx.native"
        )


def _open(
    folder: Path, options: ort.SessionOptions, device: RuntimeDevice, changed: onnx.ModelProto | None
) -> ort.InferenceSession:
    """Open a session on the folder's model, or on a changed copy of it with the same data."""
    file = model_file(folder)
    try:
        if changed is None:
            return ort.InferenceSession(str(file), options, providers=device.providers)
        # A model from memory has no folder in which its data could be found.
        data = resolve_data_links(changed, file)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(data))
        return ort.InferenceSession(changed.SerializeToString(), options, providers=device.providers)
    except Exception as error:  # the runtime's own exception types differ between its versions
        raise CheckpointError(f"ONNX Runtime {ort.__version__} cannot open {file}: {error}") from error
