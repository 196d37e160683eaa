"""Opens a checkpoint in any supported format, and checks its tensors against those that its adapter expects."""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from diffquant.checkpoints.compressed_config import has_own_kv_cache_scheme, read_schemes
from diffquant.checkpoints.compressed_tensors import (
    INPUT_GLOBAL,
    SCALE,
    SHAPE,
    list_packed_modules,
    packed_dtypes,
    packed_shapes,
    scale_names,
)
from diffquant.checkpoints.dequantized import dequantize_folder
from diffquant.checkpoints.folder import FolderCheckpoint
from diffquant.checkpoints.hub import fetch_to_local_path
from diffquant.checkpoints.location import check_location, is_gguf
from diffquant.checkpoints.reader import Checkpoint, TensorInfo
from diffquant.errors import CheckpointError
from diffquant.model.adapters import Adapter
from diffquant.model.blocks import Parameters, Shape
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.support.names import first_few


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors, a .gguf file, or a model of the hub by its name.

    Raises:
        CheckpointError: there is no such checkpoint, or files are missing, truncated or outside the folder, or weights
            that another library packed do not match its layout; the message names every offending file and tensor.
    """
    path = fetch_to_local_path(Path(path))
    check_location(path)
    if is_gguf(path):
        # Imported here, since importing gguf takes time that opening a folder does not need.
        from diffquant.checkpoints.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    return dequantize_folder(FolderCheckpoint(path))


_HEAD = "lm_head.weight"
# Endings of the names of buffers that are computed from config.json.
_BUFFERS = (
    *(f"rotary_emb.{buffer}" for buffer in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")),
    ".masked_bias",
)
# Rows of a head that are compared at once.
_ROWS = 1024


def check_tensors(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, Scheme]:
    """Check that a checkpoint holds exactly its model's tensors, at 16 bits or packed.

    Returns:
        Scheme of each packed module by name; empty for a 16-bit checkpoint.

    Raises:
        CheckpointError: tensors are missing, of another shape or type, or not part of the model; the message names the
            first.
    """
    layers = adapter.architecture.num_hidden_layers
    if layers > len(checkpoint.tensors):
        # Checked before listing shapes, since a wrong number of layers could make that list huge.
        raise CheckpointError(
            f"{checkpoint.path}: config.json has {layers} layers, but there are {len(checkpoint.tensors)} tensors"
        )
    schemes = read_schemes(checkpoint.config, list_packed_modules(checkpoint.tensors))
    parameters = adapter.source_parameters
    surplus = find_surplus_tensors(checkpoint, adapter)
    expected = stored_shapes(parameters, schemes) | dict.fromkeys(_cache_scales(checkpoint, adapter), (1,))
    problems = _differences(expected, checkpoint, schemes, surplus)
    if not problems:
        problems = _other_shapes(checkpoint, parameters, schemes) + _other_head(checkpoint, adapter)
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not match the {checkpoint.config.get('model_type')} model of its config.json: "
            + "; ".join(problems)
        )
    return schemes


def stored_shapes(parameters: Parameters, schemes: dict[str, Scheme]) -> dict[str, Shape]:
    """Return the shapes of the tensors that a checkpoint stores for these parameters, by name.

    Args:
        schemes: scheme of each module whose weight is packed; other parameters are stored unpacked.
    """
    shapes: dict[str, Shape] = {}
    for name, parameter in parameters.items():
        module = name.removesuffix(".weight")
        if module in schemes and parameter.packing != "never":
            shapes |= {module + suffix: s for suffix, s in packed_shapes(parameter.shape, schemes[module]).items()}
        else:
            shapes[name] = parameter.shape
    return shapes


def _cache_scales(checkpoint: Checkpoint, adapter: Adapter) -> Collection[str]:
    """Return the names of the tensors that hold a calibrated cache's scales; empty if config.json has no such cache."""
    return scale_names(adapter).values() if has_own_kv_cache_scheme(checkpoint.config) else ()


def find_surplus_tensors(checkpoint: Checkpoint, adapter: Adapter) -> frozenset[str]:
    """Return the names of tensors that a copy of the model at 16 bits does not need and that do not change its results.

    These are buffers, tied heads and biases of zeros, which older writers stored; scales of a calibrated cache; and
    `input_global_scale` of quantized activations, which is always 1 and is stored only for other libraries.
    """
    needed, scales = adapter.source_parameters, _cache_scales(checkpoint, adapter)
    is_tied = adapter.architecture.tie_word_embeddings
    return frozenset(
        name
        for name, info in checkpoint.tensors.items()
        if name not in needed
        and (
            name.endswith(_BUFFERS)
            or name in scales
            or (is_tied and name == _HEAD)
            or name.endswith(INPUT_GLOBAL)
            or (name.endswith(".bias") and _adds_nothing(checkpoint, name, info, needed))
        )
    )


def _adds_nothing(checkpoint: Checkpoint, name: str, info: TensorInfo, needed: Parameters) -> bool:
    """Return whether a bias is a causal mask, as in GPT-2, or holds a zero for each row of a matrix of the model."""
    if len(info.shape) == 4:
        return not info.dtype.is_floating_point
    weight = needed.get(f"{name.removesuffix('.bias')}.weight")
    if weight is None or len(weight.shape) != 2 or info.shape != weight.shape[:1]:
        return False
    return info.dtype.is_floating_point and not checkpoint.read(name).float().any()


def rename_tied_head(checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Rename a tied embedding that is stored only under the head's name.

    safetensors' `save_model` keeps only the first name of a shared tensor, and transformers reads either name.
    """
    embedding = adapter.source_name("model.embed_tokens.weight")
    is_alone = _HEAD in checkpoint.tensors and embedding not in checkpoint.tensors
    if is_alone and adapter.architecture.tie_word_embeddings:
        checkpoint.rename(_HEAD, embedding)


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
    """List packed weights whose stored shape, by which readers unpack, differs from the model's."""
    problems = []
    for name, parameter in parameters.items():
        module = name.removesuffix(".weight")
        if module in schemes and schemes[module].format.has_stored_shape:
            stored, expected = checkpoint.read(module + SHAPE).tolist(), list(parameter.shape)
            if stored != expected:
                problems.append(f"{module + SHAPE} is {stored}, not {expected}")
    return _problem("wrong packed shape: ", problems)


def _other_head(checkpoint: Checkpoint, adapter: Adapter) -> list[str]:
    """Report a stored tied head that differs from the embedding: runtimes disagree about which one to use."""
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
        f"tie_word_embeddings is true, but {_HEAD} differs from {embedding}: set it to false to use this head, "
        "or remove the tensor"
    ]


def _problem(what: str, names: Sequence[str]) -> list[str]:
    return [what + first_few(names, ", ")] if names else []


def _has_right_type(name: str, info: TensorInfo, schemes: dict[str, Scheme]) -> bool:
    module, _, part = name.rpartition(".")
    scheme = schemes.get(module, FULL)
    types = packed_dtypes(scheme, torch.bfloat16) if scheme.quantizes else {}
    suffix = f".{part}"
    if suffix not in types:
        return info.dtype.is_floating_point and info.dtype.itemsize > 1
    if suffix == SHAPE:
        return not info.dtype.is_floating_point
    return scheme.format.accepts_scale_dtype(info.dtype) if suffix == SCALE else info.dtype == types[suffix]
