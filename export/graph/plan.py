"""The plan of an export: every weight with its exported scheme and row order, checked before a graph is built."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffquant.checkpoints.ranges import Ranges
from diffquant.checkpoints.source import Source
from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters.sizes import MOVING_ROPE
from diffquant.model.architecture import Architecture
from diffquant.model.blocks import Parameters
from diffquant.model.config import ArchitectureConfig
from diffquant.onnx.graph.body import contrib_width_problems
from diffquant.onnx.graph.matrix import (
    Matrix,
    attention_head_layout,
    check_block_sizes,
    check_not_requantized,
    open_matrix,
)
from diffquant.onnx.graph.nodes import EMITTED
from diffquant.onnx.options import ExportOptions, oldest_runtime
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.absmax import check_finite, max_code
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.support.names import first_few, option_name

# k_scale and v_scale of a layer, float32 [1, h_kv, 1, dk] and [1, h_kv, 1, dv].
Scales = tuple[np.ndarray, np.ndarray]
# Largest ratio of a cache's rounding error to the error under scales fitted to the text in it; 4 is a loss of two bits.
CACHE_LIMIT = 4.0


def latent_widths(architecture: Architecture) -> tuple[int, int] | None:
    """Return the widths of a token's latent and of its rotated keys, or None if the model has no latent attention."""
    widths = {(rows.values[1], rows.keys[1]) for rows in architecture.cached_shapes.values() if rows.is_latent}
    return next(iter(widths), None)


def attention_spec(architecture: Architecture) -> DiffSpec:
    """Return the specification of the graph's attention nodes: the model's, or one of attention over latents.

    Nodes over latents use the logit scale of the model's own specification, not the returned one's.
    """
    spec, widths = architecture.diff_spec, latent_widths(architecture)
    if widths is None:
        return spec
    row = sum(widths)
    return replace(spec, kv_pairs=1, head_dim=row, value_dim=row, rope="none", output_gate=False)


def static_scales(source: Source, bits: int, ranges: Ranges) -> dict[int, Scales]:
    """Return the scales of each layer's cache, by the layer's index.

    Args:
        source: checkpoint to export.
        bits: width of the cache's codes.
        ranges: ranges calibrated on this checkpoint.

    Raises:
        UsageError: the ranges have no keys or no values, or were clipped for codes of another width.
    """
    ranges.check_recipe(Recipe.of(kv=f"{bits}:static"))
    orders = exported_cache_channels(source)
    shape = (1, attention_spec(source.architecture).kv_pairs, 1, -1)
    scales = {}
    for layer in source.architecture.cached_shapes:
        k, v = (ranges.tensors[f"layers.{layer}.{target}"] for target in ("k", "v"))
        if latent_widths(source.architecture) is None:
            rows = [_to_op_order(x, order) / max_code(bits) for x, order in zip((k, v), orders, strict=True)]
        else:
            rows = _latent_scales(k, v, bits)
        scales[layer] = (rows[0].reshape(shape), rows[1].reshape(shape))
    return scales


def _latent_scales(rotated_keys: Tensor, latent: Tensor, bits: int) -> list[np.ndarray]:
    """Return key and value scales of a latent cache: a latent's codes are both key and value, so they share scales."""
    of_latent, of_keys = (x.flatten().numpy() / max_code(bits) for x in (latent, rotated_keys))
    return [np.concatenate([of_latent, of_keys]), np.concatenate([of_latent, np.ones_like(of_keys)])]


def exported_cache_channels(source: Source) -> tuple[Tensor, Tensor]:
    """Return where the exported cache stores each of the model's key and value channels.

    Returns:
        Indices of the key channels [key heads, key width] and of the value channels [KV pairs, value width], into a
        token's exported keys or values, flattened over the KV pairs.
    """
    if widths := latent_widths(source.architecture):
        latent, rotated = widths
        return torch.arange(latent, latent + rotated)[None], torch.arange(latent)[None]
    layout, exported = source.spec.layout, attention_head_layout(source.spec)
    places = []
    for projection in ("k_proj", "v_proj"):
        order = layout.permutation_to(exported, projection)
        places.append(torch.arange(layout.row_count(projection)) if order is None else order.argsort())
    keys, values = layout.view_keys(places[0][None]), layout.view_values(places[1][None])
    return keys.squeeze(-2), values.squeeze(-2)


