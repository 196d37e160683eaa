"""An inspection of a checkpoint, which reads its headers and λ parameters alone."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.family.lam import lam_from_vectors
from diffquant.family.spec import DiffSpec
from diffquant.model.shapes import LAMBDA_VECTORS
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import LAYER_TARGETS, Recipe
from diffquant.report.tables import megabytes
from diffquant.source.source import Source, open_source

WIDTHS = ("8:g32", "6:g32", "4:g32", "4:g128")


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint is, at a glance.

    Attributes:
        path: folder or file that was read.
        recipe: recipe that the checkpoint was quantized with; 16 bits for any other.
        packed: number of weights that are stored packed.
        lam: λ of each layer for V1; for V2 the root mean square of each layer's λ projection (0 gives λ ½ everywhere).
        sizes: bytes of all tensors, as stored and with weights at each scheme; None where that does not fit them.
    """

    path: str
    model_type: str
    spec: DiffSpec
    layers: int
    hidden_size: int
    parameters: int
    recipe: Recipe
    packed: int
    lam: list[float]
    sizes: dict[str, int | None]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"recipe": self.recipe.to_dict(), "generation": self.spec.generation}

    def __str__(self) -> str:
        spec = self.spec
        lines = [
            f"{self.path}: {spec.generation} ({self.model_type}), {self.parameters / 1e6:.1f} M parameters",
            f"{self.layers} layers, hidden {self.hidden_size}, {_head_counts(spec)}",
            f"RoPE {spec.rope}, post-norm {spec.post_norm}",
        ]
        if self.packed or self.recipe != Recipe():
            lines.append(f"{self.packed} weights are packed; recipe: {_scheme_list(self.recipe)}")
        if spec.lam == "exp":
            lines.append("λ by layer: " + " ".join(f"{value:.3f}" for value in self.lam))
        if spec.lam == "sigmoid":
            projections = " ".join(f"{value:.3g}" for value in self.lam)
            lines.append(f"λ per token and pair, sigmoid of a projection; its rms by layer: {projections}")
        for scheme, size in self.sizes.items():
            lines.append(f"{scheme:>9}: {megabytes(size) if size else 'does not fit these weights'}")
        return "\n".join(lines)


def inspect_checkpoint(path: Path | str | Source) -> Inspection:
    """Look at a checkpoint without loading its weights.

    Raises:
        CheckpointError: it is damaged, incomplete or of a kind that is not read.
    """
    source = open_source(path)
    shapes = source.adapter.source_shapes().values()
    return Inspection(
        path=str(source.path),
        model_type=source.model_type,
        spec=source.spec,
        layers=source.layers,
        hidden_size=source.adapter.architecture.hidden_size,
        parameters=sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes),
        recipe=source.recipe,
        packed=len(source.packed),
        lam=_lambdas(source),
        sizes=_sizes(source, () if source.packed else WIDTHS),
    )


def _lambdas(source: Source) -> list[float]:
    spec = source.spec

    def read(layer: int, name: str) -> Tensor:
        return source.read(f"model.layers.{layer}.self_attn.{name}").float()

    layers = range(source.layers)
    if spec.lam == "exp":
        vectors = ([read(layer, name) for name in LAMBDA_VECTORS] for layer in layers)
        inits = (spec.lam_init(layer) for layer in layers)
        return [float(lam_from_vectors(*four, init=init)) for four, init in zip(vectors, inits, strict=True)]
    if spec.lam == "sigmoid":
        return [float(read(layer, "lambda_proj.weight").square().mean().sqrt()) for layer in layers]
    return []


def _sizes(source: Source, schemes: Iterable[str]) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {"as it is": source.checkpoint.nbytes}
    for scheme in schemes:
        try:
            sizes[scheme] = plan_quantization(source, Recipe.of(weights=scheme)).bytes_after
        except CheckpointError:
            sizes[scheme] = None
    return sizes


def _head_counts(spec: DiffSpec) -> str:
    what = "pairs" if spec.maps == 2 else "heads"
    noises = f" ({spec.signals_per_noise} to a noise head)" if spec.signals_per_noise > 1 else ""
    return f"{spec.pairs} {what}{noises} over {spec.kv_pairs} KV {what}, width {spec.head_dim}, values {spec.value_dim}"


def _scheme_list(recipe: Recipe) -> str:
    schemes = [f"{name} {getattr(recipe, name)}" for name in ("weights", *LAYER_TARGETS)]
    return ", ".join([*schemes, f"overrides {len(recipe.overrides)}"] if recipe.overrides else schemes)
