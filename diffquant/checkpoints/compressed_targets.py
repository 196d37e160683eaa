"""Names of modules as compressed-tensors' targets, which are names, classes or expressions over names.

Source: compressed-tensors 0.20, utils/match.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from diffquant.errors import CheckpointError
from diffquant.support.plain_data import match_names

_T = TypeVar("_T")


def name_patterns(names: Iterable[str]) -> list[str]:
    """Write module names as compressed-tensors targets, joining names that differ only in a layer's number.

    Names that also differ in an expert's number are joined if all of these experts are in the same layers.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = re.fullmatch(r"(.*\.layers)\.(\d+)\.(.+)", name)
        key = (match[1], match[3]) if match else (name, "")
        layers.setdefault(key, []).append(match[2] if match else "")
    experts: dict[tuple[str, str, str], list[str]] = {}
    for (stem, tail), numbers in layers.items():
        match = re.fullmatch(r"(.*experts)\.(\d+)\.(.+)", tail)
        start = f"re:{re.escape(stem)}\\.{_alternatives(numbers)}\\." if tail else stem
        key_of_all = (start, match[1], match[3]) if match else (start, tail, "")
        experts.setdefault(key_of_all, []).append(match[2] if match else "")
    return [
        start + (re.escape(tail) + (f"\\.{_alternatives(numbers)}\\.{re.escape(end)}$" if end else "$") if tail else "")
        for (start, tail, end), numbers in experts.items()
    ]


def _alternatives(numbers: list[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"


def pick_targets(modules: Sequence[str], targets: Mapping[str, _T]) -> dict[str, _T | None]:
    """Return the entry that compressed-tensors picks for each module, or None if no target matches the module.

    If several expressions match, the first one in alphabetical order counts, not the first one in config.json.

    Args:
        targets: entries by target: a module's full name, a regular expression after "re:", or the class "Linear",
            which matches modules that the others do not match.

    Raises:
        CheckpointError: an expression is malformed, or takes too long.
    """
    expressions = sorted(target for target in targets if target.startswith("re:"))
    unnamed = [module for module in modules if module not in targets]
    matched = match_modules([expression.removeprefix("re:") for expression in expressions], unnamed)
    indices = dict(zip(unnamed, matched, strict=True))
    picked = (module if (i := indices.get(module)) is None else expressions[i] for module in modules)
    of_class = targets.get("Linear")
    return {module: targets.get(name, of_class) for module, name in zip(modules, picked, strict=True)}


def match_modules(expressions: Sequence[str], modules: Sequence[str]) -> list[int | None]:
    """Return for each module the index of the first expression that matches the beginning of its name, or None.

    Raises:
        CheckpointError: an expression is malformed, or takes too long.
    """
    try:
        return match_names(expressions, modules)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}; correct its quantization_config") from error
