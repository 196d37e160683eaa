"""Builds a runnable model from an opened checkpoint, packed or dequantized, and opens a loaded model as a source."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from diffquant.checkpoints.compressed_tensors import GLOBAL, SCALE, codes_suffix, packed_shapes, unpack_parts
from diffquant.checkpoints.placement import EMBEDDING, LayerwisePlacement, Placement, SpreadPlacement
from diffquant.checkpoints.places import OffloadPlan
from diffquant.checkpoints.reader import Checkpoint, TensorInfo
from diffquant.checkpoints.source import Source
from diffquant.errors import NonFiniteError, UsageError
from diffquant.kernels.arguments import HALF_TYPES
from diffquant.kernels.linear.repack import PackedWeight, repack, repack_floats, repack_refusal
from diffquant.model.adapters import adapter_for
from diffquant.model.architecture import Architecture
from diffquant.model.causal import CausalModel
from diffquant.model.linears import DiffMLP, QuantizedLinear
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.absmax import check_finite, is_finite
from diffquant.recipe.numbers.packing import pack
from diffquant.recipe.scheme import Scheme

_NAME = Path("model in memory")


class MemoryCheckpoint(Checkpoint):
    """A checkpoint that consists of a loaded model's parameters, under their names in the model."""

    def __init__(self, model: CausalModel) -> None:
        self.path = _NAME
        state = model.state_dict()
        self._parameters: dict[str, Tensor] = {name: state[name] for name in model.model.architecture.parameters}
        self.tensors = {name: TensorInfo(x.dtype, tuple(x.shape), _NAME.name) for name, x in self._parameters.items()}
        self.config = _config_of(model)

    def read(self, name: str) -> Tensor:
        return self._parameters[name].detach().cpu()

    def weight_files(self) -> list[Path]:
        return []

    def write_side_files(self, folder: Path) -> None:
        """Write nothing: a loaded model has no tokenizer."""


def make_memory_source(model: CausalModel) -> Source:
    """Return a `Source` that reads the parameters of a loaded model.

    Raises:
        UsageError: the weights are already quantized, or some are offloaded (on the meta device) or replaced by other
            modules, such as adapters.
    """
    if model.has_low_bit_weights:
        raise UsageError("the weights of this model are already quantized; load its 16-bit checkpoint")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError("weights of this model are offloaded (device_map); quantize its checkpoint's folder instead")
    if replaced := model.model.architecture.parameters.keys() - model.state_dict().keys():
        raise UsageError(
            f"this model no longer has {min(replaced)}: merge its adapters first (merge_and_unload in peft)"
        )
    checkpoint = MemoryCheckpoint(model)
    return Source(checkpoint, adapter_for(checkpoint.config).match_tensors(checkpoint.tensors), {}, {})


