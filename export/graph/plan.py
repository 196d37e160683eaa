"""The plan of an export: every weight in the form that the graph stores, checked before anything is built."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from diffquant.errors import CheckpointError, UsageError
from diffquant.export.graph.activations import EMITTED
from diffquant.export.graph.body import contrib_row_problems
from diffquant.export.graph.latents import EXPANSION, OUTPUT_GATE, op_spec
from diffquant.export.graph.linears import check_blocks
from diffquant.export.graph.matrix import Matrix, op_layout, read_matrix
from diffquant.export.options import ExportOptions, runtime_floor
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters import Adapter
from diffquant.model.blocks import Parameters
from diffquant.model.config import ArchitectureConfig
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.model.transformer import TransformerArchitecture
from diffquant.numbers.absmax import check_finite
from diffquant.scheme import FULL, Scheme
from diffquant.source.source import Source
from diffquant.support.spelling import spelled

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Rotary embeddings whose tables depend on the length of the sequence.
_MOVING_ROPE = ("dynamic", "longrope")
# protobuf's limit of bytes.
_LARGEST_GRAPH = 2**31


@dataclass(frozen=True, eq=False)
class ExportPlan:
    """A checkpoint to export, with its weights in exported form.

    Attributes:
        source: checkpoint that is exported.
        options: options of the export.
    """

    source: Source
    options: ExportOptions

    @property
    def adapter(self) -> Adapter:
        return self.source.adapter

    @property
    def config(self) -> ArchitectureConfig:
        config: ArchitectureConfig = self.source.architecture.config
        return config

    @cached_property
    def spec(self) -> DiffSpec:
        """The specification of the attention that the graph's nodes compute."""
        return op_spec(self.source.architecture)

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """Every linear's or experts' weight, the embedding and the head, by the model's names."""
        ends = [EMBEDDING] if self.config.tie_word_embeddings else [EMBEDDING, HEAD]
        schemes = dict.fromkeys(self.source.architecture.linear_shapes(), self.options.weights)
        schemes |= dict.fromkeys(ends, self._end_scheme)
        schemes |= dict.fromkeys([name for name in self.parameters if name.endswith(OUTPUT_GATE)], FULL)
        return {
            name: replace(read_matrix(self.source, name, scheme), is_expanded=name.endswith(EXPANSION))
            for name, scheme in schemes.items()
        }

    def small_matrix(self, name: str) -> Tensor:
        """All rows of a matrix in float32."""
        matrix = read_matrix(self.source, name, FULL)
        return matrix.floats(0, matrix.shape[0])

    def vector(self, name: str) -> Tensor:
        """A norm's weight, a bias or a λ vector in float32, its entries in the order of its matrix's rows.

        Raises:
            NonFiniteError: it holds NaN or infinity.
        """
        vector = self.source.read(name)
        check_finite(vector, self.adapter.source_name(name))
        order = self.adapter.rows_as(op_layout(self.source.spec), name)
        return (vector if order is None else vector[order]).float()

    @property
    def floor(self) -> str:
        """Oldest ONNX Runtime that opens the model."""
        stacked = [m for name, m in self.matrices.items() if len(self.parameters[name].shape) > 2]
        return runtime_floor(self.options, any(matrix.has_codes for matrix in stacked))

    @property
    def parameters(self) -> Parameters:
        """Every parameter by DiffTransformer's name."""
        return self.source.architecture.parameters

    @property
    def _end_scheme(self) -> Scheme:
        """Scheme of a plain embedding and head: 8 bits where asked for, whatever the linears are."""
        if self.options.embed_bits == 16:
            return FULL
        width = self.config.hidden_size
        group = next((size for size in (128, 64, 32, 16) if width % size == 0), None)
        return Scheme.parse(f"8:g{group}" if group else "8:row")


def plan_export(source: Source, options: ExportOptions) -> ExportPlan:
    """The plan of an export that a graph can express.

    Raises:
        CheckpointError: a graph cannot express the model; the message names every reason.
        UsageError: weights are to be quantized that already are.
        GroupSizeError: some group sizes are ones that no kernel has.
    """
    if source.packed and options.weights.quantizes:
        raise UsageError(
            f"{source.path} holds quantized weights already: they are exported as they are; leave out "
            f"{spelled('weights')}"
        )
    check_exportable(source, "export")
    problems = _problems(source, options)
    if problems:
        raise CheckpointError(f"{source.path} cannot be exported: {'; '.join(problems)}")
    plan = ExportPlan(source, options)
    check_blocks(list(plan.matrices.values()))
    return plan


def check_exportable(source: Source, verb: str) -> None:
    """Check that a checkpoint is of an architecture that has a graph.

    Raises:
        CheckpointError: it is another.
    """
    source.check_taken(verb, SambaYArchitecture, Motif3Architecture)


def _latent_problems(architecture: Motif3Architecture, options: ExportOptions) -> Iterator[str]:
    if options.web:
        yield f"the page of {spelled('web')} draws whole maps, and some of its layers see a window"
    if options.kv_bits == 4 and architecture.kv_lora_rank % 2:
        yield f"two codes of 4 bits share a byte, and its latents have {architecture.kv_lora_rank} channels"


def _problems(source: Source, options: ExportOptions) -> list[str]:
    config, spec = source.architecture.config, op_spec(source.architecture)
    problems = []
    if isinstance(source.architecture, Motif3Architecture):
        problems += list(_latent_problems(source.architecture, options))
    if isinstance(source.architecture, SambaYArchitecture) and options.web:
        problems.append(f"{spelled('web')} shows attention in every layer, and its layers of Mamba have none")
    if config.hidden_act not in EMITTED:
        problems.append(f"its activation {config.hidden_act!r} is not {' or '.join(EMITTED)}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _MOVING_ROPE:
        problems.append(f"its rope_type {rope['rope_type']!r} changes with the sequence's length")
    # Cosines and sines, each of half a key row's channels.
    angles = config.max_position_embeddings * key_width(spec) * options.torch_dtype.itemsize
    if isinstance(source.architecture, TransformerArchitecture) and spec.rope != "none" and angles >= _LARGEST_GRAPH:
        problems.append(
            f"its max_position_embeddings {config.max_position_embeddings:,} make {angles / 1e9:.1f} GB of angles, and "
            "model.onnx holds less than 2 GB: state fewer positions in config.json"
        )
    if spec.scale_by_init and spec.post_norm == "none":
        problems.append("it scales attention by 1 - λ_init without a norm")
    if spec.value_dim != key_width(spec):
        problems.append(f"its values are {spec.value_dim} wide, its keys {key_width(spec)}")
    if spec.maps == 1 and options.logits.quantizes:
        problems.append(f"a Transformer's attention is ONNX Runtime's own: leave out {spelled('logits')}")
    if spec.maps == 1 and options.web:
        problems.append(
            f"a Transformer has no second map to show: leave out {spelled('web')}, or convert it to diff-v2"
        )
    if spec.maps == 1:
        widths = contrib_row_problems(spec.head_dim, spec.rope != "none")
        problems += [f"ONNX Runtime's GroupQueryAttention cannot compute it: {problem}" for problem in widths]
    return problems


def key_width(spec: DiffSpec) -> int:
    """Width dk of a KV pair's cached key row, the keys of both maps side by side; it is also dv."""
    return spec.layout.height("k_proj") // spec.kv_pairs
