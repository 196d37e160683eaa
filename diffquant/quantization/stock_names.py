"""Finds where stock transformers puts the tensors of a folder whose weights were chosen by name.

While it loads some architectures, transformers renames, joins, splits or transposes tensors. compressed-tensors looks
for modules by their names in the model, and most of these conversions cannot be applied to packed tensors.

Source: transformers 5.16 to 5.24, conversion_mapping.py, core_model_loading.py and quantizers/base.py.
"""

import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diffquant.checkpoints.reader import Checkpoint
from diffquant.quantization.foreign_code import remove_code_entries
from diffquant.quantization.plan import QuantizationPlan
from diffquant.recipe.scheme import Scheme
from diffquant.support.names import first_few, option_name, replace_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


# Numbers of layers or experts up to this are always accepted; larger ones only if there are as many tensors.
_MANY = 1000


def add_stock_names(plan: QuantizationPlan) -> QuantizationPlan:
    """Return a plan with the modules' names in stock transformers, and notes on weights that it cannot read.

    Nothing is added if the installed transformers does not have the architecture.

    Args:
        plan: a plan whose weights were chosen by name.
    """
    # With a false number of layers or experts in config.json, building the model could take forever.
    if any(count > max(len(plan.tensors), _MANY) for count in _counts(plan.checkpoint.config)):
        return plan
    loader = _make_loader(plan.checkpoint, {_last_part(each.name) for tensor in plan.packed for each in tensor.outputs})
    if loader is None:
        return plan
    stock_names: dict[str, list[str]] = {}
    unpacked: dict[str, tuple[list[str], WeightConverter | None]] = {}
    unread: list[str] = []
    cut: list[str] = []
    joined: dict[Scheme, str] = {}
    # In the order in which transformers loads them, on which some of its conversions depend.
    for tensor in sorted(plan.tensors, key=lambda tensor: tensor.name):
        place = loader.place(tensor.name)
        if not tensor.parts:
            unpacked[tensor.name] = place
        suffixes = {_last_part(output.name) for output in tensor.outputs}
        for part in tensor.parts:
            parameters, converter = loader.place(f"{part.module}.weight")
            # Targets even if they cannot be read, so that transformers refuses them.
            found = stock_names[part.module] = loader.linears_of(parameters)
            if not found and parameters and loader.unpacks(converter, loader.linears):
                joined.setdefault(tensor.scheme, part.module)
            elif found and converter is not None and loader.works_on_rows(converter):
                cut += [] if _is_stored_by_row(tensor.scheme) else [tensor.module]
            elif len(part.shape) == 2 and (parameters or place[0]) and not loader.renames(part.module, found, suffixes):
                unread.append(tensor.name)
    packed = {name for names in stock_names.values() for name in names}
    others = [name for parameters, _ in unpacked.values() for name in loader.linears_of(parameters)]
    taken = [n for n, (parameters, change) in unpacked.items() if parameters and loader.unpacks(change, packed)]
    if all(tensor.scheme.format.is_native for tensor in plan.packed):
        taken = []
    notes = _describe(unread, cut, joined, loader.split_patterns(packed), taken)
    linears = (*plan.linears, *others, *packed)
    return replace(plan, stock_names=stock_names, linears=linears, notes=(*plan.notes, *notes), stock_notes=notes)


def _is_stored_by_row(scheme: Scheme) -> bool:
    """Return whether every tensor of a packed weight has its rows, as in 8-bit floats: integers store a shape, too."""
    is_alone = scheme.granularity in ("row", "group") and not scheme.format.spans_tensor
    return is_alone and not scheme.format.has_stored_shape


def _describe(
    unread: list[str], cut: list[str], joined: Mapping[Scheme, str], split: list[str], taken: list[str]
) -> tuple[str, ...]:
    """Return the notes on weights that transformers cannot read.

    Args:
        unread: packed tensors that it converts as if they were not packed, or looks for elsewhere.
        cut: packed modules of which it splits or joins the rows.
        joined: an example of experts that it joins, by scheme.
        split: patterns of names of tensors that it would split.
        taken: tensors that are not packed, and which it would unpack.
    """
    notes = []
    if unread:
        keep = first_few((option_name("keep", pattern) for pattern in _patterns(unread)), " ")
        notes.append(
            "transformers converts some weights while it loads them, and refuses them or fills them with random "
            f"numbers where it cannot do so because they are packed; to load the folder there, give {keep}"
        )
    if cut:
        overrides = [option_name("overrides", f"{pattern}=e4m3:channel") for pattern in _patterns(cut)]
        notes.append(
            "transformers splits or joins some weights while it loads them, and refuses them or fills them with random "
            f"numbers if they are packed as integers; to load the folder there, give {first_few(overrides, ' ')}"
        )
    if len(joined) > 1:
        schemes = first_few((f"{scheme} ({module})" for scheme, module in joined.items()), " and ")
        notes.append(
            f"transformers (5.24) unpacks all experts by one scheme, but these have {schemes}, so that some become "
            "wrong or are refused; to load the folder there, give "
            + option_name("overrides", f"*.experts.*={next(iter(joined))}")
        )
    if split:
        notes.append(
            f"transformers (5.24) refuses this folder: in a model with packed weights it can split "
            f"{first_few(split, ', ')} only if they are packed, too, as e4m3:channel"
        )
    elif taken:
        notes.append(
            f"transformers takes {first_few(_patterns(taken), ', ')} for packed weights, which they are not, and "
            "refuses the folder or fills them with random numbers; it reads them beside "
            + option_name("weights", "e4m3:channel")
        )
    return tuple(notes)


