"""`WeightSource`: a checkpoint of any architecture, of which only tensors' names and shapes are known."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from diffquant.checkpoints.compressed_config import read_schemes
from diffquant.checkpoints.compressed_tensors import list_packed_modules
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.reader import Checkpoint, TensorInfo
from diffquant.data import weight_rules_text
from diffquant.errors import UsageError
from diffquant.recipe.scheme import Scheme
from diffquant.support.files import read_text
from diffquant.support.names import NAMED, did_you_mean, first_few


@dataclass(frozen=True)
class PackingRules:
    """Rules that decide by names which tensors of a checkpoint may be packed.

    A pattern consists of shell wildcards, must match a tensor's whole name, and ignores case.

    Attributes:
        linears: patterns of matrices [out, in] that may be packed.
        experts: patterns of tensors [experts, out, in] that may be packed.
        keep: patterns of tensors that are never packed.
    """

    linears: tuple[str, ...]
    experts: tuple[str, ...]
    keep: tuple[str, ...]

    @classmethod
    def read(cls, file: Path | None = None, keep: tuple[str, ...] = ()) -> "PackingRules":
        """Read the bundled rules, changed by a file and by further patterns.

        Args:
            file: YAML file whose sections, named like the attributes, replace those of the bundled rules.
            keep: patterns to add to `keep`.

        Raises:
            UsageError: the file cannot be read, has an unknown section, or a section is not a list of patterns.
        """
        rules = cls(**_sections(weight_rules_text(), "the bundled rules"))
        if file is not None:
            try:
                text = read_text(file)
            except (OSError, ValueError) as error:
                raise UsageError(f"cannot read weight rules {file}: {error}") from error
            rules = replace(rules, **_sections(text, f"weight rules {file}"))
        return replace(rules, keep=rules.keep + keep)

    def matches_weight(self, name: str, axes: int) -> bool:
        """Return whether `linears` (2 axes) or `experts` (3 axes) have a pattern for a tensor; `keep` is ignored."""
        return matches_any_pattern(name, {2: self.linears, 3: self.experts}.get(axes, ()))

    def may_be_mask(self, name: str, axes: int) -> bool:
        """Return whether a tensor may be a mask, with -inf, since it is not named like a weight, bias or λ."""
        return not self.matches_weight(name, axes) and not matches_any_pattern(name, ("*.weight", "*.bias", "*lambda*"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def modules_to_ignore(rules: PackingRules) -> tuple[str, ...]:
    """Return regular expressions of modules that loaders of the packed checkpoint must leave unquantized.

    They include heads, since a tied head has a module but no tensor; embeddings and routers, whose names in the model
    say so even if it renames them; and the user's patterns to keep. Modules may have a longer name in the model than in
    the checkpoint, as in transformers' models for images and text.
    """
    # Imported here, since checkpoints of known architectures do not need yaml.
    from diffquant.support.yaml_text import parse_yaml

    shipped = parse_yaml(weight_rules_text())["keep"]
    known = {pattern for part in shipped.values() for pattern in part}
    own = [f"(.*\\.)?{_expression(pattern)}" for pattern in rules.keep if pattern not in known]
    # Attention's gates are not: transformers gives this name to projections that checkpoints call otherwise.
    return (*(_expression(pattern) for part in ("heads", "embeddings", "routers") for pattern in shipped[part]), *own)


def _expression(pattern: str) -> str:
    """Return the regular expression of the modules whose tensors a pattern matches."""
    parts = re.split(r"(\[!?[^]]+\]|[*?])", pattern.removesuffix(".weight"))
    wild = {"*": ".*", "?": "."}
    return "".join(
        wild.get(p) or (p.replace("[!", "[^") if p[:1] == "[" and p[-1:] == "]" else re.escape(p)) for p in parts
    )


def matches_any_pattern(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a tensor's name matches one of the patterns, ignoring case."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def _sections(text: str, what: str) -> dict[str, tuple[str, ...]]:
    # Imported here, since checkpoints of known architectures do not need yaml.
    from diffquant.support.yaml_text import parse_yaml

    try:
        entries = parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"cannot read {what}: {error}") from error
    known = [field.name for field in fields(PackingRules)]
    if not isinstance(entries, dict):
        raise UsageError(f"{what} must be a mapping of {', '.join(known)}")
    unknown = [str(key) for key in entries if key not in known]
    if unknown:
        raise UsageError("; ".join(f"{what}: unknown section {key!r}{did_you_mean(key, known)}" for key in unknown))
    return {section: _patterns(entry, f"{what}: {section}") for section, entry in entries.items()}


def _patterns(entry: Any, what: str) -> tuple[str, ...]:
    """Read the patterns of a section, given as a list or as lists under titles."""
    if isinstance(entry, Mapping):
        return tuple(pattern for title, part in entry.items() for pattern in _patterns(part, f"{what}: {title}"))
    if not isinstance(entry, list) or not all(isinstance(pattern, str) for pattern in entry):
        raise UsageError(f"{what} must be a list of patterns, got {entry!r}")
    return tuple(entry)


# In narrower matrices, such as the coefficients of each expert's activation, scales cost what codes save.
_NARROWEST = 32


@dataclass(frozen=True, eq=False)
class WeightSource:
    """A checkpoint of any architecture, known by its tensors' names and shapes.

    Attributes:
        checkpoint: reader of its config and tensors.
        rules: rules that select the weights that may be packed.
        packed: scheme of each module whose weight is stored packed; empty for a 16-bit checkpoint.
    """

    checkpoint: Checkpoint
    rules: PackingRules
    packed: Mapping[str, Scheme]

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def model_type(self) -> str | None:
        """The `model_type` of config.json, for information only."""
        return self.checkpoint.config.get("model_type")

    @cached_property
    def packable_weights(self) -> dict[str, str]:
        """Tensor name, by module, of every weight that can be packed, including those that `rules.keep` excludes."""
        names = [
            name
            for name, info in self.checkpoint.tensors.items()
            if self.rules.matches_weight(name, len(info.shape)) and info.shape[-1] >= _NARROWEST and info.shape[0]
        ]
        return {name.removesuffix(".weight"): name for name in names}

    @cached_property
    def linears(self) -> list[str]:
        """Modules whose weights the rules select for packing."""
        return [
            module for module, name in self.packable_weights.items() if not matches_any_pattern(name, self.rules.keep)
        ]

    def list_possible_linears(self) -> list[str]:
        """Return the names of all modules that may be Linears, including those too narrow to be packed."""
        tensors = self.checkpoint.tensors.items()
        return [name.removesuffix(".weight") for name, info in tensors if _is_matrix(name, info)]


def open_weights(path: Path | str | WeightSource, rules: PackingRules | None = None) -> WeightSource:
    """Open a checkpoint of any architecture to work on its weights.

    Args:
        path: a folder of safetensors; an open source is returned unchanged.
        rules: rules that select the weights to pack; by default the bundled ones.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
        UsageError: a pattern in `rules.keep` that is not a bundled one matches no tensor.
    """
    if isinstance(path, WeightSource):
        return path
    checkpoint = open_checkpoint(Path(path))
    rules = rules or PackingRules.read()
    _check_keep(rules, checkpoint)
    return WeightSource(checkpoint, rules, read_schemes(checkpoint.config, list_packed_modules(checkpoint.tensors)))


def _check_keep(rules: PackingRules, checkpoint: Checkpoint) -> None:
    shipped = PackingRules.read().keep
    unmatched = [
        pattern
        for pattern in rules.keep
        if pattern not in shipped and not any(matches_any_pattern(name, (pattern,)) for name in checkpoint.tensors)
    ]
    if unmatched:
        # Finding the nearest name takes long, and only the first few are shown.
        problems = [f"{each!r} (the nearest is {_nearest(each, checkpoint)!r})" for each in unmatched[:NAMED]]
        listed = first_few([*problems, *unmatched[NAMED:]], ", ")
        raise UsageError(f"patterns to keep match no tensor of {checkpoint.path}: {listed}")


def _nearest(pattern: str, checkpoint: Checkpoint) -> str:
    names = difflib.get_close_matches(pattern.replace("*", ""), checkpoint.tensors, n=1, cutoff=0.0)
    return names[0] if names else ""


def _is_matrix(name: str, info: TensorInfo) -> bool:
    return name.endswith(".weight") and len(info.shape) == 2 and info.dtype.is_floating_point
