"""Builds a runnable model from an opened checkpoint, keeping packed weights or dequantizing them."""

from collections.abc import Callable, Collection
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from diffquant.errors import NonFiniteError
from diffquant.formats.compressed_tensors import GLOBAL, PACKED, SCALE, packed_shapes, unpack_parts
from diffquant.kernels.arguments import HALF_TYPES
from diffquant.kernels.linear.repack import PackedWeight, repack, repack_floats, repack_refusal
from diffquant.model.architecture import Architecture
from diffquant.model.causal import CausalModel
from diffquant.model.mlp import DiffMLP
from diffquant.model.quantized_linear import QuantizedLinear
from diffquant.numbers.absmax import check_finite, is_finite
from diffquant.scheme import Scheme
from diffquant.source.placement import EMBEDDING, OneDevice, Placement, ReadByLayer, Spread
from diffquant.source.places import Places
from diffquant.source.source import Source

# (a 16-bit parameter's name in the checkpoint, its data in the checkpoint's row order) -> the data in the model.
Rewrite = Callable[[str, Tensor], Tensor]


def as_it_is(_name: str, data: Tensor) -> Tensor:
    """The parameter as the checkpoint holds it."""
    return data


def build_model(
    source: Source,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    packed: bool | None = None,
    rewrite: Rewrite = as_it_is,
    places: Places | None = None,
    by_layer: bool = False,
    whole: Collection[str] = (),
) -> CausalModel:
    """The model of a checkpoint, with its cache and logits at 16 bits.

    Args:
        dtype, device, packed: as `diffquant.load` takes them.
        rewrite: function that replaces a parameter's data.
        places: places that the model is spread over, in place of the device.
        by_layer: whether a layer's parameters are read where it is at hand, and dropped behind it, on the processor; of
            the embedding the rows that a text has are read, and of the head nothing.
        whole: modules, by the checkpoint's names, whose rows are not rewritten one by one.

    Raises:
        NonFiniteError: a parameter holds NaN or infinity.
        CheckpointError: generation_config.json is damaged.
    """
    architecture, tokens = source.architecture, source.special_tokens
    model = _empty_model(architecture)
    dtype = dtype or source.dtype
    placement: Placement = OneDevice(device)
    if places is not None:
        # Accelerate's hooks move parameters, but packed codes are buffers.
        packed = False
        placement = Spread(model, places, dtype)
    if by_layer:
        packed = False
        placement = ReadByLayer(model, lambda rows: _in_dtype(read_rows(rows), dtype, EMBEDDING))
    if packed is None:
        packed = has_packed_kernels(device, dtype)
    packed_schemes = _packable_schemes(source) if packed else {}
    state: dict[str, Tensor] = {}

    def read_rows(rows: Tensor) -> Tensor:
        stored_name = source.adapter.source_name(EMBEDDING)
        if stored_name.removesuffix(".weight") in {*source.packed, *whole}:
            return _parameter(source, EMBEDDING, rewrite)[rows]
        data = source.checkpoint.read_rows(stored_name, rows)
        check_finite(data, stored_name)
        return rewrite(stored_name, data)

    def read(name: str) -> Tensor:
        wanted = torch.float32 if dtype in HALF_TYPES and architecture.parameters[name].is_wide else dtype
        return _in_dtype(_parameter(source, name, rewrite), wanted, name)

    for name in architecture.parameters:
        if name in packed_schemes:
            weight = _packed_weight(source, name, packed_schemes[name], dtype, device)
            state |= _install(model, name.removesuffix(".weight"), weight)
        else:
            state[name] = placement.put(name, partial(read, name))
    if architecture.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    settings = model.generation_config
    # Texts end where transformers' `generate` ends them.
    settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = tokens.bos, tokens.eos, tokens.pad
    model.eval().requires_grad_(False)
    placement.finish(model)
    for module in model.modules():
        if isinstance(module, DiffMLP) and not by_layer:
            module.join_gate_and_up()
    return model


def has_packed_kernels(device: str, dtype: torch.dtype) -> bool:
    """Whether a device has kernels that read packed weights in a dtype."""
    return torch.device(device).type == "cuda" and dtype in HALF_TYPES


