"""Checks a checkpoint's tensors against those that its adapter expects."""

from collections.abc import Sequence

import torch

from diffquant.errors import CheckpointError
from diffquant.formats.compressed_config import read_schemes
from diffquant.formats.compressed_tensors import SCALE, SHAPE, packed_modules, packed_shapes, packed_types
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.model.adapters import Adapter
from diffquant.model.blocks import Parameters, Shape
from diffquant.scheme import FULL, Scheme
from diffquant.support.listing import first_few

_HEAD = "lm_head.weight"
# Rows of a head that are compared at once.
_ROWS = 1024


def check_tensors(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, Scheme]:
    """Check that a checkpoint holds exactly its model's tensors, plain or packed.

    Returns:
        Scheme of each packed module by name; empty for a 16-bit checkpoint.

    Raises:
        CheckpointError: tensors are missing, of another shape or type, or not part of the model; the first are named.
    """
    layers = adapter.architecture.num_hidden_layers
    if layers > len(checkpoint.tensors):
        # Checked before listing shapes, since a wrong number of layers could make that list huge.
        raise CheckpointError(
            f"{checkpoint.path}: config.json has {layers} layers, and there are {len(checkpoint.tensors)} tensors"
        )
    schemes = read_schemes(checkpoint.config, packed_modules(checkpoint.tensors))
    parameters = adapter.source_parameters
    tied = adapter.architecture.tie_word_embeddings
    problems = _differences(stored_shapes(parameters, schemes), checkpoint, schemes, tied)
    if not problems:
        problems = _other_shapes(checkpoint, parameters, schemes) + _other_head(checkpoint, adapter)
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not hold the {checkpoint.config.get('model_type')} model of its config.json: "
            + "; ".join(problems)
        )
    return schemes


def stored_shapes(parameters: Parameters, schemes: dict[str, Scheme]) -> dict[str, Shape]:
    """Shapes of a model's tensors with the weights of `schemes` packed."""
    shapes: dict[str, Shape] = {}
    for name, parameter in parameters.items():
        module = name.removesuffix(".weight")
        if module in schemes and parameter.packing != "never":
            shapes |= {module + suffix: s for suffix, s in packed_shapes(parameter.shape, schemes[module]).items()}
        else:
            shapes[name] = parameter.shape
    return shapes


def is_surplus(name: str, tied: bool) -> bool:
    """Whether to tolerate a tensor that the model does not need: older writers stored buffers and tied heads."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == _HEAD)


def _differences(
    expected: dict[str, Shape], checkpoint: Checkpoint, schemes: dict[str, Scheme], tied: bool
) -> list[str]:
    stored = checkpoint.tensors
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in stored]
    unexpected = [name for name in stored if name not in expected and not is_surplus(name, tied)]
    reshaped = [
        f"{name} is {list(stored[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    retyped = [
        f"{name} is {stored[name].dtype}"
        for name in expected
        if name in stored and not _has_right_type(name, stored[name], schemes)
    ]
    return (
        _problem("missing ", missing)
        + _problem("wrong shape: ", reshaped)
        + _problem("wrong type: ", retyped)
        + _problem("not part of the model: ", unexpected)
    )


def _other_shapes(checkpoint: Checkpoint, parameters: Parameters, schemes: dict[str, Scheme]) -> list[str]:
    """Packed weights whose stored shape, by which readers unpack, differs from the model's."""
    problems = []
    for name, parameter in parameters.items():
        module = name.removesuffix(".weight")
        if module in schemes and schemes[module].format.stores_shape:
            stored, expected = checkpoint.read(module + SHAPE).tolist(), list(parameter.shape)
            if stored != expected:
                problems.append(f"{module} says {stored}, not {expected}")
    return _problem("wrong packed shape: ", problems)


def _other_head(checkpoint: Checkpoint, adapter: Adapter) -> list[str]:
    """A tied head that is stored and is not the embedding: transformers runs it, and others the embedding."""
    stored, embedding = checkpoint.tensors, adapter.source_name("model.embed_tokens.weight")
    if not adapter.architecture.tie_word_embeddings or _HEAD not in stored:
        return []
    is_alike = embedding in stored and stored[_HEAD].shape == stored[embedding].shape
    if is_alike and all(
        torch.equal(*(checkpoint.read_rows(name, slice(n, n + _ROWS)).float() for name in (_HEAD, embedding)))
        for n in range(0, stored[_HEAD].shape[0], _ROWS)
    ):
        return []
    return [
        f"tie_word_embeddings is true, and {_HEAD} is not {embedding}: set it to false for the model with this head, "
        "or remove the tensor"
    ]


def _problem(what: str, names: Sequence[str]) -> list[str]:
    return [what + first_few(names, ", ")] if names else []


def _has_right_type(name: str, info: TensorInfo, schemes: dict[str, Scheme]) -> bool:
    module, _, part = name.rpartition(".")
    scheme = schemes.get(module, FULL)
    types = packed_types(scheme, torch.bfloat16) if scheme.quantizes else {}
    suffix = f".{part}"
    if suffix not in types:
        return info.dtype.is_floating_point and info.dtype.itemsize > 1
    if suffix == SHAPE:
        return not info.dtype.is_floating_point
    return scheme.format.reads_scale(info.dtype) if suffix == SCALE else info.dtype == types[suffix]
