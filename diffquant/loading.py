"""From a checkpoint, plain or quantized, to a model that runs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffquant.errors import CheckpointError, UsageError
from diffquant.formats.compressed_tensors import PACKED, SCALE, SHAPE, codes, decode, decode_codes, weight_scale
from diffquant.formats.reader import Checkpoint, open_checkpoint
from diffquant.kernels.arguments import HALF_TYPES
from diffquant.kernels.linear.repack import PackedWeight, refused_group, repack
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.layout import linear_shapes, parameter_shapes
from diffquant.model.modeling import DiffTransformer
from diffquant.model.quantized_linear import QuantizedLinear
from diffquant.numerics import check_finite
from diffquant.quantization.plan import checked_schemes
from diffquant.scheme import Recipe, Scheme
from diffquant.source.check import check_tensors
from diffquant.source.ranges import read_ranges
from diffquant.source.tokenizer import load_tokenizer
from diffquant.support.devices import check_device
from diffquant.support.versions import CONFIG_VERSION


def load(
    path: Path | str,
    recipe: Recipe | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    packed: bool | None = None,
    scales: Path | str | None = None,
) -> DiffTransformer:
    """The runnable model of a checkpoint, a recipe applied.

    Args:
        path: a folder (diffllama, diff_v1, diff_v2, diff_transformer or llama; plain or quantized) or
            a .gguf file of a llama.
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
    checkpoint = open_checkpoint(Path(path))
    adapter = adapter_for(checkpoint.config)
    stored = check_tensors(checkpoint, adapter)
    schemes = _simulated_schemes(checkpoint, adapter, stored, recipe)
    recipe = recipe or stored_recipe(checkpoint.config)
    ranges = read_ranges(Path(scales), Path(path)) if scales else None
    if ranges is not None:
        ranges.check(recipe)
    model = _empty_model(adapter)
    dtype = dtype or checkpoint.tensors[adapter.source_name("model.embed_tokens.weight")].dtype
    if packed is None:
        packed = torch.device(device).type == "cuda" and dtype in HALF_TYPES
    kept = _kept_packed(adapter, stored) if packed else {}
    state: dict[str, Tensor] = {}
    for name in parameter_shapes(adapter.config):
        if name in kept:
            weight = _packed_weight(checkpoint, adapter, name, kept[name], dtype, device)
            state |= _install(model, name.removesuffix(".weight"), weight)
        else:
            state[name] = _parameter(checkpoint, adapter, name, stored, schemes).to(device, dtype)
    if adapter.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.to(device).eval().requires_grad_(False)
    if ranges is not None:
        model.model.ranges = {name: tensor.to(device) for name, tensor in ranges.tensors.items()}
    model.apply_recipe(recipe)
    return model


def check_loadable(path: Path, recipes: Iterable[Recipe]) -> None:
    """Check that a checkpoint, its tokenizer and recipes for it are what `load` takes, without loading.

    Raises:
        DiffQuantError: as `load` and `load_tokenizer`.
    """
    checkpoint = open_checkpoint(path)
    adapter = adapter_for(checkpoint.config)
    packed = check_tensors(checkpoint, adapter)
    for recipe in recipes:
        _simulated_schemes(checkpoint, adapter, packed, recipe)
    load_tokenizer(path)


def stored_recipe(config: dict[str, Any]) -> Recipe:
    """The recipe a quantized checkpoint was made with; 16 bits for any other.

    Raises:
        CheckpointError: it cannot be read, or a newer diffquant wrote it.
    """
    entry = config.get("diffquant_config", {})
    try:
        if entry.get("version", CONFIG_VERSION) > CONFIG_VERSION:
            raise CheckpointError(
                f"config.json: diffquant_config has version {entry['version']}, this diffquant reads "
                f"{CONFIG_VERSION}; install a newer one"
            )
        return Recipe.from_dict(entry.get("recipe", {}))
    except (UsageError, AttributeError, TypeError) as error:
        raise CheckpointError(f"config.json: diffquant_config is malformed: {error}") from error


def _simulated_schemes(
    checkpoint: Checkpoint, adapter: Adapter, packed: dict[str, Scheme], recipe: Recipe | None
) -> dict[str, Scheme]:
    """Scheme of each weight that is rounded while it is loaded; none under a checkpoint's own recipe."""
    if recipe is None:
        return {}
    if not packed:
        return checked_schemes(checkpoint, adapter, recipe)
    if recipe.weights.quantizes or recipe.weight_overrides:
        raise UsageError(
            f"{checkpoint.path} holds quantized weights already; give a recipe without weights, or its 16-bit original"
        )
    recipe.check_layers(adapter.config.num_hidden_layers)
    return {}


def _empty_model(adapter: Adapter) -> DiffTransformer:
    """The model without storage, but for the rotary tables, which no checkpoint holds."""
    with torch.device("meta"):
        model = DiffTransformer(adapter.config)
    model.model.rotary_emb = LlamaRotaryEmbedding(adapter.config)
    return model


def _kept_packed(adapter: Adapter, stored: dict[str, Scheme]) -> dict[str, Scheme]:
    """Scheme of each of the layers' weights that can stay packed, by canonical name."""
    found = {
        name: stored.get(adapter.source_name(name).removesuffix(".weight")) for name in linear_shapes(adapter.config)
    }
    return {name: scheme for name, scheme in found.items() if scheme and not refused_group(scheme.size or 0)}


def _packed_weight(
    checkpoint: Checkpoint, adapter: Adapter, name: str, scheme: Scheme, dtype: torch.dtype, device: str
) -> PackedWeight:
    module = adapter.source_name(name).removesuffix(".weight")
    words, scale, shape = (checkpoint.read(module + suffix) for suffix in (PACKED, SCALE, SHAPE))
    order = adapter.row_order(name)
    if order is not None:
        words, scale = words[order], scale if scale.numel() == 1 else scale[order]
    return repack(words.to(device), scale.to(device), scheme.bits, int(shape[1]), dtype)


def _install(model: DiffTransformer, name: str, weight: PackedWeight) -> dict[str, Tensor]:
    """Put a packed layer where a model has a Linear; its buffers by full name."""
    layer = QuantizedLinear(weight, cast(nn.Linear, model.get_submodule(name)).bias)
    model.set_submodule(name, layer)
    return {f"{name}.{part}": buffer for part, buffer in layer.named_buffers()}


def _parameter(
    checkpoint: Checkpoint, adapter: Adapter, name: str, packed: dict[str, Scheme], schemes: dict[str, Scheme]
) -> Tensor:
    source = adapter.source_name(name)
    module = source.removesuffix(".weight")
    if module in packed:
        words, scale, shape = (checkpoint.read(module + suffix) for suffix in (PACKED, SCALE, SHAPE))
        weight = decode(words, scale, shape, packed[module])
    else:
        weight = checkpoint.read(source)
        check_finite(weight, source)
    if module in schemes:
        scale = weight_scale(weight, schemes[module])
        weight = decode_codes(codes(weight, scale, schemes[module]), scale, schemes[module])
    order = adapter.row_order(name)
    return weight if order is None else weight[order]
