"""Plans how to start vLLM's server for a folder: model, dtype, context, cache, and what it does not support."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any, Literal, cast

from diffquant.errors import CheckpointError, MissingDependencyError, UnknownModelTypeError, UsageError
from diffquant.formats.compressed_config import read_schemes
from diffquant.formats.dequantized import DequantizedCheckpoint
from diffquant.formats.opening import open_checkpoint
from diffquant.formats.reader import Checkpoint
from diffquant.model.adapters import NOT_RUN, Adapter, adapter_for
from diffquant.model.transformer import TransformerArchitecture
from diffquant.numbers.formats.integer import PACK_QUANTIZED
from diffquant.serve.folder import (
    beyond_weights,
    carries_modelling_file,
    config_for_engines,
    require_angles,
    require_served,
)
from diffquant.serve.foreign_code import REDIRECTS, check_code
from diffquant.serve.room import ITEMSIZES, room_in
from diffquant.serve.vllm.versions import OLDEST, TESTED, cuda_builds, installed_vllm, outdated_vllm
from diffquant.support.installation import install_command
from diffquant.support.listing import first_few
from diffquant.support.spelling import spelled

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
Implementation = Literal["plugin", "folder"]


@dataclass(frozen=True)
class ServerPlan:
    """A server to start.

    Attributes:
        command: command line of vLLM's OpenAI server.
        environment: variables that it needs beside this process's.
        url: URL of its API.
        name: name that requests call the model by.
        notes: sentences about what of the folder it does not do, and what was not tested.
    """

    command: list[str]
    environment: dict[str, str]
    url: str
    name: str
    notes: list[str]

    @property
    def curl(self) -> str:
        """A command line that asks it for a few tokens."""
        asked = json.dumps({"model": self.name, "prompt": "The capital of France is", "max_tokens": 16})
        return f"curl {self.url}/completions -H 'Content-Type: application/json' -d {quote(asked)}"


def plan_server(
    model: Path,
    *,
    host: str,
    port: int,
    context: int | None,
    cache: Literal["16", "fp8"],
    dtype: str | None,
    ranks: int,
    implementation: Implementation,
    memory: int | None,
) -> ServerPlan:
    """Look at a folder and say how to serve it; nothing is started.

    Args:
        memory: free bytes of main memory; None on a machine with a GPU, whose memory vLLM measures.

    Raises:
        MissingDependencyError: vLLM is not installed, or does not find the plugin.
        UnknownModelTypeError: vLLM has no layers for the model.
        UsageError: a request of the context does not fit into the memory, the ranks would part pairs, or vLLM has no
            such dtype.
        CheckpointError: the folder leads vLLM to another model, or holds or names code that is not diffquant's, where
            that would run.
    """
    check_installed(implementation)
    checkpoint = open_checkpoint(model)
    if not checkpoint.path.is_dir():
        raise UsageError(f"{model} is not a folder, and vLLM serves folders: make one with `diffquant quantize`")
    if isinstance(checkpoint, DequantizedCheckpoint):
        raise UsageError(
            f"{model} holds weights rounded to {checkpoint.rounded_as}: make a folder of 16 bits for the server first, "
            f"diffquant quantize {quote(str(model))} -o FOLDER --weights 16"
        )
    config, adapter = checkpoint.config, _adapter(checkpoint)
    _check_format(checkpoint)
    dtype = dtype or _dtype(config)
    if dtype not in ITEMSIZES:
        raise UsageError(f"dtype {dtype!r} is none of {', '.join(ITEMSIZES)}")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint.path)]
    # The folder of a model of the hub is named after a commit.
    name = checkpoint.path.resolve().name if model.exists() else str(model).partition("@")[0]
    # Left to itself, vLLM would choose a Mistral's params.json, or pickled weights, where such files lie beside ours.
    command += ["--config-format", "hf", "--tokenizer-mode", "hf", "--load-format", "safetensors"]
    command += ["--served-model-name", name, "--host", host, "--port", str(port), "--dtype", dtype]
    command += ["--tensor-parallel-size", str(ranks)]
    if cache != "16":
        command += ["--kv-cache-dtype", cache]
    if adapter is not None and ranks > 1:
        check_ranks(config, adapter, ranks, implementation)
    notes = _notes(config, cache)
    if adapter is not None and implementation == "plugin":
        _check_joined(checkpoint, adapter)
        notes += _check_angles(cast(TransformerArchitecture, adapter.architecture), context)
    if memory is None or adapter is None:
        command += ["--max-model-len", str(context or "auto")]
    else:
        room = room_in(memory, checkpoint, adapter, 1 if cache == "fp8" else ITEMSIZES[dtype], dtype, context)
        command += ["--max-model-len", str(room.context), "--kv-cache-memory-bytes", str(room.cache // ranks)]
    if memory is not None:
        # Compiling takes minutes on a processor.
        command.append("--enforce-eager")
    if implementation == "folder":
        check_code(checkpoint.path, config, adapter)
        command += ["--model-impl", "transformers", "--trust-remote-code"]
    shown = f"[{host}]" if ":" in host else host
    return ServerPlan(command, _environment(implementation), f"http://{shown}:{port}/v1", name, notes)


def check_installed(implementation: Implementation) -> None:
    """Check that vLLM is installed, safe and can be imported, and that it finds the plugin where that is to serve.

    Raises:
        MissingDependencyError: it is not, is too old, cannot, or does not.
    """
    how = (
        f"{install_command('vllm')} --extra-index-url {_CPU_INDEX} for a processor, and pip install "
        f"'vllm=={TESTED[-1]}.*' for a GPU"
    )
    if installed_vllm() is None:
        raise MissingDependencyError(f"vLLM is not installed: {how}")
    if outdated := outdated_vllm():
        raise MissingDependencyError(
            f"{outdated} is installed, and releases before {OLDEST} run code that a model's folder names, unasked "
            f"(CVE-2026-27893): {how}"
        )
    if packages := " ".join(cuda_builds()):
        raise MissingDependencyError(
            f"vLLM's import fails beside builds for CUDA of {packages}: pip uninstall {packages}, or take them from "
            f"{_CPU_INDEX}"
        )
    if implementation == "plugin" and not metadata.entry_points(group="vllm.general_plugins", name="diffquant"):
        raise MissingDependencyError(f"vLLM does not find diffquant's plugin: {install_command()} makes it known")


def check_processor(folder: Path, cache: Literal["16", "fp8"], implementation: Implementation) -> None:
    """Check that this processor has the instructions that vLLM's kernels for low bits are built for, AVX-512 on x86.

    Raises:
        UsageError: it has not, and an fp8 cache is asked for, or packed weights without the plugin, which unpacks them.
    """
    import torch

    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() == "AVX512":
        return
    if cache == "fp8":
        raise UsageError(f"{spelled('cache', 'fp8')} needs AVX-512 on a processor, which this one does not have")
    if implementation == "folder" and "quantization_config" in open_checkpoint(folder).config:
        raise UsageError(
            f"{folder} has packed weights, for which vLLM alone needs AVX-512: leave out "
            f"{spelled('implementation', 'folder')}, as the plugin unpacks them here"
        )


def check_ranks(config: Mapping[str, Any], adapter: Adapter, ranks: int, implementation: Implementation) -> None:
    """Check that a DIFF model can be shared by ranks.

    Raises:
        UsageError: they would part pairs, or the modelling file has no plan for them.
    """
    if not carries_modelling_file(config, adapter):
        return
    # They import transformers' models, which a plan for one rank does without.
    from diffquant.serve.modeling_diffquant import DiffConfig
    from diffquant.serve.vllm.ranks import heads_of_rank

    built = config_for_engines(config, adapter)["diff_model"]
    heads_of_rank(built["attention"], ranks)
    if implementation == "folder" and DiffConfig(diff_model=built).base_model_tp_plan is None:
        raise UsageError(
            f"{config['model_type']} needs the plugin on {ranks} ranks: leave out {spelled('implementation', 'folder')}"
        )


def _check_format(checkpoint: Checkpoint) -> None:
    """Check that engines read this config.json, and that packed weights are integers in compressed-tensors' layout.

    Raises:
        CheckpointError: it leads them to another configuration or model.
        UsageError: the weights are floats, or lie in a layout of diffquant's own.
    """
    if leading := [key for key in REDIRECTS if key in checkpoint.config]:
        raise CheckpointError(
            f"{', '.join(leading)} in {checkpoint.path}'s config.json leads vLLM to another configuration or model: "
            "remove it"
        )
    layout = (checkpoint.config.get("quantization_config") or {}).get("format", PACK_QUANTIZED)
    if layout != PACK_QUANTIZED:
        raise UsageError(
            f"{checkpoint.path} has weights in the layout {layout}, which is not served yet; serve one with integers "
            "of 2 to 8 bits, or run it by `diffquant generate`"
        )


def _check_angles(architecture: TransformerArchitecture, context: int | None) -> list[str]:
    """Check that vLLM has a model's angles; a sentence about those that it takes for short texts, where they differ.

    Raises:
        UsageError: it does not have them.
    """
    rope, known = architecture.rope_parameters, architecture.max_position_embeddings
    require_angles(rope, architecture.diff_spec.rope)
    trained = rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else known
    if trained >= (context or known):
        return []
    return [
        f"with a context beyond {trained} tokens vLLM has longrope's long factors for short texts, too, and diffquant "
        f"the short ones: {spelled('context', trained)} keeps these"
    ]


def _check_joined(checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Check that the weights that vLLM joins into one layer are packed alike.

    Raises:
        UsageError: some are not; the first are named.
    """
    names = [name.removesuffix(".weight") for name in adapter.source_shapes()]
    packed = [name for name in names if f"{name}.weight_packed" in checkpoint.tensors]
    schemes = read_schemes(checkpoint.config, packed)
    layers = [(name.removesuffix(of[0]), of) for name in names for of in _JOINED if name.endswith(of[0])]
    problems = [
        stem + ", ".join(f"{part} {schemes.get(stem + part, 16)}" for part in of)
        for stem, of in layers
        if len({schemes.get(stem + part) for part in of}) > 1
    ]
    if problems:
        raise UsageError(
            f"vLLM joins q, k and v of a layer, and gate and up, and {checkpoint.path} has them packed differently: "
            f"{first_few(problems)}; quantize with one scheme for each, or run it by `diffquant generate`"
        )


