"""Deltas: files of a few bits a weight that make the trained model of the one it started from.

Matrices are stored as their difference from the start, packed as compressed-tensors packs weights; λ, norms and
biases are few and stored whole, in float32.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diffquant.checkpoints.compressed_tensors import PACKED, SCALE, SHAPE, list_packed_modules, unpack_weight
from diffquant.errors import CheckpointError, GroupSizeError
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.modeling import DiffTransformer
from diffquant.recipe.scheme import Scheme
from diffquant.support.files import write_atomically
from research.train.models import KINDS, place
from research.train.starts import Level, attention_parameters, config_of, new_model
from tests.support.nearest_weights import pack_weight

_VERSION = "1"


@dataclass(frozen=True)
class Delta:
    """A trained attention as its difference from the start.

    Attributes:
        kind: kind of the model, one of `KINDS`.
        base: fingerprint of the checkpoint that training started from.
        scheme: scheme of the differences.
        run: settings and data of the training.
        levels: level of each layer for V1; empty otherwise.
        tensors: packed differences and whole parameters, by full name.
    """

    kind: str
    base: str
    scheme: Scheme
    run: Mapping[str, Any]
    levels: list[Level]
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def check_groups(config: DiffTransformerConfig, scheme: Scheme) -> None:
    """Check that a scheme's groups divide the attention matrices of every kind.

    Raises:
        GroupSizeError: they do not; the message names the matrices.
    """
    shapes = {
        f"{kind}: {name} {list(shape)}"
        for kind in KINDS
        for name, shape in config_of(kind, config).architecture.linear_shapes().items()
        if ".layers.0.self_attn." in name and shape[1] % (scheme.granularity_size or 1)
    }
    if shapes:
        raise GroupSizeError(f"delta {scheme}: the group does not divide the width of {', '.join(sorted(shapes))}")


def difference(
    kind: str,
    base: str,
    scheme: Scheme,
    run: Mapping[str, Any],
    levels: list[Level],
    trained: Mapping[str, Tensor],
    original: DiffTransformer,
) -> Delta:
    """Delta of trained weights, float32 by full name, from the model that starts on `original`'s."""
    start = dict(new_model(kind, original, levels).named_parameters())
    matrices = config_of(kind, original.config).architecture.linear_shapes()
    tensors: dict[str, Tensor] = {}
    for name, weight in trained.items():
        if name in matrices:
            # Scales take the difference's dtype: 16 bits are enough for them.
            packed = pack_weight((weight.cpu() - start[name]).bfloat16(), scheme)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
        else:
            tensors[name] = weight.cpu()
    return Delta(kind, base, scheme, run, levels if kind == "diff-v1" else [], tensors)


@torch.no_grad()
def applied(delta: Delta, original: DiffTransformer) -> DiffTransformer:
    """Trained model in bfloat16, as the delta has it.

    Args:
        original: the Transformer that it started from, in float32.

    Raises:
        CheckpointError: the delta is of other tensors than this model's attention.
    """
    model = new_model(delta.kind, original, delta.levels)
    parameters = dict(model.named_parameters())
    modules = list_packed_modules(delta.tensors)
    names = {f"{m}.weight" for m in modules} | {n for n in delta.tensors if not n.endswith((PACKED, SCALE, SHAPE))}
    differing = names ^ set(attention_parameters(model))
    if differing:
        raise CheckpointError(f"the delta and its base disagree about {', '.join(sorted(differing))}")
    for name in names:
        module = name.removesuffix(".weight")
        if module in modules:
            words, scale, shape = (delta.tensors[module + part] for part in (PACKED, SCALE, SHAPE))
            parameters[name] += unpack_weight(words, scale, shape, delta.scheme)
        else:
            parameters[name].copy_(delta.tensors[name])
    return place(model, "cpu", torch.bfloat16)


def write_delta(path: Path, delta: Delta) -> None:
    """Write a delta atomically."""
    metadata = {
        "diffquant_delta": _VERSION,
        "kind": delta.kind,
        "base": delta.base,
        "scheme": str(delta.scheme),
        "run": json.dumps(delta.run),
    }
    levels = {
        f"levels.{i}.{name}": tensor for i, level in enumerate(delta.levels) for name, tensor in vars(level).items()
    }
    stored = {name: tensor.contiguous() for name, tensor in {**delta.tensors, **levels}.items()}
    write_atomically(path, save(stored, metadata))


def read_delta(path: Path) -> Delta:
    """Delta that a file holds.

    Raises:
        CheckpointError: the file cannot be read, or is no delta.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read a delta from {path}: {error}") from error
    if metadata.get("diffquant_delta") != _VERSION:
        raise CheckpointError(f"{path} holds no delta that this program reads; `pairs.py train` makes them")
    levels = _levels(tensors)
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("levels.")}
    scheme, run = Scheme.parse(metadata["scheme"]), json.loads(metadata["run"])
    return Delta(metadata["kind"], metadata["base"], scheme, run, levels, rest)


def _levels(tensors: Mapping[str, Tensor]) -> list[Level]:
    count = sum(name.endswith(".gain") for name in tensors)
    return [Level(tensors[f"levels.{i}.constant"], tensors[f"levels.{i}.gain"]) for i in range(count)]
