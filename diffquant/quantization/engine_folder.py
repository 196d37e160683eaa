"""Makes a folder that inference engines can open: completes config.json and adds the modelling file."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from diffquant.checkpoints.compressed_config import has_own_kv_cache_scheme
from diffquant.errors import CheckpointError, UnknownModelTypeError, UsageError
from diffquant.model.adapters import Adapter
from diffquant.model.architecture import TransformerArchitecture
from diffquant.support.files import write_atomically
from diffquant.support.names import option_name

MODELLING_FILE = "modeling_diffquant.py"
_MODULE = MODELLING_FILE.removesuffix(".py")
AUTO_MAP = {
    "AutoConfig": f"{_MODULE}.DiffConfig",
    "AutoModel": f"{_MODULE}.DiffModel",
    "AutoModelForCausalLM": f"{_MODULE}.DiffForCausalLM",
}
_MODEL_TYPE = 'MODEL_TYPE = "diff_transformer"'
_OUTPUT = ".self_attn.o_proj."
# A value of these in config.json takes precedence, since users may change it; the weights determine the other settings.
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def make_modelling_text(model_type: str) -> str:
    """Return the modelling file's text with a model_type, which transformers requires as an attribute of its class."""
    return _source().replace(_MODEL_TYPE, f"MODEL_TYPE = {json.dumps(model_type)}")


def can_use_modelling_file(config: Mapping[str, Any], adapter: Adapter) -> bool:
    """Return whether the modelling file can run a folder's model.

    It can run all models that `DiffTransformer` runs, except Llamas, if the folder's parameters have the names that
    `DiffTransformer` gives them. Only the output projection may have another name.
    """
    is_ours = type(adapter.architecture) is TransformerArchitecture and config["model_type"] != "llama"
    return is_ours and adapter.renames.keys() <= {_OUTPUT}


def can_engines_run(config: Mapping[str, Any], adapter: Adapter) -> bool:
    """Return whether engines can run a folder's model: a Llama, or a model that the modelling file can run."""
    is_llama = type(adapter.architecture) is TransformerArchitecture and config["model_type"] == "llama"
    return is_llama or can_use_modelling_file(config, adapter)


def require_vllm_support(config: Mapping[str, Any], adapter: Adapter) -> None:
    """Check that the vLLM plugin can serve a folder's model.

    The plugin implements the layers of DIFF models and plain Transformers, of Phi-4-mini-flash and of Motif-3.

    Raises:
        UnknownModelTypeError: the model has other layers.
    """
    if not adapter.architecture.served:
        kinds = ", ".join(dict.fromkeys(adapter.architecture.layer_kinds))
        raise UnknownModelTypeError(
            f"vLLM cannot serve this {config['model_type']}: the plugin does not support layers of {kinds}; use "
            "`diffquant generate`"
        )


def require_vllm_rope(rope: Mapping[str, Any], style: str) -> None:
    """Check that vLLM implements a model's rotary embeddings.

    Args:
        rope: rope parameters as standardized by transformers.
        style: "half" or "interleaved": which channels are rotated as a pair, as in `DiffSpec`.

    Raises:
        UsageError: vLLM does not implement them.
    """
    lacking = {
        "longrope with interleaved channels": rope["rope_type"] == "longrope" and style == "interleaved",
        "proportional RoPE with a factor": rope["rope_type"] == "proportional" and rope.get("factor") not in (None, 1),
    }
    for what, is_asked in lacking.items():
        if is_asked:
            raise UsageError(f"vLLM does not compute {what}; {option_name('implementation', 'folder')} does")


def config_for_engines(config: Mapping[str, Any], adapter: Adapter) -> dict[str, Any]:
    """Return the content of config.json with the entries that inference engines need.

    A Llama gets `rope_theta` and `architectures`. A model that the modelling file can run gets, in addition, `auto_map`
    and the modelling file's settings under `diff_model`. Of the others, models that `DiffTransformer` runs get only
    `rope_theta`, and the rest get nothing.
    """
    architecture = adapter.architecture
    if type(architecture) is not TransformerArchitecture:
        return dict(config)
    # mlx-lm reads only this key, and silently uses 10000 if it is missing.
    written = {"rope_theta": architecture.rope_parameters["rope_theta"]} | dict(config)
    if config["model_type"] == "llama":
        return {"architectures": ["LlamaForCausalLM"]} | written
    if not can_use_modelling_file(config, adapter):
        return written
    return written | {
        "architectures": ["DiffForCausalLM"],
        "auto_map": AUTO_MAP,
        "diff_model": _resolve(architecture, adapter, config),
    }


def write_modelling_file(folder: Path, config: Mapping[str, Any], adapter: Adapter | None) -> dict[str, str]:
    """Write the modelling file into an output folder, in place of the source's code files.

    Args:
        adapter: adapter of the folder's format, or None if diffquant cannot run the architecture.

    Returns:
        SHA-256 of each code file written, by file name.

    Raises:
        CheckpointError: the modelling file cannot run the model, and the source has a file with its name.
    """
    place = folder / MODELLING_FILE
    if adapter is None or not can_use_modelling_file(config, adapter):
        if place.exists():
            raise CheckpointError(f"the source has {MODELLING_FILE}, a name that diffquant needs: rename that file")
        return {}
    remove_code_files(folder)
    text = make_modelling_text(config["model_type"])
    write_atomically(place, text)
    return {MODELLING_FILE: hashlib.sha256(text.encode()).hexdigest()}


def remove_code_files(folder: Path) -> list[str]:
    """Delete all .py files of an output folder, including diffquant's modelling file if there is one.

    Returns:
        Names of the deleted files except the modelling file, which is not code of the source.
    """
    files = sorted(folder.glob("*.py"))
    for file in files:
        file.unlink()
    return [file.name for file in files if file.name != MODELLING_FILE]


def describe_ignored_schemes(config: Mapping[str, Any]) -> str:
    """List, as text, the recipe's schemes of cache, logits and operands that other engines ignore; "" if none.

    Args:
        config: content of config.json.
    """
    recipe = (config.get("diffquant_config") or {}).get("recipe", {})
    targets = ("logits", "qk", "p", "pv") if has_own_kv_cache_scheme(config) else ("k", "v", "logits", "qk", "p", "pv")
    asked = {name: recipe[name] for name in targets if recipe.get(name, "16") != "16"}
    return ", ".join(f"{name} {scheme}" for name, scheme in asked.items())


def _resolve(architecture: TransformerArchitecture, adapter: Adapter, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes and settings under Llama's names with defaults filled in, and the attention's description."""
    stated = {name: value for name, value in architecture.settings.items() if name not in _TOKENS or name not in config}
    return stated | {
        "attention": architecture.diff_spec.to_dict()
        | {"kv_repeats": adapter.kv_repeats, "output": adapter.source_name(_OUTPUT).split(".")[2]}
    }


@cache
def _source() -> str:
    return (Path(__file__).parent / MODELLING_FILE).read_text(encoding="utf-8")