def _to_op_order(ranges: Tensor, order: Tensor) -> np.ndarray:
    """Reorder DiffTransformer's ranges to one row in the exported cache's order."""
    flat = np.empty(order.numel(), np.float32)
    flat[order.flatten().numpy()] = ranges.flatten().numpy()
    return flat


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# protobuf's size limit in bytes.
_LARGEST_GRAPH = 2**31


@dataclass(frozen=True, eq=False)
class ExportPlan:
    """A checkpoint to export, with the exported form of its weights.

    Attributes:
        source: checkpoint to export.
        options: options of the export.
    """

    source: Source
    options: ExportOptions

    @property
    def config(self) -> ArchitectureConfig:
        config: ArchitectureConfig = self.source.architecture.config
        return config

    @property
    def decoder(self) -> Any:
        """The subclass of `Decoder` that builds the graph."""
        return resolve_name(self.source.architecture.export)

    @cached_property
    def spec(self) -> DiffSpec:
        """The specification of the graph's attention nodes."""
        return attention_spec(self.source.architecture)

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The weights of linears and experts, the embedding and the head, by DiffTransformer's names."""
        ends = [EMBEDDING] if self.config.tie_word_embeddings else [EMBEDDING, HEAD]
        schemes = dict.fromkeys(self.source.architecture.linear_shapes(), self.options.weights)
        schemes |= dict.fromkeys(ends, self._end_scheme)
        schemes |= dict.fromkeys([name for name, each in self.parameters.items() if each.is_large], FULL)
        return {
            name: replace(open_matrix(self.source, name, scheme), is_expanded=self.parameters[name].by_head)
            for name, scheme in schemes.items()
        }

    def read_small_matrix(self, name: str) -> Tensor:
        """Read all rows of a small matrix, such as a λ projection, in float32."""
        matrix = open_matrix(self.source, name, FULL)
        return matrix.read_float32(0, matrix.shape[0])

    def read_vector(self, name: str) -> Tensor:
        """Read a norm's weight, a bias or a λ vector in float32; a bias is reordered like its matrix's rows.

        Raises:
            NonFiniteError: the vector contains NaN or infinity.
        """
        vector = self.source.read(name)
        check_finite(vector, self.source.adapter.source_name(name))
        order = self.source.adapter.layout_row_order(attention_head_layout(self.source.spec), name)
        return (vector if order is None else vector[order]).float()

    @property
    def oldest_runtime(self) -> str:
        """Oldest ONNX Runtime version that opens the model."""
        stacked = [m for name, m in self.matrices.items() if len(self.parameters[name].shape) > 2]
        return oldest_runtime(self.options, any(matrix.has_codes for matrix in stacked))

    @property
    def parameters(self) -> Parameters:
        """All parameters by DiffTransformer's names."""
        return self.source.architecture.parameters

    @property
    def _end_scheme(self) -> Scheme:
        """Scheme of an embedding and head that are not quantized yet, by `embed_bits` only."""
        if self.options.embed_bits == 16:
            return FULL
        width = self.config.hidden_size
        group = next((size for size in (128, 64, 32, 16) if width % size == 0), None)
        return Scheme.parse(f"8:g{group}" if group else "8:row")


def plan_export(source: Source, options: ExportOptions) -> ExportPlan:
    """Check that a checkpoint can be exported with these options, and return the plan.

    Raises:
        CheckpointError: the model cannot be exported; the message names every reason.
        UsageError: the options quantize weights that are quantized already.
        GroupSizeError: no kernel supports some group sizes.
    """
    check_not_requantized(source, options.weights)
    check_exportable(source, "export")
    if problems := list(_problems(source, options)):
        raise CheckpointError(f"{source.path} cannot be exported: {'; '.join(problems)}")
    plan = ExportPlan(source, options)
    check_block_sizes(list(plan.matrices.values()))
    return plan