def _config_of(model: CausalModel) -> dict[str, Any]:
    """Return the contents of config.json, with the tokens that end a text."""
    settings = model.generation_config
    tokens = {f"{name}_token_id": getattr(settings, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    recipe = {} if model.recipe == Recipe() else {"diffquant_config": model.recipe.to_config()}
    config: dict[str, Any] = model.config.to_dict()
    return config | {"dtype": str(model.dtype).removeprefix("torch.")} | tokens | recipe


# (a 16-bit parameter's name in the checkpoint, its data in the checkpoint's row order) -> the data in the model.
Rewrite = Callable[[str, Tensor], Tensor]


def keep_unchanged(_name: str, data: Tensor) -> Tensor:
    """Return a parameter's data unchanged: the default `Rewrite`."""
    return data


def build_model(
    source: Source,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    packed: bool | None = None,
    rewrite: Rewrite = keep_unchanged,
    places: OffloadPlan | None = None,
    by_layer: bool = False,
    unsplit_modules: Collection[str] = (),
) -> CausalModel:
    """Build the model of a checkpoint, with its cache and logits at 16 bits.

    Args:
        dtype, device, packed: as in `diffquant.load`.
        rewrite: function from the name and the data of a 16-bit parameter in the checkpoint to its data in the model;
            by default data is kept.
        places: devices, main memory and disk to spread the model over; by default everything is on `device`.
        by_layer: whether each layer's parameters are read just before the layer runs and dropped afterwards. Of the
            embedding, only the rows of a text's tokens are read; the head is not read at all.
        unsplit_modules: modules, by the checkpoint's names, whose rows `rewrite` must get all at once.

    Raises:
        NonFiniteError: a parameter holds NaN or infinity.
        CheckpointError: generation_config.json is damaged.
    """
    architecture, tokens = source.architecture, source.special_tokens
    model = _empty_model(architecture)
    dtype = dtype or source.dtype
    placement = Placement(device)
    if places is not None:
        # Accelerate's hooks move parameters only, but packed codes are buffers.
        packed = False
        placement = SpreadPlacement(model, places, dtype)
    if by_layer:
        packed = False
        placement = LayerwisePlacement(model, lambda rows: _convert(read_rows(rows), dtype, EMBEDDING))
    if packed is None:
        packed = has_packed_kernels(device, dtype)
    packed_schemes = _packable_schemes(source) if packed else {}
    state: dict[str, Tensor] = {}

    def read_rows(rows: Tensor) -> Tensor:
        stored_name = source.adapter.source_name(EMBEDDING)
        if stored_name.removesuffix(".weight") in {*source.packed, *unsplit_modules}:
            return _parameter(source, EMBEDDING, rewrite)[rows]
        data = source.checkpoint.read_rows(stored_name, rows)
        check_finite(data, stored_name)
        return rewrite(stored_name, data)

    def read(name: str) -> Tensor:
        wanted = torch.float32 if dtype in HALF_TYPES and architecture.parameters[name].is_float32 else dtype
        return _convert(_parameter(source, name, rewrite), wanted, name)

    for name in architecture.parameters:
        if name in packed_schemes:
            weight = _packed_weight(source, name, packed_schemes[name], dtype, device)
            state |= _install(model, name.removesuffix(".weight"), weight)
        else:
            state[name] = placement.place_parameter(name, partial(read, name))
    if architecture.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    settings = model.generation_config
    # Generation ends at the same tokens as in transformers.
    settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = tokens.bos, tokens.eos, tokens.pad
    model.eval().requires_grad_(False)
    placement.finish(model)
    for module in model.modules():
        if isinstance(module, DiffMLP) and not by_layer:
            module.join_gate_and_up()
    return model


def has_packed_kernels(device: str, dtype: torch.dtype) -> bool:
    """Return whether a device has kernels that read packed weights in a dtype."""
    return torch.device(device).type == "cuda" and dtype in HALF_TYPES


def check_places(source: Source, places: OffloadPlan, dtype: torch.dtype) -> None:
    """Check that `places` has a place for every parameter of a model, without reading any.

    Raises:
        UsageError: `places` omits parameters or names unknown modules, places the embedding where nothing computes, or
            has no folder for weights on disk.
    """
    SpreadPlacement(_empty_model(source.architecture), places, dtype)


def _empty_model(architecture: Architecture) -> CausalModel:
    """Make the model on the meta device, with storage only for tensors that no checkpoint holds."""
    with torch.device("meta"):
        model: CausalModel = architecture.new_model()
    model.compute_missing_tensors()
    return model


def _packable_schemes(source: Source) -> dict[str, Scheme]:
    """Return the scheme of each packed weight that kernels read directly, by the model's name."""
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
    words, scale, divisor = parts[codes_suffix(scheme)], parts[SCALE], parts.get(GLOBAL)
    multipliers = scheme.format.unpack_scale(scale, divisor)
    check_finite(multipliers, module + SCALE)
    _convert(multipliers * -scheme.format.lowest, dtype, name)
    is_integer = scheme.format.integer_refusal is None
    scale = scale if is_integer else scale.view(torch.uint8)
    order = source.adapter.row_order(name)
    if order is not None:
        words, scale = words[order], scale if scale.numel() == 1 else scale[order]
    if is_integer:
        words = pack(words, scheme.bits) if scheme.format.is_native else words
        return repack(words.to(device), scale.to(device), scheme.bits, shape[1], dtype)
    divisor = None if divisor is None else divisor.to(device)
    return repack_floats(words.to(device), scale.to(device), divisor, shape[1])


def _install(model: CausalModel, name: str, weight: PackedWeight) -> dict[str, Tensor]:
    """Replace a Linear of the model with a packed layer, and return its buffers by full name."""
    layer = QuantizedLinear(weight, cast(nn.Linear, model.get_submodule(name)).bias)
    model.set_submodule(name, layer)
    return {f"{name}.{part}": buffer for part, buffer in layer.named_buffers()}


def _parameter(source: Source, name: str, rewrite: Rewrite) -> Tensor:
    stored_name = source.adapter.source_name(name)
    module = stored_name.removesuffix(".weight")
    if module in source.packed:
        data = _dequantize_weight(source, module, source.adapter.source_parameters[stored_name].shape)
    else:
        data = source.checkpoint.read(stored_name)
        check_finite(data, stored_name)
        data = rewrite(stored_name, data)
    order = source.adapter.row_order(name)
    return data if order is None else data[order]


def _dequantize_weight(source: Source, module: str, shape: tuple[int, ...]) -> Tensor:
    """Return a packed weight, dequantized.

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


def _convert(data: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert data to the run's dtype.

    Raises:
        NonFiniteError: a value is beyond the dtype's range.
    """
    converted = data.to(dtype)
    if not is_finite(converted):
        largest = float(data.abs().max())
        raise NonFiniteError(f"{name} reaches {largest:.3g}, beyond {dtype}; run it in bfloat16 or float32")
    return converted