def _adapter(checkpoint: Checkpoint) -> Adapter | None:
    """Adapter of a folder's format, or None for a model that vLLM may know although diffquant does not run it.

    Raises:
        UnknownModelTypeError: vLLM has no layers for the model, or the format is known as one that is not run.
    """
    try:
        adapter = adapter_for(checkpoint.config)
    except UnknownModelTypeError as error:
        if str(checkpoint.config.get("model_type")).lower() in NOT_RUN:
            raise UnknownModelTypeError(
                f"{checkpoint.path} is not served by the plugin: {error}; a vLLM of its makers may serve it by itself"
            ) from error
        return None
    require_served(checkpoint.config, adapter)
    return adapter


def _dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a folder is served in: the checkpoint's, or bfloat16 where weights are packed."""
    stated = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if "quantization_config" in config or stated not in ITEMSIZES else str(stated)


def _environment(implementation: Implementation) -> dict[str, str]:
    """Variables of the server: nothing sent or fetched, threads left to the system, and our plugin or none."""
    chosen = os.environ.get("VLLM_PLUGINS")
    # `python -m` imports from the current folder first, which may be the model's.
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if implementation == "folder":
        environment["VLLM_PLUGINS"] = "none"
    elif chosen is not None and "diffquant" not in chosen.split(","):
        environment["VLLM_PLUGINS"] = f"{chosen},diffquant"
    return environment


def _notes(config: Mapping[str, Any], cache: str) -> list[str]:
    version, notes = installed_vllm() or "", []
    if asked := beyond_weights(config.get("diffquant_config")):
        stored = "in vLLM's fp8" if cache == "fp8" else "with 16 bits"
        notes.append(f"{asked} of the recipe are not done by vLLM: K and V are stored {stored}, and logits are exact")
    if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        notes.append(f"the plugin was tested with vLLM {', '.join(TESTED)}, and this is {version}")
    return notes
