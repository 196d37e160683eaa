"""Finds where stock transformers puts the tensors of a folder whose weights were chosen by name.

While it loads some architectures, transformers renames, joins, splits or transposes tensors. compressed-tensors looks
for modules by their names in the model, and most of these conversions cannot be applied to packed tensors.

Source: transformers 5.16 to 5.24, conversion_mapping.py, core_model_loading.py and quantizers/base.py.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from diffquant.checkpoints.reader import Checkpoint
from diffquant.quantization.plan import QuantizationPlan
from diffquant.recipe.scheme import Scheme
from diffquant.support.names import first_few, option_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


def add_stock_names(plan: QuantizationPlan) -> QuantizationPlan:
    """Return a plan with the modules' names in stock transformers, and notes on weights that it cannot read.

    Nothing is added if the installed transformers does not have the architecture.

    Args:
        plan: a plan whose weights were chosen by name.
    """
    suffixes = {output.name.rpartition(".")[2] for tensor in plan.packed for output in tensor.outputs}
    if (loader := _make_loader(plan.checkpoint, suffixes)) is None:
        return plan
    stock_names: dict[str, list[str]] = {}
    joined: dict[Scheme, str] = {}
    unread: list[str] = []
    unpacked: dict[str, _Place] = {}
    # In the order in which transformers loads them, on which some of its conversions depend.
    for tensor in sorted(plan.tensors, key=lambda tensor: tensor.name):
        place = loader.place(tensor.name)
        if not tensor.parts:
            unpacked[tensor.name] = place
        stored: dict[str, list[str]] = {}
        for output in tensor.outputs:
            stored.setdefault(_module(output.name), []).append(output.name)
        for part in tensor.parts:
            module, alone = loader.find_linear(stored[part.module]), loader.place(f"{part.module}.weight")
            if module is not None:
                stock_names[part.module] = [module]
            elif alone.parameters and loader.unpacks(alone.converter, loader.linears):
                joined.setdefault(tensor.scheme, part.module)
            # A note on experts of one tensor is among the plan's already.
            elif (place.parameters or alone.parameters) and len(part.shape) == 2:
                unread.append(tensor.name)
                # So that transformers refuses them, or reads those that it can, as 8-bit floats.
                stock_names[part.module] = loader.linears_of(alone if alone.parameters else place)
    packed = {name for names in stock_names.values() for name in names}
    taken = [n for n, place in unpacked.items() if place.parameters and loader.unpacks(place.converter, packed)]
    others = [name for place in unpacked.values() for name in loader.linears_of(place)]
    notes = (*_unread_note(unread), *_joined_note(joined), *(_split_note(loader, packed) or _taken_note(plan, taken)))
    return replace(
        plan,
        stock_names=stock_names,
        linears=(*plan.linears, *others, *packed),
        notes=(*plan.notes, *notes),
        stock_notes=notes,
    )


def _unread_note(names: list[str]) -> list[str]:
    keep = first_few((option_name("keep", pattern) for pattern in _patterns(names)), " ")
    why = "transformers converts some weights while it loads them, and refuses them or fills them with random numbers"
    return (
        [f"{why} where it cannot do so because they are packed; to load the folder there, give {keep}"] if keep else []
    )


def _joined_note(examples: Mapping[Scheme, str]) -> list[str]:
    listed = first_few((f"{scheme} ({module})" for scheme, module in examples.items()), " and ")
    which = f"transformers (5.24) unpacks all experts by one scheme, but these have {listed}"
    alike = option_name("overrides", f"*.experts.*={next(iter(examples), '')}")
    return (
        [f"{which}, so that some become wrong or are refused; to load the folder there, give {alike}"]
        if len(examples) > 1
        else []
    )


def _taken_note(plan: QuantizationPlan, names: list[str]) -> list[str]:
    if all(tensor.scheme.format.is_native for tensor in plan.packed) or not names:
        return []
    return [
        f"transformers takes {first_few(_patterns(names), ', ')} for packed weights, which they are not, and refuses "
        f"the folder or fills them with random numbers; it reads them beside {option_name('weights', 'e4m3:channel')}"
    ]


def _split_note(loader: "_Loader", packed: Collection[str]) -> list[str]:
    split = [each.source_patterns[0] for each in loader.converters if _splits(each) and loader.unpacks(each, packed)]
    what = f"it cannot split {first_few(split, ', ')} in a model with packed weights"
    return [f"transformers (5.24) refuses this folder, since {what}"] if split else []


def _splits(converter: "WeightConverter") -> bool:
    is_whole = any(getattr(operation, "supports_many_to_many", False) for operation in converter.operations)
    return len(converter.target_patterns) > 1 and not is_whole


def _patterns(names: list[str]) -> list[str]:
    """Return the names without those that differ only in numbers, which are replaced by "*"."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _make_loader(checkpoint: Checkpoint, suffixes: set[str]) -> "_Loader | None":
    """Make the loader of a checkpoint's model, or return None if the installed transformers has no such model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        kind = transformers.CONFIG_MAPPING[checkpoint.config["model_type"]]
        settings = kind.from_pretrained(checkpoint.path, local_files_only=True)
        architecture = getattr(transformers, str((checkpoint.config.get("architectures") or [""])[0]), None)
        with torch.device("meta"):
            model = (architecture or MODEL_FOR_CAUSAL_LM_MAPPING[kind])(settings)
        loader = _Loader(model, suffixes)
        loader.place("")
    except Exception:  # a model's code may raise anything at settings of another version
        return None
    finally:
        logging.set_verbosity(verbosity)
    return loader


class _Place(NamedTuple):
    """What a tensor of a checkpoint becomes.

    Attributes:
        parameters: names of the model's parameters that are made of it; empty if transformers leaves it out.
        converter: what joins, splits or changes it; None if it is at most renamed.
    """

    parameters: tuple[str, ...]
    converter: "WeightConverter | None"


class _Loader:
    """Repeats which names transformers gives to tensors while it loads a model."""

    def __init__(self, model: "PreTrainedModel", suffixes: set[str]) -> None:
        """Collect the names of a model's parameters.

        Args:
            suffixes: ends of the names of the tensors that store a packed weight, such as "weight_scale".
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

    def place(self, name: str) -> _Place:
        """Return what a tensor becomes."""
        key, pattern = self.rename(name, self.renamings, self.converters, self.prefix, self.known)
        if key not in self.known and name in self.known:
            key, pattern = name, None
        converter = next((each for each in self.converters if pattern in each.source_patterns), None)
        first, *_ = targets = converter.target_patterns if converter else [key]
        keys = (key.replace(first, target, 1) for target in targets)
        return _Place(tuple(each for each in keys if each in self.known), converter)

    def linears_of(self, place: _Place) -> list[str]:
        """Return the Linears whose weights a tensor becomes."""
        modules = [name.removesuffix(".weight") for name in place.parameters]
        return [module for module in modules if module in self.linears]

    def find_linear(self, names: list[str]) -> str | None:
        """Return the Linear that the tensors of a packed weight are loaded into, or None if there is no such Linear."""
        places = [self.place(name) for name in names]
        modules = {_module(parameter) for place in places for parameter in place.parameters or ("",)}
        if any(place.converter for place in places) or len(modules) > 1 or not modules <= self.linears:
            return None
        return modules.pop()

    def unpacks(self, converter: "WeightConverter | None", linears: Collection[str]) -> bool:
        """Return whether transformers unpacks tensors before it converts them, as it does with experts.

        Args:
            linears: Linears of the model with packed weights; it converts tensors of these as they are stored.
        """
        if converter is None or not all(each.endswith(".weight") for each in converter.source_patterns):
            return False
        end = converter.target_patterns[0].rpartition(r"\1")[2]
        return not any(f"{name}.weight".endswith(end) for name in linears)