def check_places(source: Source, places: Places, dtype: torch.dtype) -> None:
    """Check that every parameter of a model has a place, without reading it.

    Raises:
        UsageError: as `Spread` raises it.
    """
    Spread(_empty_model(source.architecture), places, dtype)


def _empty_model(architecture: Architecture) -> CausalModel:
    """The model without storage, except for tensors that no checkpoint holds."""
    with torch.device("meta"):
        model: CausalModel = architecture.new_model()
    model.make_tables()
    return model


def _packable_schemes(source: Source) -> dict[str, Scheme]:
    """Scheme of each of the layers' packed weights that kernels read as they are, by the model's name."""
    adapter = source.adapter
    schemes = {
        name: source.packed.get(adapter.source_name(name).removesuffix(".weight"))
        for name, shape in adapter.architecture.linear_shapes().items()
        if len(shape) == 2
    }
    return {name: scheme for name, scheme in schemes.items() if scheme and not repack_refusal(scheme)}


def _packed_weight(source: Source, name: str, scheme: Scheme, dtype: torch.dtype, device: str) -> PackedWeight:
    stored_name = source.adapter.source_name(name)
    module = stored_name.removesuffix(".weight")
    shape = source.adapter.source_parameters[stored_name].shape
    parts = {suffix: source.checkpoint.read(module + suffix) for suffix in packed_shapes(shape, scheme)}
    words, scale, divisor = parts[PACKED], parts[SCALE], parts.get(GLOBAL)
    multipliers = scheme.format.unpack_scale(scale, divisor)
    check_finite(multipliers, module + SCALE)
    _in_dtype(multipliers * -scheme.format.lowest, dtype, name)
    is_integer = scheme.format.integer_refusal is None
    scale = scale if is_integer else scale.view(torch.uint8)
    order = source.adapter.row_order(name)
    if order is not None:
        words, scale = words[order], scale if scale.numel() == 1 else scale[order]
    if is_integer:
        return repack(words.to(device), scale.to(device), scheme.bits, shape[1], dtype)
    divisor = None if divisor is None else divisor.to(device)
    return repack_floats(words.to(device), scale.to(device), divisor, shape[1])


def _install(model: CausalModel, name: str, weight: PackedWeight) -> dict[str, Tensor]:
    """Replace a Linear of the model by a packed layer, and return its buffers by full name."""
    layer = QuantizedLinear(weight, cast(nn.Linear, model.get_submodule(name)).bias)
    model.set_submodule(name, layer)
    return {f"{name}.{part}": buffer for part, buffer in layer.named_buffers()}


def _parameter(source: Source, name: str, rewrite: Rewrite) -> Tensor:
    stored_name = source.adapter.source_name(name)
    module = stored_name.removesuffix(".weight")
    if module in source.packed:
        data = _unpacked(source, module, source.adapter.source_parameters[stored_name].shape)
    else:
        data = source.checkpoint.read(stored_name)
        check_finite(data, stored_name)
        data = rewrite(stored_name, data)
    order = source.adapter.row_order(name)
    return data if order is None else data[order]


def _unpacked(source: Source, module: str, shape: tuple[int, ...]) -> Tensor:
    """A packed weight, dequantized.

    Raises:
        NonFiniteError: a scale, or a code of eight bits, is NaN or infinite.
    """
    scheme = source.packed[module]
    parts = {suffix: source.checkpoint.read(module + suffix) for suffix in packed_shapes(shape, scheme)}
    tensor_scale = parts.get(GLOBAL)
    check_finite(scheme.format.unpack_scale(parts[SCALE], tensor_scale), module + SCALE)
    data = unpack_parts(parts, shape, scheme)
    if scheme.format.is_native:
        check_finite(data, module)
    return data


def _in_dtype(data: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Finite data in the run's dtype.

    Raises:
        NonFiniteError: a value is beyond the dtype's range.
    """
    converted = data.to(dtype)
    if not is_finite(converted):
        largest = float(data.abs().max())
        raise NonFiniteError(f"{name} reaches {largest:.3g}, beyond {dtype}; run it in bfloat16 or float32")
    return converted
