"""Makes a folder that any engine can open: config.json has what it needs, and the modelling file goes along."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError, UnknownModelTypeError, UsageError
from diffquant.model.adapters import Adapter
from diffquant.model.transformer import TransformerArchitecture
from diffquant.support.files import write_atomically
from diffquant.support.spelling import spelled

MODELLING_FILE = "modeling_diffquant.py"
_MODULE = MODELLING_FILE.removesuffix(".py")
AUTO_MAP = {
    "AutoConfig": f"{_MODULE}.DiffConfig",
    "AutoModel": f"{_MODULE}.DiffModel",
    "AutoModelForCausalLM": f"{_MODULE}.DiffForCausalLM",
}
_MODEL_TYPE = 'MODEL_TYPE = "diff_transformer"'
_OUTPUT = ".self_attn.o_proj."
# Where a config states these they may be changed there; the rest is settled by the weights.
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def modelling_file(model_type: str) -> str:
    """Text of the modelling file for folders of a model_type, which transformers wants to find in the class."""
    return _source().replace(_MODEL_TYPE, f"MODEL_TYPE = {json.dumps(model_type)}")


def carries_modelling_file(config: Mapping[str, Any], adapter: Adapter) -> bool:
    """Whether the modelling file runs a folder's model: all that `DiffTransformer` runs but Llamas, which engines know.

    It calls parameters as `DiffTransformer` does, but for the output projection.
    """
    is_ours = type(adapter.architecture) is TransformerArchitecture and config["model_type"] != "llama"
    return is_ours and adapter.renames.keys() <= {_OUTPUT}


def require_served(config: Mapping[str, Any], adapter: Adapter) -> None:
    """Check that the plugin, which has the layers of a Transformer alone, serves a folder's model.

    Raises:
        UnknownModelTypeError: it does not.
    """
    if not isinstance(adapter.architecture, TransformerArchitecture):
        kinds = ", ".join(dict.fromkeys(adapter.architecture.layer_kinds))
        raise UnknownModelTypeError(
            f"vLLM does not serve this {config['model_type']}: the plugin has no layers of {kinds}; `diffquant "
            "generate` runs it"
        )


def require_angles(rope: Mapping[str, Any], style: str) -> None:
    """Check that vLLM's rotary embeddings have a model's angles.

    Args:
        rope: rotary settings as transformers standardizes them.
        style: channels that turn together, as a `DiffSpec` has it.

    Raises:
        UsageError: they have not.
    """
    lacking = {
        "longrope for channels that are interleaved": rope["rope_type"] == "longrope" and style == "interleaved",
        "a factor of proportional angles": rope["rope_type"] == "proportional" and rope.get("factor") not in (None, 1),
    }
    for what, is_asked in lacking.items():
        if is_asked:
            raise UsageError(f"vLLM does not compute {what}; {spelled('implementation', 'folder')} does")


def config_for_engines(config: Mapping[str, Any], adapter: Adapter) -> dict[str, Any]:
    """A config.json that names its architecture, and under `diff_model` what the modelling file builds."""
    architecture = adapter.architecture
    if type(architecture) is not TransformerArchitecture:
        return dict(config)
    # mlx-lm reads this key alone, and takes 10000 without a word where it is missing.
    written = {"rope_theta": architecture.rope_parameters["rope_theta"]} | dict(config)
    if config["model_type"] == "llama":
        return {"architectures": ["LlamaForCausalLM"]} | written
    if not carries_modelling_file(config, adapter):
        return written
    return written | {
        "architectures": ["DiffForCausalLM"],
        "auto_map": AUTO_MAP,
        "diff_model": _resolved(architecture, adapter, config),
    }


def write_modelling_file(folder: Path, config: Mapping[str, Any], adapter: Adapter | None) -> dict[str, str]:
    """Put the modelling file into a folder that is being written, in place of code of the source's.

    Args:
        adapter: adapter of the folder's format, or None if diffquant does not run its architecture.

    Returns:
        SHA-256 of each file of code by its name, for the record.

    Raises:
        CheckpointError: the source has another file of that name, where ours does not replace it.
    """
    place = folder / MODELLING_FILE
    if adapter is None or not carries_modelling_file(config, adapter):
        if place.exists():
            raise CheckpointError(f"the source holds {MODELLING_FILE}, which is diffquant's name: rename that file")
        return {}
    remove_code_files(folder)
    text = modelling_file(config["model_type"])
    write_atomically(place, text)
    return {MODELLING_FILE: hashlib.sha256(text.encode()).hexdigest()}


def remove_code_files(folder: Path) -> list[str]:
    """Take Python files out of a folder that is being written; the names of those that are not the modelling file."""
    files = sorted(folder.glob("*.py"))
    for file in files:
        file.unlink()
    return [file.name for file in files if file.name != MODELLING_FILE]


def beyond_weights(diffquant_config: Mapping[str, Any] | None) -> str:
    """The recipe's settings of cache and logits, which other engines ignore; empty if there are none."""
    recipe = (diffquant_config or {}).get("recipe", {})
    asked = {name: recipe[name] for name in ("k", "v", "logits", "qk", "p", "pv") if recipe.get(name, "16") != "16"}
    return ", ".join(f"{name} {scheme}" for name, scheme in asked.items())


def _resolved(architecture: TransformerArchitecture, adapter: Adapter, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and settings with each format's defaults filled in, in Llama's words, and the attention."""
    stated = {name: value for name, value in architecture.settings.items() if name not in _TOKENS or name not in config}
    repeated = next(iter(adapter.repeated.values()), None)
    return stated | {
        "attention": architecture.diff_spec.to_dict()
        | {
            "kv_repeats": repeated.heads // repeated.source_heads if repeated else 1,
            "output": adapter.source_name(_OUTPUT).split(".")[2],
        },
    }


@cache
def _source() -> str:
    return (Path(__file__).parent / MODELLING_FILE).read_text(encoding="utf-8")