def check_exportable(source: Source, verb: str) -> None:
    """Check that an export exists for a checkpoint's architecture and for all of its blocks.

    Args:
        verb: name of the command, for the error message.

    Raises:
        CheckpointError: there is no export for the architecture or some blocks; the message names them.
    """
    architecture = source.architecture
    blocks = [*(block for layer in architecture.layers for block in layer.values()), architecture.final_norm[1]]
    missing = {type(block).__name__: None for block in blocks if not block.export_function}
    if missing or not architecture.export:
        what = first_few(missing, ", ") or type(architecture).__name__
        raise source.unsupported_error(verb, f", because there is no export for {what}")


def _layer_problems(architecture: Architecture, options: ExportOptions) -> Iterator[str]:
    attending = architecture.target_layers["logits"]
    others = dict.fromkeys(kind for i, kind in enumerate(architecture.layer_kinds) if i not in attending)
    if options.web and others:
        yield f"{option_name('web')} shows attention in every layer, but its {' and '.join(others)} layers have none"
    cached = list(architecture.cached_shapes.values())
    if options.web and any(rows.window for rows in cached):
        yield f"the page of {option_name('web')} draws whole maps, but some layers attend only within a window"
    odd = {rows.values[1] for rows in cached if rows.values[1] % 2}
    if options.kv_bits == 4 and odd:
        what = "latents" if cached[0].is_latent else "cached values"
        yield f"two codes of 4 bits share a byte, and its {what} have {', '.join(map(str, sorted(odd)))} channels"


def _problems(source: Source, options: ExportOptions) -> Iterator[str]:
    config, spec = source.architecture.config, attention_spec(source.architecture)
    yield from _layer_problems(source.architecture, options)
    yield from _activation_problems(source, options)
    if config.hidden_act not in EMITTED:
        yield f"its activation {config.hidden_act!r} is not {' or '.join(EMITTED)}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in MOVING_ROPE:
        yield f"its RoPE angles depend on the sequence's length (rope_type {rope['rope_type']!r})"
    # Size of both RoPE tables, cosines and sines, with half a key row's channels each.
    angles = config.max_position_embeddings * cached_key_width(spec) * options.torch_dtype.itemsize
    if spec.rope != "none" and angles >= _LARGEST_GRAPH:
        yield (
            f"its max_position_embeddings {config.max_position_embeddings:,} need {angles / 1e9:.1f} GB of angles, but "
            "model.onnx must be below 2 GB: reduce max_position_embeddings in config.json"
        )
    if spec.scale_by_init and spec.post_norm == "none":
        yield "it scales attention by 1 - λ_init without a norm"
    if spec.value_dim != cached_key_width(spec):
        yield f"its values have {spec.value_dim} channels and its keys {cached_key_width(spec)}; both must be equal"
    if spec.maps == 1 and options.logits.quantizes:
        yield f"a Transformer's logits cannot be rounded in ONNX Runtime: leave out {option_name('logits')}"
    if spec.maps == 1 and options.web:
        yield f"a Transformer has no second map to show: leave out {option_name('web')}, or convert it to diff-v2"
    if spec.maps == 1:
        for problem in contrib_width_problems(spec.head_dim, spec.rope != "none"):
            yield f"ONNX Runtime's GroupQueryAttention cannot compute it: {problem}"


def _activation_problems(source: Source, options: ExportOptions) -> Iterator[str]:
    schemes = source.recipe.rounding_texts("activations")
    others = [scheme for scheme in schemes if not scheme.startswith("8")]
    if others:
        yield (
            f"its recipe rounds activations to {' and '.join(others)}, and ONNX Runtime multiplies codes with "
            "activations of 8 bits: quantize without activations, or with 8"
        )
    elif schemes and options.accuracy_level == 1:
        yield f"its recipe rounds activations to 8 bits: leave out {option_name('accuracy_level', 1)}, which does not"


def cached_key_width(spec: DiffSpec) -> int:
    """Return the width of a KV pair's cached keys, in V1 of both maps together; cached values are as wide."""
    return spec.layout.row_count("k_proj") // spec.kv_pairs
