"""Plans how to start vLLM's server for a folder: model, dtype, context, cache, and what it does not support."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from diffquant.checkpoints.compressed_config import has_input_schemes, has_kv_cache_scheme, read_schemes
from diffquant.checkpoints.compressed_tensors import SCALE
from diffquant.checkpoints.dequantized import DequantizedCheckpoint
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.reader import Checkpoint, read_stored_recipe
from diffquant.errors import CheckpointError, UnknownModelTypeError, UsageError
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.architecture import Architecture, TransformerArchitecture
from diffquant.model.blocks import CachedShapes
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.quantization.engine_folder import (
    config_for_engines,
    find_modelling_file,
    require_vllm_rope,
    require_vllm_support,
)
from diffquant.quantization.foreign_code import REDIRECTS, check_no_foreign_code
from diffquant.recipe.numbers.formats.integer import INT_QUANTIZED, PACK_QUANTIZED
from diffquant.serving.cache import AUTO, RECIPE, choose_cache, is_fp8, override_cache_scheme
from diffquant.serving.vllm import TESTED, check_installed, find_untested_vllm
from diffquant.support.names import first_few, option_name

ITEMSIZES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# Extra tokens reserved per request: vLLM allocates its cache in blocks, of which a request leaves two partly empty.
_BLOCKS = 256
# Bytes of an element of a state, which is float32.
_STATE = 4
# Largest number of requests of full length for which the cache has space.
_REQUESTS = 16
# Bytes for vLLM itself and the activations of a batch, besides weights and cache.
_APART = 2 << 30


def plan_capacity(
    memory: int, checkpoint: Checkpoint, adapter: Adapter, itemsize: int, dtype: str, context: int | None
) -> tuple[int, int]:
    """Return how many tokens a request may have, and how many bytes the KV cache of all requests takes.

    Both are chosen so that the weights and the cache fit into memory.

    Args:
        memory: free bytes.
        dtype: name of the dtype of the weights while served.
        itemsize: bytes of an element of the cached keys and values.
        context: tokens per request; by default as many as the model supports and fit into memory.

    Raises:
        UsageError: not even one request with `context` tokens fits, or the model supports fewer positions.
    """
    architecture = adapter.architecture
    a_token, a_request = _cache_bytes(architecture, itemsize)
    free = memory - _APART - _weight_bytes(checkpoint, adapter, dtype)
    fits = max(0, (free - a_request) // a_token)
    known = architecture.max_position_embeddings
    if context is not None and context > known:
        raise UsageError(f"{option_name('context', context)} exceeds the model's {known} positions")
    wanted = context or min(known, fits)
    if not 0 < wanted <= fits:
        raise UsageError(
            f"the cache of {wanted or 'a few'} tokens takes {(a_token * wanted + a_request) / 1e9:.1f} GB, but after "
            f"the weights {max(0, free) / 1e9:.1f} GB of memory are free: use {option_name('context', fits)}"
        )
    return wanted, min(free, _REQUESTS * (wanted * a_token + a_request))


def _cache_bytes(architecture: Architecture, itemsize: int) -> tuple[int, int]:
    """Return the bytes that a token takes in the cache, and those of a request of any length."""
    spec = architecture.diff_spec
    # A cached head holds the keys of both maps. Values are cut into heads of that width, each stored with the keys.
    width = spec.key_heads // spec.kv_pairs * spec.head_dim
    heads = 2 * spec.kv_pairs * ceil(spec.value_dim / width) * width * itemsize
    a_token = a_request = 0
    for blocks in architecture.layers:
        for stored in (block.cached_shapes for block in blocks.values()):
            if isinstance(stored, CachedShapes):
                is_latent = stored.is_latent and stored.window is None
                each = (stored.keys[1] + stored.values[1]) * itemsize if is_latent else heads
                a_token += 0 if stored.window else each
                a_request += (_BLOCKS + (stored.window or 0)) * each
            elif stored is not None:
                a_request += sum(prod(shape) for shape in stored) * _STATE
    return a_token, a_request


def _weight_bytes(checkpoint: Checkpoint, adapter: Adapter, dtype: str) -> int:
    """Return the bytes of the weights as served: packed if all have 4 bits and vLLM can use them, else unpacked."""
    groups = checkpoint.config.get("quantization_config", {}).get("config_groups", {})
    widths = {group["weights"]["num_bits"] for group in groups.values()}
    if widths == {4} and dtype != "float32" and _is_compiled(adapter):
        return sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return sum(prod(shape) for shape in adapter.source_shapes().values()) * ITEMSIZES[dtype]


# Hides from vLLM how weights are packed that `ServedDecoder` unpacks, as vLLM does not know the layout.
WITHOUT_PACKING = {"quantization_config": None}
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Implementation = Literal["plugin", "folder"]


@dataclass(frozen=True)
class ServerPlan:
    """A server to start.

    Attributes:
        command: command line of vLLM's OpenAI server.
        environment: environment variables that the server needs in addition to this process's.
        url: URL of its API.
        name: name of the model in requests.
        cache: vLLM's name of the cache's format.
        notes: sentences about what was not tested, and about results that differ from diffquant's.
    """

    command: list[str]
    environment: dict[str, str]
    url: str
    name: str
    cache: str
    notes: list[str]

    @property
    def curl(self) -> str:
        """A curl command that requests a few tokens from the server."""
        asked = json.dumps({"model": self.name, "prompt": "The capital of France is", "max_tokens": 16})
        return f"curl {self.url}/completions -H 'Content-Type: application/json' -d {quote(asked)}"


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
        UsageError: a request with `context` tokens does not fit into memory, head pairs would be split between devices,
            or vLLM has no such dtype or cache.
        CheckpointError: config.json redirects vLLM to another model, or the folder contains or names code that is not
            diffquant's and would run.
    """
    check_installed(implementation)
    checkpoint = open_checkpoint(model)
    if not checkpoint.path.is_dir():
        raise UsageError(f"{model} is not a folder, but vLLM serves only folders: make one with `diffquant quantize`")
    config, adapter = checkpoint.config, _adapter(checkpoint)
    if isinstance(checkpoint, DequantizedCheckpoint) and (_is_compiled(adapter) or checkpoint.is_compressed_tensors):
        raise UsageError(
            f"{model} holds weights quantized to {checkpoint.earlier_format}: make a 16-bit folder for the server "
            f"first, "
            f"diffquant quantize {quote(str(model))} -o FOLDER --weights 16"
        )
    _check_format(checkpoint)
    dtype = dtype or _dtype(config)
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
    elif cache == AUTO and has_kv_cache_scheme(config):
        command += ["--hf-overrides", json.dumps(override_cache_scheme(config))]
    if adapter is not None and ranks > 1:
        check_ranks(config, adapter, ranks, implementation)
    notes = _notes(cache, memory is None) + _activation_notes(config, memory is not None)
    if adapter is not None and implementation == "plugin":
        _check_joined(checkpoint, adapter)
        if isinstance(adapter.architecture, TransformerArchitecture):
            notes += _rope_notes(adapter.architecture, context)
    if memory is None or adapter is None:
        command += ["--max-model-len", str(context or "auto")]
    else:
        itemsize = 1 if is_fp8(cache) else ITEMSIZES[dtype]
        length, nbytes = plan_capacity(memory, checkpoint, adapter, itemsize, dtype, context)
        command += ["--max-model-len", str(length), "--kv-cache-memory-bytes", str(nbytes // ranks)]
    if memory is not None or not _is_compiled(adapter):
        # Compiling takes minutes on a CPU.
        command.append("--enforce-eager")
    if memory is not None and has_latents:
        # On a CPU vLLM reads each prompt at once where latents are cached, and its kernel for AMX has bfloat16 only.
        command += ["--attention-backend", "CPU_MLA", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", command[command.index("--max-model-len") + 1]]
    if implementation == "folder":
        if not _is_compiled(adapter):
            raise UsageError(
                f"vLLM runs {config['model_type']} only by the plugin: leave out "
                f"{option_name('implementation', 'folder')}"
            )
        check_no_foreign_code(checkpoint.path, config, adapter)
        command += ["--model-impl", "transformers", "--trust-remote-code"]
    shown = f"[{host}]" if ":" in host else host
    return ServerPlan(command, _environment(implementation), f"http://{shown}:{port}/v1", name, cache, notes)


def check_ranks(config: Mapping[str, Any], adapter: Adapter, ranks: int, implementation: Implementation) -> None:
    """Check that a DIFF model can be divided among devices for tensor parallelism.

    Args:
        ranks: number of devices.

    Raises:
        UsageError: head pairs would be split between devices, the plugin serves the model on one device alone, or the
            modelling file has no plan for tensor parallelism.
    """
    if not _is_compiled(adapter):
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


def _is_compiled(adapter: Adapter | None) -> bool:
    """Return whether vLLM can compile a model and divide it among ranks, which diffquant's own decoders cannot be."""
    return adapter is None or isinstance(adapter.architecture, TransformerArchitecture)


def _check_format(checkpoint: Checkpoint) -> None:
    """Check that engines read this config.json, and that packed weights are integers in compressed-tensors' layout.

    Raises:
        CheckpointError: it redirects them to another configuration or model.
        UsageError: the weights are floats, or in a layout of diffquant's own.
    """
    if leading := [key for key in REDIRECTS if key in checkpoint.config]:
        raise CheckpointError(
            f"{', '.join(leading)} in {checkpoint.path}'s config.json leads vLLM to another configuration or model: "
            "remove it"
        )
    layout = (checkpoint.config.get("quantization_config") or {}).get("format", PACK_QUANTIZED)
    if layout not in (PACK_QUANTIZED, INT_QUANTIZED):
        raise UsageError(
            f"{checkpoint.path} has weights in the layout {layout}, which is not supported for serving yet; serve "
            f"a folder with integers of 2 to 8 bits, or run it with `diffquant generate`"
        )


def _rope_notes(architecture: TransformerArchitecture, context: int | None) -> list[str]:
    """Check that vLLM supports a model's rotary embedding; return a note if its angles differ for short texts.

    Raises:
        UsageError: it does not.
    """
    rope, known = architecture.rope_parameters, architecture.max_position_embeddings
    require_vllm_rope(rope, architecture.diff_spec.rope)
    trained = rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else known
    if trained >= (context or known):
        return []
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


def _dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a folder is served in: the checkpoint's, or bfloat16 if weights are packed."""
    stated = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if "quantization_config" in config or stated not in ITEMSIZES else str(stated)


def _environment(implementation: Implementation) -> dict[str, str]:
    """Return the server's environment variables: no telemetry or download, no thread binding, the plugin or none."""
    chosen = os.environ.get("VLLM_PLUGINS")
    # `python -m` imports from the current folder first, which may be the model's.
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if implementation == "folder":
        environment["VLLM_PLUGINS"] = "none"
    elif chosen is not None and "diffquant" not in chosen.split(","):
        environment["VLLM_PLUGINS"] = f"{chosen},diffquant"
    return environment


def _activation_notes(config: Mapping[str, Any], on_cpu: bool) -> list[str]:
    """Return what vLLM computes of a folder's rounded activations, where it is not what diffquant computes."""
    if not has_input_schemes(config):
        return []
    if config["quantization_config"]["format"] == INT_QUANTIZED:
        return ["vLLM rounds activations with scales of absmax / 127, diffquant and transformers with absmax / 127.5"]
    why = "activations stay at 16 bits in bfloat16, where vLLM's own kernel for 4-bit weights runs"
    advice = f"to round them as in the recipe, use {option_name('dtype', 'float32')}"
    return [f"on a CPU {why}; {advice}"] if on_cpu else []


def _notes(cache: str, has_gpu: bool) -> list[str]:
    notes = []
    if is_fp8(cache) and not has_gpu:
        what = f"on a CPU vLLM truncates K and V to {cache}, where diffquant rounds to the nearest level"
        notes.append(f"{what}: errors are twice as large")
    if version := find_untested_vllm():
        notes.append(f"the plugin was tested with vLLM {', '.join(TESTED)}, but {version} is installed")
    return notes
