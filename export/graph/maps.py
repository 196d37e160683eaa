"""Extra outputs of an exported model from which to compute its attention maps: rotated queries, λ, signal gate.

Rotated keys are in the cache, so softmax(Q·Kᵀ·scale) of each map needs nothing else.
"""

from collections.abc import Sequence

from onnx import TensorProto

from diffquant.export.graph.nodes import Graph
from diffquant.export.graph.padding import Tokens
from diffquant.family.spec import DiffSpec

QUERY = "maps.{layer}.query"
LAMBDA = "maps.{layer}.lambda"
SIGNAL_GATE = "maps.{layer}.signal_gate"


class MapOutputs:
    """Adds these outputs to a graph, layer by layer."""

    def __init__(self, graph: Graph, spec: DiffSpec) -> None:
        self.graph = graph
        self.spec = spec
        self._layers: list[int] = []
        self._angles: list[str] = []

    def add(
        self,
        layer: int,
        query: str,
        lam: str,
        signal_gate: str,
        tables: Sequence[str],
        is_interleaved: bool,
        tokens: Tokens,
    ) -> None:
        """Name a layer's values after the outputs they become.

        Args:
            layer: number of the layer.
            query: name of the op's queries [B, T, (h+n)·d], not rotated yet.
            lam: name of λ, [1] or [B, T, h].
            signal_gate: name of the signal map's factor [B, T, h]; "" for none.
            tables: names of the op's cos and sin; "" each where nothing rotates.
            is_interleaved: whether channels (2i, 2i+1) turn together, and not (i, i + d/2).
            tokens: where the tokens of a call are; the outputs have them before their padding.
        """
        self._layers.append(layer)
        outputs = {QUERY: self._rotated(query, tables, is_interleaved, tokens), LAMBDA: lam, SIGNAL_GATE: signal_gate}
        for name, value in outputs.items():
            if value:
                self.graph.add("Identity", value, name=name.format(layer=layer))

    def declare(self) -> None:
        """Make them outputs of the model, behind all others."""
        by_token: list[str | int] = ["batch_size", "sequence", self.spec.pairs]
        lambda_shape: list[str | int] = [1] if self.spec.lam == "exp" else by_token
        width = self.spec.query_heads * self.spec.head_dim
        for layer in self._layers:
            self.graph.output(QUERY.format(layer=layer), self.graph.kind, ["batch_size", "sequence", width])
            self.graph.output(LAMBDA.format(layer=layer), TensorProto.FLOAT, lambda_shape)
            if self.spec.lam == "two-gates":
                self.graph.output(SIGNAL_GATE.format(layer=layer), TensorProto.FLOAT, by_token)

    def _rotated(self, query: str, tables: Sequence[str], is_interleaved: bool, tokens: Tokens) -> str:
        if self.spec.rope == "none":
            return query
        if not self._angles:
            self._angles = [self._angles_of_tokens(table, tokens) for table in tables]
        heads = self.spec.query_heads
        return self.graph.add("RotaryEmbedding", query, *self._angles, num_heads=heads, interleaved=int(is_interleaved))

    def _angles_of_tokens(self, table: str, tokens: Tokens) -> str:
        """Rows [B, T, d/2] of a table at the positions of the new tokens."""
        graph = self.graph
        width = graph.int64("maps.half_width", (self.spec.head_dim // 2,))
        zero = graph.int64("maps.zero", (0,))
        # In V1 the table serves a key row k1|k2 and holds the same angles twice.
        columns = graph.add("Slice", table, zero, width, graph.int64("maps.columns", (1,)))
        return graph.add("Gather", columns, graph.add("Add", tokens.before, tokens.steps))
