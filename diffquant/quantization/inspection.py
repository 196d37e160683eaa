"""Inspects a checkpoint by reading only its headers and λ parameters."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_tensors import packed_shapes
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.weight_source import WeightSource, open_weights
from diffquant.errors import CheckpointError
from diffquant.family.norm import LAMBDA_VECTORS, lam_from_vectors
from diffquant.family.spec import DiffSpec
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import Recipe
from diffquant.recipe.targets import TARGETS
from diffquant.reports.tables import bytes_at_16_bits, format_size, stored_bits_per_weight
from diffquant.support.terminal import PrintableResult, one_line

WIDTHS = ("8:g32", "6:g32", "4:g32", "4:g128")


@dataclass(frozen=True, repr=False)
class Inspection(PrintableResult):
    """Summary of a checkpoint.

    Attributes:
        path: folder or file that was read.
        kinds: number of layers of each kind, such as attention or Mamba.
        recipe: recipe that the checkpoint was quantized with; 16 bits if it was not.
        packed: number of weights that are stored packed.
        lam: one number per layer with attention: λ for V1, the RMS of the λ projection's weight for V2 (0 means that λ
            is ½ everywhere).
        sizes: bytes of the checkpoint, by "as it is", "16" and, for a 16-bit checkpoint, schemes such as "4:g32". For
            a scheme, it is the size that `quantize` would write, or None if the scheme does not fit the weights.
        packed_bits: stored bits per packed weight, by the same keys; only for those with packed weights.
        rounded: sentence about an earlier quantization by another library; "" if none is known.
    """

    path: str
    model_type: str
    spec: DiffSpec
    layers: int
    kinds: dict[str, int]
    hidden_size: int
    parameters: int
    recipe: Recipe
    packed: int
    lam: list[float]
    sizes: dict[str, int | None]
    packed_bits: dict[str, float]
    rounded: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"recipe": self.recipe.to_dict(), "generation": self.spec.attention_name}

    def __str__(self) -> str:
        spec = self.spec
        lines = [
            f"{one_line(self.path)}: {spec.attention_name} ({self.model_type}), {self.parameters / 1e6:.1f} M "
            f"parameters",
            f"{self.layers} layers, hidden {self.hidden_size}, {_head_counts(spec)}",
            f"RoPE {spec.rope}, post-norm {spec.post_norm}",
        ]
        if len(self.kinds) > 1:
            lines.append("layers by kind: " + ", ".join(f"{count} {kind}" for kind, count in self.kinds.items()))
        if self.packed or self.recipe != Recipe():
            lines.append(f"{self.packed} weights are packed; recipe: {_scheme_list(self.recipe)}")
        if self.rounded:
            lines.append(self.rounded)
        if spec.lam == "exp":
            where = "by layer" if len(self.kinds) == 1 else "of the layers with attention"
            lines.append(f"λ {where}: " + " ".join(f"{value:.3f}" for value in self.lam))
        if spec.gate_count:
            projections = " ".join(f"{value:.3g}" for value in self.lam)
            kind = "λ" if spec.lam == "sigmoid" else "a gate for each map"
            lines.append(f"{kind} per token and pair: sigmoid of a projection; weight RMS by layer: {projections}")
        if spec.output_gate:
            lines.append("output gate: each channel times a sigmoid of a projection")
        lines += [_size_line(scheme, self.sizes, self.packed_bits) for scheme in self.sizes]
        return "\n".join(lines)


def inspect_checkpoint(path: Path | str | Source) -> Inspection:
    """Inspect a checkpoint without loading its weights.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or of an unsupported kind.
    """
    source = open_source(path)
    parameters = source.weight_count
    sizes, packed_bits = ({}, _stored_packed_bits(source)) if source.packed else _plan_sizes(source)
    return Inspection(
        path=str(source.path),
        model_type=source.model_type,
        spec=source.spec,
        layers=source.architecture.num_hidden_layers,
        kinds=dict(Counter(source.architecture.layer_kinds)),
        hidden_size=source.architecture.hidden_size,
        parameters=parameters,
        recipe=source.recipe,
        packed=len(source.packed),
        lam=_lambdas(source),
        sizes={"as it is": source.checkpoint.stored_nbytes, "16": bytes_at_16_bits(parameters), **sizes},
        packed_bits=packed_bits,
        rounded=source.checkpoint.earlier_rounding_clause,
    )


@dataclass(frozen=True, repr=False)
class WeightInspection(PrintableResult):
    """Summary of a checkpoint of unknown architecture, from the names and shapes of its tensors.

    Attributes:
        path: folder that was read.
        model_type: model_type in config.json, which no adapter supports.
        tensors: number of tensors.
        parameters: number of elements of all tensors as stored; packed codes are counted in words, not in weights.
        weights: number of weights that the rules select for quantization.
        experts: number of selected weights that contain all experts of a layer in one tensor.
        chosen_parameters: number of elements of the selected weights.
        packed: number of weights that are stored packed.
        sizes, packed_bits, rounded: as in `Inspection`; `sizes` has no "16".
    """

    path: str
    model_type: str | None
    tensors: int
    parameters: int
    weights: int
    experts: int
    chosen_parameters: int
    packed: int
    sizes: dict[str, int | None]
    packed_bits: dict[str, float]
    rounded: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        head = (
            f"{one_line(self.path)} (model_type {self.model_type!r}) cannot be run by diffquant; {self.tensors} tensors"
        )
        if self.packed:
            return f"{head}, {self.packed} weights are packed\n{_size_line('as it is', self.sizes, self.packed_bits)}"
        lines = [
            f"{head}, {self.parameters / 1e6:.1f} M parameters",
            f"weights by name: {self.weights}, {self.experts} of them experts in one tensor, with "
            f"{self.chosen_parameters / 1e6:.1f} M parameters; quantize --weights-only --dry-run lists them",
        ]
        lines += [self.rounded] if self.rounded else []
        return "\n".join([*lines, *(_size_line(scheme, self.sizes, self.packed_bits) for scheme in self.sizes)])


def inspect_weights(path: Path | str | WeightSource) -> WeightInspection:
    """Inspect a checkpoint of any architecture without loading its weights.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
    """
    source = open_weights(path)
    tensors = source.checkpoint.tensors
    chosen = [tensors[source.packable_weights[module]] for module in source.linears]
    sizes, packed_bits = _plan_sizes(source) if chosen and not source.packed else ({}, {})
    parameters = sum(torch.Size(info.shape).numel() for info in tensors.values())
    return WeightInspection(
        path=str(source.path),
        model_type=source.model_type,
        tensors=len(tensors),
        parameters=parameters,
        weights=len(chosen),
        experts=sum(len(info.shape) == 3 for info in chosen),
        chosen_parameters=sum(torch.Size(info.shape).numel() for info in chosen),
        packed=len(source.packed),
        sizes={"as it is": source.checkpoint.stored_nbytes, **sizes},
        packed_bits=packed_bits,
        rounded=source.checkpoint.earlier_rounding_clause,
    )


def _size_line(scheme: str, sizes: Mapping[str, int | None], packed_bits: Mapping[str, float]) -> str:
    """Return a line with the checkpoint's size under a scheme and the stored bits per packed weight."""
    size, bits = sizes[scheme], packed_bits.get(scheme)
    text = format_size(size) if size else "groups do not divide all weights; `plan --weights SCHEME` names one"
    return f"{scheme:>9}: {text}" + (f", packed weights {bits:.2f} stored bits each" if bits else "")


