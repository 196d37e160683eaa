"""Rules that choose by name which weights to pack in a model of unknown architecture."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from diffquant.data import weight_rules_text
from diffquant.errors import UsageError
from diffquant.support.files import read_text
from diffquant.support.suggestion import did_you_mean


@dataclass(frozen=True)
class WeightRules:
    """Patterns (shell wildcards in any case) over tensors' whole names.

    Attributes:
        linears: patterns of matrices [out, in] that may be packed.
        experts: patterns of tensors [experts, out, in] that may be packed.
        keep: patterns of tensors that are never packed.
    """

    linears: tuple[str, ...]
    experts: tuple[str, ...]
    keep: tuple[str, ...]

    @classmethod
    def read(cls, file: Path | None = None, keep: tuple[str, ...] = ()) -> "WeightRules":
        """Read the default rules; a YAML file replaces sections of them, and `keep` adds patterns.

        Raises:
            UsageError: the file cannot be read, has an unknown section, or a section is not a list of patterns.
        """
        rules = cls(**_sections(weight_rules_text(), "the rules that ship"))
        if file is not None:
            try:
                text = read_text(file)
            except (OSError, ValueError) as error:
                raise UsageError(f"cannot read weight rules {file}: {error}") from error
            rules = replace(rules, **_sections(text, f"weight rules {file}"))
        return replace(rules, keep=rules.keep + keep)

    def mean(self, name: str, axes: int) -> bool:
        """Whether a tensor with `axes` axes is a weight that may be packed, unless a rule keeps it."""
        return matches(name, {2: self.linears, 3: self.experts}.get(axes, ()))

    def may_be_mask(self, name: str, axes: int) -> bool:
        """Whether a tensor may be a buffer that masks with -inf: it is no weight, bias or λ by its name."""
        return not self.mean(name, axes) and not matches(name, ("*.weight", "*.bias", "*lambda*"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def modules_to_ignore(rules: WeightRules) -> tuple[str, ...]:
    """Regular expressions of modules that readers have to leave alone, whatever the checkpoint calls them.

    A tied head has no tensor, yet a reader meets its module. What the caller keeps may have a longer name in the model
    than in the checkpoint, as all of a model for images and text has in transformers.
    """
    # Imported here, since checkpoints of known architectures do not need yaml.
    from diffquant.support.yaml_text import parse_yaml

    shipped = parse_yaml(weight_rules_text())["keep"]
    known = {pattern for part in shipped.values() for pattern in part}
    own = [f"(.*\\.)?{_expression(pattern)}" for pattern in rules.keep if pattern not in known]
    return (*map(_expression, shipped["heads"]), *own)


def _expression(pattern: str) -> str:
    """The regular expression of the modules whose tensors a pattern matches."""
    parts = re.split(r"(\[!?[^]]+\]|[*?])", pattern.removesuffix(".weight"))
    wild = {"*": ".*", "?": "."}
    return "".join(
        wild.get(p) or (p.replace("[!", "[^") if p[:1] == "[" and p[-1:] == "]" else re.escape(p)) for p in parts
    )


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a tensor's name matches one of the patterns, ignoring case."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def _sections(text: str, what: str) -> dict[str, tuple[str, ...]]:
    # Imported here, since checkpoints of known architectures do not need yaml.
    from diffquant.support.yaml_text import parse_yaml

    try:
        entries = parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"cannot read {what}: {error}") from error
    known = [field.name for field in fields(WeightRules)]
    if not isinstance(entries, dict):
        raise UsageError(f"{what} must be a mapping of {', '.join(known)}")
    unknown = [str(key) for key in entries if key not in known]
    if unknown:
        raise UsageError("; ".join(f"{what}: unknown section {key!r}{did_you_mean(key, known)}" for key in unknown))
    return {section: _patterns(entry, f"{what}: {section}") for section, entry in entries.items()}


def _patterns(entry: Any, what: str) -> tuple[str, ...]:
    """The patterns of a section, given as a list or as lists under titles."""
    if isinstance(entry, Mapping):
        return tuple(pattern for title, part in entry.items() for pattern in _patterns(part, f"{what}: {title}"))
    if not isinstance(entry, list) or not all(isinstance(pattern, str) for pattern in entry):
        raise UsageError(f"{what} must be a list of patterns, got {entry!r}")
    return tuple(entry)
