"""From a checkpoint, plain or quantized, to a model that runs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffquant.errors import UsageError
from diffquant.formats.compressed_tensors import PACKED, SCALE, SHAPE, codes, decode, decode_codes, weight_scale
from diffquant.kernels.arguments import HALF_TYPES
from diffquant.kernels.linear.repack import PackedWeight, refused_group, repack
from diffquant.model.adapters import Adapter
from diffquant.model.layout import linear_shapes, parameter_shapes
from diffquant.model.modeling import DiffTransformer
from diffquant.model.quantized_linear import QuantizedLinear
from diffquant.numerics import check_finite
from diffquant.quantization.plan import checked_schemes
from diffquant.scheme import Recipe, Scheme
from diffquant.source.ranges import read_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.devices import check_device


def load(
    path: Path | str | Source,
    recipe: Recipe | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    packed: bool | None = None,
    scales: Path | str | None = None,
) -> DiffTransformer:
    """The runnable model of a checkpoint, a recipe applied.

    Args:
        path: a folder (diffllama, diff_v1, diff_v2, diff_transformer or llama; plain or quantized), a .gguf file
            of a llama, or either as an open `Source`.
        recipe: what to simulate; a quantized checkpoint's own by default. Weights of a plain
            checkpoint come out as `quantize` would have stored them.
        dtype: of the model; the checkpoint's by default.
        device: of the model.
        packed: whether the layers' packed weights stay packed, or are expanded to `dtype`; by default they
            stay packed where kernels read them, in half precision on CUDA. Weights whose groups the kernels do
            not know (no multiple of 16) are expanded in any case.
        scales: calibrated on this checkpoint, for static schemes.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or of a kind that is not read.
        UsageError: the recipe quantizes weights that already are, or does not fit the checkpoint, or
            there is no such device.
    """
    check_device(device)
    source = open_source(path)
    adapter = source.adapter
    schemes = _simulated_schemes(source, recipe)
    recipe = recipe or source.recipe
    ranges = read_ranges(Path(scales), source) if scales else None
    if ranges is not None:
        ranges.check(recipe)
    model = _empty_model(adapter)
    dtype = dtype or source.checkpoint.tensors[adapter.source_name("model.embed_tokens.weight")].dtype
    if packed is None:
        packed = torch.device(device).type == "cuda" and dtype in HALF_TYPES
    kept = _kept_packed(source) if packed else {}
    state: dict[str, Tensor] = {}
    for name in parameter_shapes(adapter.config):
        if name in kept:
            weight = _packed_weight(source, name, kept[name], dtype, device)
            state |= _install(model, name.removesuffix(".weight"), weight)
        else:
            state[name] = _parameter(source, name, schemes).to(device, dtype)
    if adapter.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.to(device).eval().requires_grad_(False)
    if ranges is not None:
        model.model.ranges = {name: tensor.to(device) for name, tensor in ranges.tensors.items()}
    model.apply_recipe(recipe)
    return model


def check_loadable(source: Source, recipes: Iterable[Recipe]) -> None:
    """Check that a checkpoint's tokenizer and recipes for it are what `load` takes, without loading.

    Raises:
        DiffQuantError: as `load` raises it, or the tokenizer cannot be read.
    """
    for recipe in recipes:
        _simulated_schemes(source, recipe)
    _ = source.tokenizer


def _simulated_schemes(source: Source, recipe: Recipe | None) -> dict[str, Scheme]:
    """Scheme of each weight that is rounded while it is loaded; none under a checkpoint's own recipe."""
    if recipe is None:
        return {}
    if not source.packed:
        return checked_schemes(source, recipe)
    if recipe.weights.quantizes or recipe.weight_overrides:
        raise UsageError(
            f"{source.path} holds quantized weights already; give a recipe without weights, or its 16-bit original"
        )
    recipe.check_layers(source.layers)
    return {}


def _empty_model(adapter: Adapter) -> DiffTransformer:
    """The model without storage, but for the rotary tables, which no checkpoint holds."""
    with torch.device("meta"):
        model = DiffTransformer(adapter.config)
    model.model.rotary_emb = LlamaRotaryEmbedding(adapter.config)
    return model


def _kept_packed(source: Source) -> dict[str, Scheme]:
    """Scheme of each of the layers' weights that can stay packed, by canonical name."""
    adapter = source.adapter
    schemes = {
        name: source.packed.get(adapter.source_name(name).removesuffix(".weight"))
        for name in linear_shapes(adapter.config)
    }
    return {name: scheme for name, scheme in schemes.items() if scheme and not refused_group(scheme.size or 0)}


def _packed_weight(source: Source, name: str, scheme: Scheme, dtype: torch.dtype, device: str) -> PackedWeight:
    module = source.adapter.source_name(name).removesuffix(".weight")
    words, scale, shape = (source.checkpoint.read(module + suffix) for suffix in (PACKED, SCALE, SHAPE))
    order = source.adapter.row_order(name)
    if order is not None:
        words, scale = words[order], scale if scale.numel() == 1 else scale[order]
    return repack(words.to(device), scale.to(device), scheme.bits, int(shape[1]), dtype)


def _install(model: DiffTransformer, name: str, weight: PackedWeight) -> dict[str, Tensor]:
    """Put a packed layer where a model has a Linear; its buffers by full name."""
    layer = QuantizedLinear(weight, cast(nn.Linear, model.get_submodule(name)).bias)
    model.set_submodule(name, layer)
    return {f"{name}.{part}": buffer for part, buffer in layer.named_buffers()}


def _parameter(source: Source, name: str, schemes: Mapping[str, Scheme]) -> Tensor:
    stored_name = source.adapter.source_name(name)
    module = stored_name.removesuffix(".weight")
    if module in source.packed:
        words, scale, shape = (source.checkpoint.read(module + suffix) for suffix in (PACKED, SCALE, SHAPE))
        weight = decode(words, scale, shape, source.packed[module])
    else:
        weight = source.checkpoint.read(stored_name)
        check_finite(weight, stored_name)
    if module in schemes:
        scale = weight_scale(weight, schemes[module])
        weight = decode_codes(codes(weight, scale, schemes[module]), scale, schemes[module])
    order = source.adapter.row_order(name)
    return weight if order is None else weight[order]