def _lambdas(source: Source) -> list[float]:
    spec = source.spec

    def read(name: str) -> list[Tensor]:
        """Return the parameter with this name of each layer that has one, in float32."""
        return [source.read(each).float() for each in source.architecture.parameters if each.endswith(f".{name}")]

    if spec.lam == "exp":
        inits = map(spec.lam_init, source.architecture.target_layers["logits"])
        layers = zip(*map(read, LAMBDA_VECTORS), inits, strict=True)
        return [float(lam_from_vectors(*vectors, init=init)) for *vectors, init in layers]
    return [float(weight.square().mean().sqrt()) for weight in read("lambda_proj.weight")]


def _plan_sizes(source: Source | WeightSource) -> tuple[dict[str, int | None], dict[str, float]]:
    """Return `sizes` and `packed_bits`, as in `Inspection`, under each of `WIDTHS`."""
    sizes: dict[str, int | None] = {}
    packed_bits = {}
    for scheme in WIDTHS:
        try:
            plan = plan_quantization(source, Recipe.of(weights=scheme))
        except CheckpointError:
            sizes[scheme] = None
        else:
            sizes[scheme], packed_bits[scheme] = plan.bytes_after, plan.packed_bits
    return sizes, packed_bits


def _stored_packed_bits(source: Source) -> dict[str, float]:
    """Return the mean stored bits per packed weight of a quantized checkpoint, under the key "as it is"."""
    tensors, shapes = source.checkpoint.tensors, source.adapter.source_shapes()
    packed = {m: shape for name, shape in shapes.items() if (m := name.removesuffix(".weight")) in source.packed}
    nbytes = sum(
        tensors[module + suffix].nbytes
        for module, shape in packed.items()
        for suffix in packed_shapes(shape, source.packed[module])
    )
    weights = sum(torch.Size(shape).numel() for shape in packed.values())
    return {"as it is": stored_bits_per_weight(nbytes, weights)}


def _head_counts(spec: DiffSpec) -> str:
    what = "pairs" if spec.maps == 2 else "heads"
    noises = f" ({spec.signals_per_noise} to a noise head)" if spec.signals_per_noise > 1 else ""
    stored = what if spec.kv_pairs > 1 else what.removesuffix("s")
    widths = f"width {spec.head_dim}, values {spec.value_dim}"
    return f"{spec.pairs} {what}{noises} over {spec.kv_pairs} KV {stored}, {widths}"


def _scheme_list(recipe: Recipe) -> str:
    schemes = [f"{name} {text}" for name, text in recipe.to_dict().items() if name in TARGETS]
    return ", ".join([*schemes, f"overrides {len(recipe.overrides)}"] if recipe.overrides else schemes)
