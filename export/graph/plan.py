"""A checkpoint as the exporter sees it: its matrices with what is to become of them, and whether it can be exported."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.export.graph.linears import check_blocks
from diffquant.export.graph.matrix import Matrix, read_matrix, read_vector
from diffquant.export.options import ExportOptions
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters import Adapter
from diffquant.model.layout import linear_shapes
from diffquant.scheme import Scheme
from diffquant.source.source import Source

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Their tables depend on the length of the sequence.
_MOVING_ROPE = ("dynamic", "longrope")

# k_scale and v_scale of a layer, float32 [1, h_kv, 1, dk] and [1, h_kv, 1, dv].
Scales = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ExportSource:
    """A checkpoint to export, and what is to become of its weights."""

    source: Source
    options: ExportOptions

    @property
    def adapter(self) -> Adapter:
        return self.source.adapter

    @property
    def spec(self) -> DiffSpec:
        return self.source.spec

    def linear(self, name: str) -> Matrix:
        return read_matrix(self.source, name, self.options.weights)

    def embedding(self, name: str) -> Matrix:
        """The embedding or the head: 8-bit where asked for, whatever the linears are."""
        matrix = read_matrix(self.source, name)
        if self.options.embed_bits == 16 or matrix.scheme.quantizes:
            return matrix
        size = next((block for block in (128, 64, 32, 16) if matrix.shape[1] % block == 0), None)
        scheme = Scheme(8, "group", size) if size else Scheme(8, "row")
        return read_matrix(self.source, name, scheme)

    def whole(self, name: str) -> Tensor:
        """A small matrix in float32."""
        matrix = read_matrix(self.source, name)
        rows = matrix.shape[0]
        return matrix.dequantized(0, rows) if matrix.scheme.quantizes else matrix.values(0, rows).float()

    def vector(self, name: str) -> Tensor:
        return read_vector(self.source, name)

    def matrices(self) -> list[Matrix]:
        """Every matrix of the graph, in no particular order."""
        ends = [EMBEDDING] if self.adapter.config.tie_word_embeddings else [EMBEDDING, HEAD]
        return [self.linear(n) for n in linear_shapes(self.adapter.config)] + [self.embedding(n) for n in ends]


def check_source(source: ExportSource) -> None:
    """Refuse what the graph cannot express.

    Raises:
        CheckpointError: everything about the model that has no form here.
        GroupSizeError: group sizes that no kernel has.
    """
    config, options = source.adapter.config, source.options
    problems = []
    if config.hidden_act not in ("silu", "swish"):
        problems.append(f"its activation {config.hidden_act!r} is not silu")
    if config.rope_parameters and config.rope_parameters.get("rope_type") in _MOVING_ROPE:
        problems.append(f"its rope_type {config.rope_parameters['rope_type']!r} changes with the sequence's length")
    if source.spec.scale_by_init and source.spec.post_norm == "none":
        problems.append("it scales attention by 1 - λ_init without a norm")
    if source.spec.value_dim != key_width(source.spec):
        problems.append(f"its values are {source.spec.value_dim} wide, its keys {key_width(source.spec)}")
    if source.spec.maps == 1 and (options.pure or options.logits.quantizes):
        problems.append("a Transformer's attention is ONNX Runtime's own: leave out --pure-onnx and --logits")
    if problems:
        raise CheckpointError(f"{source.source.path} cannot be exported: {'; '.join(problems)}")
    check_blocks(source.matrices(), options.pure)


def key_width(spec: DiffSpec) -> int:
    """dk, which is dv: width of a cached row."""
    return spec.head_dim if spec.maps == 1 or spec.shared_k else 2 * spec.head_dim
