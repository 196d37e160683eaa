"""Makes a folder that inference engines can open: completes config.json and adds the modelling file."""

import hashlib
import json
import re
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

# Files that run a model in transformers without diffquant, with the beginning of their classes' names.
MODELLING_FILES: Mapping[str, str] = {
    "modeling_diffquant.py": "Diff",
    "modeling_sambay.py": "SambaY",
    "modeling_motif3.py": "Motif3",
}
_CLASSES = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
_MODEL_TYPE = re.compile("^MODEL_TYPE = .*$", re.MULTILINE)
_OUTPUT = ".self_attn.o_proj."
# A value of these in config.json takes precedence, since users may change it; the weights determine the other settings.
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def make_auto_map(file: str) -> dict[str, str]:
    """Return the `auto_map` of config.json that makes transformers' auto classes use a modelling file."""
    classes = f"{file.removesuffix('.py')}.{MODELLING_FILES[file]}"
    return {auto: classes + name for auto, name in _CLASSES.items()}


def make_modelling_text(file: str, model_type: str) -> str:
    """Return a modelling file's text with a model_type, which transformers requires as an attribute of its class."""
    return _MODEL_TYPE.sub(lambda _: f"MODEL_TYPE = {json.dumps(model_type)}", _source(file), count=1)


def find_modelling_file(config: Mapping[str, Any], adapter: Adapter | None) -> str:
    """Return the name of the modelling file that can run a folder's model; "" if there is none, or for a Llama.

    Modelling files have the parameter names of diffquant's models, except that of the output projection.

    Args:
        config: content of config.json.
        adapter: adapter of the folder's format, or None if diffquant cannot run the architecture.
    """
    if adapter is None or config["model_type"] == "llama" or not adapter.renames.keys() <= {_OUTPUT}:
        return ""
    # Not inherited: a subclass has other layers.
    file: str = vars(type(adapter.architecture)).get("modelling_file", "")
    return file


def can_engines_run(adapter: Adapter) -> bool:
    """Return whether engines can run a folder's model with their own attention: a Llama, or a DIFF Transformer."""
    return type(adapter.architecture) is TransformerArchitecture and adapter.renames.keys() <= {_OUTPUT}


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

    Llamas and DiffTransformers get `rope_theta`, and Llamas `architectures`. A model that a modelling file can run
    gets `architectures`, `auto_map` and all settings with their defaults filled in: a DiffTransformer under
    `diff_model`, other models under the settings' own names. Other models get nothing.
    """
    architecture, written = adapter.architecture, dict(config)
    if type(architecture) is TransformerArchitecture:
        # mlx-lm reads only this key, and silently uses 10000 if it is missing.
        written = {"rope_theta": architecture.rope_parameters["rope_theta"]} | written
        if config["model_type"] == "llama":
            return {"architectures": ["LlamaForCausalLM"]} | written
    file = find_modelling_file(config, adapter)
    if not file:
        return written
    stated = {name: value for name, value in architecture.settings.items() if name not in _TOKENS or name not in config}
    if isinstance(architecture, TransformerArchitecture):
        output = adapter.source_name(_OUTPUT).split(".")[2]
        attention = architecture.diff_spec.to_dict() | {"kv_repeats": adapter.kv_repeats, "output": output}
        stated = {"diff_model": stated | {"attention": attention}}
    auto_map = make_auto_map(file)
    return written | stated | {"architectures": [auto_map["AutoModelForCausalLM"].split(".")[1]], "auto_map": auto_map}


def write_modelling_file(folder: Path, config: Mapping[str, Any], adapter: Adapter | None) -> dict[str, str]:
    """Write the modelling file into an output folder, in place of the source's code files.

    Args:
        adapter: adapter of the folder's format, or None if diffquant cannot run the architecture.

    Returns:
        SHA-256 of each code file written, by file name. If no modelling file can run the model, none is written, and
        those of the source are deleted.

    Raises:
        CheckpointError: no modelling file can run the model, and the source has another file with the name of one.
    """
    file = find_modelling_file(config, adapter)
    if not file:
        for path in (folder / name for name in MODELLING_FILES if (folder / name).exists()):
            # Other versions of ours begin with the same two lines.
            if path.read_bytes().splitlines()[:2] != _source(path.name).encode().splitlines()[:2]:
                raise CheckpointError(f"the source has {path.name}, a name that diffquant needs: rename that file")
            path.unlink()
        return {}
    remove_code_files(folder)
    text = make_modelling_text(file, config["model_type"])
    write_atomically(folder / file, text)
    return {file: hashlib.sha256(text.encode()).hexdigest()}


def remove_code_files(folder: Path) -> list[str]:
    """Delete all .py files of an output folder, including diffquant's modelling file if there is one.

    Returns:
        Names of the deleted files except the modelling file, which is not code of the source.
    """
    files = sorted(folder.glob("*.py"))
    for file in files:
        file.unlink()
    return [file.name for file in files if file.name not in MODELLING_FILES]


def describe_ignored_schemes(config: Mapping[str, Any]) -> str:
    """List, as text, the recipe's schemes of cache, logits and operands that other engines ignore; "" if none.

    Args:
        config: content of config.json.
    """
    recipe = (config.get("diffquant_config") or {}).get("recipe", {})
    targets = ("logits", "qk", "p", "pv") if has_own_kv_cache_scheme(config) else ("k", "v", "logits", "qk", "p", "pv")
    asked = {name: recipe[name] for name in targets if recipe.get(name, "16") != "16"}
    return ", ".join(f"{name} {scheme}" for name, scheme in asked.items())


@cache
def _source(file: str) -> str:
    return (Path(__file__).parent / file).read_text(encoding="utf-8")
