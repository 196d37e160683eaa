"""Plans how to start vLLM's server for a folder: model, dtype, context, cache, and what it does not support."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from diffquant.checkpoints.compressed_config import (
    has_input_schemes,
    has_own_kv_cache_scheme,
    has_packed_weights,
    read_schemes,
)
from diffquant.checkpoints.compressed_tensors import SCALE
from diffquant.checkpoints.dequantized import DequantizedCheckpoint
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.reader import Checkpoint, read_stored_recipe
from diffquant.errors import CheckpointError, UnknownModelTypeError, UsageError
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.architecture import TransformerArchitecture
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.quantization.engine_folder import (
    config_for_engines,
    find_modelling_file,
    require_vllm_rope,
    require_vllm_support,
)
from diffquant.quantization.foreign_code import REDIRECTS, check_no_foreign_code
from diffquant.recipe.numbers.formats.integer import INT_QUANTIZED, PACK_QUANTIZED
from diffquant.serving.cache import (
    AUTO,
    ITEMSIZES,
    RECIPE,
    can_compile_and_shard,
    choose_cache,
    is_fp8,
    override_cache_scheme,
    plan_capacity,
)
from diffquant.serving.server import Implementation, ServerPlan, server_environment
from diffquant.serving.vllm import TESTED, check_installed, find_untested_vllm
from diffquant.support.names import first_few, option_name

# Hides the packed layout from vLLM, which does not support it; `ServedDecoder` unpacks such weights.
WITHOUT_PACKING = {"quantization_config": None}
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def plan_server(
    model: Path,
    *,
    host: str,
    port: int,
    context: int | None,
    cache: str,
    dtype: str | None,
    ranks: int,
    implementation: Implementation,
    memory: int | None,
) -> ServerPlan:
    """Plan how to serve a folder, without starting anything.

    Args:
        model: folder that diffquant wrote.
        context: maximum number of tokens of a prompt and its output; by default as many as the model supports and fit
            into memory.
        cache: format of the KV cache: "recipe", "auto", or vLLM's name of a format.
        ranks: number of devices that share each layer.
        memory: free bytes of main memory, or None with a GPU, whose memory vLLM measures.

    Raises:
        MissingDependencyError: vLLM is not installed, or does not find the plugin.
        UnknownModelTypeError: vLLM has no layers for the model.
        UsageError: `model` is not a folder, its weights have a layout that is not served, a request with `context`
            tokens does not fit into memory, head pairs would be split between devices, or vLLM does not support the
            dtype or the cache format.
        CheckpointError: config.json redirects vLLM to another model, or the folder contains or names code that is not
            diffquant's and would run.
    """
    check_installed(implementation)
    checkpoint = open_checkpoint(model)
    if not checkpoint.path.is_dir():
        raise UsageError(f"{model} is not a folder, but vLLM serves only folders: make one with `diffquant quantize`")
    config, adapter = checkpoint.config, _adapter(checkpoint)
    if isinstance(checkpoint, DequantizedCheckpoint) and (
        can_compile_and_shard(adapter) or checkpoint.is_compressed_tensors
    ):
        raise UsageError(
            f"{model} holds weights quantized to {checkpoint.earlier_format}: make a 16-bit folder for the server "
            f"first, diffquant quantize {quote(str(model))} -o FOLDER --weights 16"
        )
    _check_format(checkpoint)
    longest = _longest(adapter, context)
    # The checkpoint's, or bfloat16 if weights are packed.
    stated = config.get("dtype") or config.get("torch_dtype")
    dtype = dtype or ("bfloat16" if has_packed_weights(config) or stated not in ITEMSIZES else str(stated))
    if dtype not in ITEMSIZES:
        raise UsageError(f"unknown dtype {dtype!r}; choose from {', '.join(ITEMSIZES)}")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint.path)]
    # The folder of a model of the hub is named after a commit.
    name = checkpoint.path.resolve().name if model.exists() else str(model).partition("@")[0]
    # By default, vLLM would choose Mistral's params.json or pickled weights if the folder also has such files.
    command += ["--config-format", "hf", "--tokenizer-mode", "hf", "--load-format", "safetensors"]
    command += ["--served-model-name", name, "--host", host, "--port", str(port), "--dtype", dtype]
    command += ["--tensor-parallel-size", str(ranks)]
    has_latents = adapter is not None and isinstance(adapter.architecture, Motif3Architecture)
    is_rounded = read_stored_recipe(config).quantizes_any("k", "v") if cache == RECIPE else cache != AUTO
    if has_latents and memory is not None and is_rounded:
        raise UsageError(f"vLLM on a CPU stores latents in the model's dtype: use {option_name('cache', AUTO)}")
    cache = choose_cache(config, cache, memory is None)
    command += ["--kv-cache-dtype", cache]
    if isinstance(checkpoint, DequantizedCheckpoint):
        command += ["--hf-overrides", json.dumps(WITHOUT_PACKING)]
    elif cache == AUTO and has_own_kv_cache_scheme(config):
        command += ["--hf-overrides", json.dumps(override_cache_scheme(config))]
    if adapter is not None and ranks > 1:
        check_ranks(config, adapter, ranks, implementation)
    notes = _notes(config, cache, memory is not None)
    if adapter is not None and implementation == "plugin":
        _check_joined(checkpoint, adapter)
    if adapter is not None and isinstance(adapter.architecture, TransformerArchitecture):
        notes += _rope_notes(adapter.architecture, context, implementation)
    if memory is None or adapter is None:
        command += ["--max-model-len", str(longest)]
    else:
        itemsize = 1 if is_fp8(cache) else ITEMSIZES[dtype]
        length, nbytes = plan_capacity(memory, checkpoint, adapter, itemsize, dtype, context)
        command += ["--max-model-len", str(length), "--kv-cache-memory-bytes", str(nbytes // ranks)]
    if memory is not None or not can_compile_and_shard(adapter):
        # Compiling takes minutes on a CPU.
        command.append("--enforce-eager")
    if memory is not None and has_latents:
        # On a CPU vLLM reads each prompt at once where latents are cached, and its kernel for AMX has bfloat16 only.
        command += ["--attention-backend", "CPU_MLA", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", command[command.index("--max-model-len") + 1]]
    if implementation == "folder":
        if not can_compile_and_shard(adapter):
            raise UsageError(
                f"vLLM runs {config['model_type']} only by the plugin: leave out "
                f"{option_name('implementation', 'folder')}"
            )
        check_no_foreign_code(checkpoint.path, config, adapter)
        command += ["--model-impl", "transformers", "--trust-remote-code"]
    shown = f"[{host}]" if ":" in host else host
    return ServerPlan(command, server_environment(implementation), f"http://{shown}:{port}/v1", name, cache, notes)


def check_ranks(config: Mapping[str, Any], adapter: Adapter, ranks: int, implementation: Implementation) -> None:
    """Check that a DIFF model can be divided among devices for tensor parallelism.

    Args:
        ranks: number of devices.

    Raises:
        UsageError: head pairs would be split between devices, the plugin serves the model on a single device only, or
            the plugin is not used and the folder's modelling file has no plan for tensor parallelism.
    """
    if not can_compile_and_shard(adapter):
        raise UsageError(f"{config['model_type']} is served on one rank: leave out {option_name('ranks', ranks)}")
    if not find_modelling_file(config, adapter):
        return
    # Imported here, since both import transformers' models, which other folders do not need.
    from diffquant.quantization.modeling_diffquant import DiffConfig
    from diffquant.serving.vllm.config import heads_of_rank

    built = config_for_engines(config, adapter)["diff_model"]
    heads_of_rank(built["attention"], ranks)
    if implementation == "folder" and DiffConfig(diff_model=built).base_model_tp_plan is None:
        raise UsageError(
            f"{config['model_type']} needs the plugin to run on {ranks} devices: leave out "
            f"{option_name('implementation', 'folder')}"
        )


def _check_format(checkpoint: Checkpoint) -> None:
    """Check that engines read this config.json, and that packed weights are integers in compressed-tensors' layout.

    Raises:
        CheckpointError: it redirects them to another configuration or model, or its quantization_config is no object.
        UsageError: the weights are floats, or in a layout of diffquant's own.
    """
    if leading := [key for key in REDIRECTS if key in checkpoint.config]:
        raise CheckpointError(
            f"{', '.join(leading)} in {checkpoint.path}'s config.json leads vLLM to another configuration or model: "
            "remove it"
        )
    entry = checkpoint.config.get("quantization_config") or {}
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"quantization_config in {checkpoint.path}'s config.json is {entry!r}, not an object")
    layout = entry.get("format", PACK_QUANTIZED)
    if layout not in (PACK_QUANTIZED, INT_QUANTIZED):
        raise UsageError(
            f"{checkpoint.path} has weights in the layout {layout}, which is not supported for serving yet; serve "
            f"a folder with integers of 2 to 8 bits, or run it with `diffquant generate`"
        )


def _longest(adapter: Adapter | None, context: int | None) -> int | str:
    """Return the value of `--max-model-len` with a GPU, whose memory vLLM measures for "auto".

    Raises:
        UsageError: the model has fewer than `context` positions.
    """
    if adapter is None:
        return context or "auto"
    architecture, known = adapter.architecture, adapter.architecture.max_position_embeddings
    if (context or 0) > known:
        raise UsageError(f"{option_name('context', context)} exceeds the model's {known} positions")
    # vLLM would multiply the number of positions by the factor of these angles.
    is_stretched = getattr(architecture, "rope_parameters", {}).get("rope_type") in ("dynamic", "linear")
    return context or (known if is_stretched else "auto")


def _rope_notes(
    architecture: TransformerArchitecture, context: int | None, implementation: Implementation
) -> list[str]:
    """Check that vLLM supports a model's rotary embedding; return a note if its angles differ for short texts.

    Raises:
        UsageError: it does not, or the folder's modelling file would read all requests by the angles of the longest.
    """
    rope, known = architecture.rope_parameters, architecture.max_position_embeddings
    if implementation == "plugin":
        require_vllm_rope(rope, architecture.diff_spec.rope)
    trained = rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else known
    if trained >= (context or known):
        return []
    if implementation == "folder":
        raise UsageError(
            f"with a context above {trained} tokens, the longest request would determine the longrope angles of all: "
            f"use {option_name('context', trained)}, or the plugin"
        )
    return [
        f"with a context above {trained} tokens, vLLM uses longrope's long factors even for short texts, unlike "
        f"diffquant; use {option_name('context', trained)} for short texts"
    ]


def _check_joined(checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Check that the weights that vLLM joins into one layer are packed in the same scheme.

    Raises:
        UsageError: some are not; the first are named.
    """
    names = [name.removesuffix(".weight") for name in adapter.source_shapes()]
    packed = [name for name in names if name + SCALE in checkpoint.tensors]
    schemes = read_schemes(checkpoint.config, packed)
    layers = [(name.removesuffix(of[0]), of) for name in names for of in _JOINED if name.endswith(of[0])]
    problems = [
        stem + ", ".join(f"{part} {schemes.get(stem + part, 16)}" for part in of)
        for stem, of in layers
        if len({schemes.get(stem + part) for part in of}) > 1
    ]
    if problems:
        raise UsageError(
            f"vLLM joins q, k and v of a layer, and gate and up, but {checkpoint.path} packs them differently: "
            f"{first_few(problems)}; quantize with one scheme for each, or run it with `diffquant generate`"
        )


