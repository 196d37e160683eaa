"""Checks a checkpoint's tensors against those that its adapter expects."""

from collections.abc import Collection, Sequence

import torch

from diffquant.errors import CheckpointError
from diffquant.formats.compressed_config import read_schemes
from diffquant.formats.compressed_tensors import SCALE, SHAPE, packed_modules, packed_shapes, packed_types
from diffquant.formats.reader import Checkpoint, RenamedCheckpoint, TensorInfo
from diffquant.model.adapters import Adapter
from diffquant.model.blocks import Parameters, Shape
from diffquant.scheme import FULL, Scheme
from diffquant.support.listing import first_few

_HEAD = "lm_head.weight"
# Ends of the names of what is computed from config.json.
_BUFFERS = (
    *(f"rotary_emb.{buffer}" for buffer in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")),
    ".masked_bias",
)
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
    surplus = surplus_tensors(checkpoint, adapter)
    problems = _differences(stored_shapes(parameters, schemes), checkpoint, schemes, surplus)
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


def surplus_tensors(checkpoint: Checkpoint, adapter: Adapter) -> frozenset[str]:
    """Names of the tensors that the model does not need and whose absence changes nothing.

    Older writers stored buffers, tied heads, and for each packed matrix of a model without biases one of zeros.
    """
    needed = adapter.source_parameters
    is_tied = adapter.architecture.tie_word_embeddings
    return frozenset(
        name
        for name, info in checkpoint.tensors.items()
        if name not in needed
        and (
            name.endswith(_BUFFERS)
            or (is_tied and name == _HEAD)
            or (name.endswith(".bias") and _adds_nothing(checkpoint, name, info, needed))
        )
    )


def _adds_nothing(checkpoint: Checkpoint, name: str, info: TensorInfo, needed: Parameters) -> bool:
    """Whether a bias is a causal mask, as GPT-2 calls it, or holds a zero for each row of a matrix of the model."""
    if len(info.shape) == 4:
        return not info.dtype.is_floating_point
    weight = needed.get(f"{name.removesuffix('.bias')}.weight")
    if weight is None or len(weight.shape) != 2 or info.shape != weight.shape[:1]:
        return False
    return info.dtype.is_floating_point and not checkpoint.read(name).float().any()


def with_embedding(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """The checkpoint, with an embedding that is tied to the head and stored under the head's name alone renamed.

    safetensors' `save_model` keeps the first name of what is shared, and transformers reads either.
    """
    embedding = adapter.source_name("model.embed_tokens.weight")
    is_alone = _HEAD in checkpoint.tensors and embedding not in checkpoint.tensors
    return (
        RenamedCheckpoint(checkpoint, _HEAD, embedding)
        if is_alone and adapter.architecture.tie_word_embeddings
        else checkpoint
    )


def _differences(
    expected: dict[str, Shape], checkpoint: Checkpoint, schemes: dict[str, Scheme], surplus: Collection[str]
) -> list[str]:
    stored = checkpoint.tensors
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in stored]
    unexpected = [name for name in stored if name not in expected and name not in surplus]
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