def _patterns(names: list[str]) -> list[str]:
    """Return the names without those that differ only in numbers, which are replaced by "*"."""
    return list(dict.fromkeys(replace_numbers(name) for name in names))


def _counts(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of layers and experts in a config.json."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif isinstance(value, int) and re.search("(layers?|depth|blocks|experts)$", key):
            yield value


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _make_loader(checkpoint: Checkpoint, suffixes: set[str]) -> "_Loader | None":
    """Make the loader of a checkpoint's model, or return None if the installed transformers has no such model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        kind = transformers.CONFIG_MAPPING[checkpoint.config["model_type"]]
        named = getattr(transformers, str((checkpoint.config.get("architectures") or [""])[0]), None)
        is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        architecture: Any = named if is_model else MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        with TemporaryDirectory() as folder, torch.device("meta"), warnings.catch_warnings(action="ignore"):
            # Compiled kernels, for example, would be downloaded and run.
            config, _ = remove_code_entries(Path(folder), checkpoint.config)
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            loader = _Loader(architecture(kind.from_pretrained(folder, local_files_only=True)), suffixes)
        loader.place("")
    except Exception:  # a model's code may raise anything at settings of another version
        return None
    finally:
        logging.set_verbosity(verbosity)
    return loader


class _Loader:
    """Repeats which names transformers gives to tensors while it loads a model."""

    def __init__(self, model: "PreTrainedModel", suffixes: set[str]) -> None:
        """Collect the names of a model's parameters.

        Args:
            suffixes: last parts of the names of the tensors that store packed weights, such as "weight_scale".
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self.rename = rename_source_key
        self.linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        packed = {f"{name}.{suffix}": True for name in self.linears for suffix in suffixes}
        self.known = dict.fromkeys(model.state_dict(), True) | packed
        self.prefix = model.base_model_prefix
        changes = get_model_conversion_mapping(model)
        self.renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        self.converters = [change for change in changes if isinstance(change, WeightConverter)]

    def place(self, name: str) -> "tuple[list[str], WeightConverter | None]":
        """Return the parameters that are made of a tensor, if any, and what converts it, unless it is only renamed."""
        key, pattern = self.rename(name, self.renamings, self.converters, self.prefix, self.known)
        if key not in self.known and name in self.known:
            key, pattern = name, None
        converter = next((each for each in self.converters if pattern in each.source_patterns), None)
        first, *_ = targets = converter.target_patterns if converter else [key]
        return [name for target in targets if (name := key.replace(first, target, 1)) in self.known], converter

    def linears_of(self, parameters: Iterable[str]) -> list[str]:
        """Return the Linears whose weights are among some parameters."""
        modules = [name.removesuffix(".weight") for name in parameters]
        return [module for module in modules if module in self.linears]

    def renames(self, module: str, linears: list[str], suffixes: Collection[str]) -> bool:
        """Return whether all tensors of a packed module become those of one Linear, under its name."""
        places = {suffix: self.place(f"{module}.{suffix}") for suffix in suffixes}
        return len(linears) == 1 and all(place == ([f"{linears[0]}.{n}"], None) for n, place in places.items())

    def works_on_rows(self, converter: "WeightConverter") -> bool:
        """Return whether a converter only splits, joins or reorders rows, which it can do with packed weights, too."""
        return all(getattr(operation, "dim", None) == 0 for operation in converter.operations)

    def unpacks(self, converter: "WeightConverter | None", linears: Collection[str]) -> bool:
        """Return whether transformers unpacks tensors before it converts them, as it does with experts.

        Args:
            linears: Linears of the model with packed weights; it converts tensors of these as they are stored.
        """
        if converter is None or not all(each.endswith(".weight") for each in converter.source_patterns):
            return False
        end = converter.target_patterns[0].rpartition(r"\1")[2]
        return not any(f"{name}.weight".endswith(end) for name in linears)

    def split_patterns(self, linears: Collection[str]) -> list[str]:
        """Return patterns of the names of tensors that transformers cannot both unpack and split."""
        split = [each for each in self.converters if len(each.target_patterns) > 1 and self.unpacks(each, linears)]
        return [
            each.source_patterns[0]
            for each in split
            if not any(getattr(operation, "supports_many_to_many", False) for operation in each.operations)
        ]