def _adapter(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter of a folder's format, or None if only vLLM may support the model.

    Raises:
        UnknownModelTypeError: vLLM has no layers for the model.
    """
    try:
        adapter = adapter_for(checkpoint.config)
    except UnknownModelTypeError:
        return None
    require_vllm_support(checkpoint.config, adapter)
    return adapter


def _notes(config: Mapping[str, Any], cache: str, on_cpu: bool) -> list[str]:
    """Return notes on what vLLM rounds otherwise than diffquant, and on an untested version."""
    notes = []
    if is_fp8(cache) and on_cpu:
        what = f"on a CPU vLLM truncates K and V to {cache}, where diffquant rounds to the nearest level"
        notes.append(f"{what}: errors are twice as large")
    if version := find_untested_vllm():
        notes.append(f"the plugin was tested with vLLM {', '.join(TESTED)}, but {version} is installed")
    if has_input_schemes(config) and config["quantization_config"]["format"] == INT_QUANTIZED:
        notes.append(
            "vLLM rounds activations with scales of absmax / 127, diffquant and transformers with absmax / 127.5"
        )
    elif has_input_schemes(config) and on_cpu:
        why = "activations stay at 16 bits in bfloat16, where vLLM's own kernel for 4-bit weights runs"
        notes.append(f"on a CPU {why}; to round them as in the recipe, use {option_name('dtype', 'float32')}")
    return notes
