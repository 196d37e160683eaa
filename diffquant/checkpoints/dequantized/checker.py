"""Checks of a folder's packed tensors and settings, for the readers of its layout."""

from collections.abc import Container, Mapping
from typing import Any

import torch

from diffquant.checkpoints.reader import Checkpoint
from diffquant.errors import CheckpointError
from diffquant.support.names import first_few

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTES = (torch.uint8, torch.int8, *FLOAT8)


class LayoutChecker:
    """Checks a folder's tensors against a layout, and collects what is missing or different.

    Args:
        method: name of the layout, for messages.

    Attributes:
        stored: the folder.
        problems: problems found so far, each naming its tensor or setting.
    """

    def __init__(self, stored: Checkpoint, method: str) -> None:
        self.stored, self._method, self.problems = stored, method, list[str]()

    def check_shape(self, name: str, axes: int, *dtypes: torch.dtype) -> tuple[int, ...] | None:
        """Check a tensor's number of axes and dtype, and return its shape.

        If the tensor is missing or does not match, add a problem and return None.

        Args:
            dtypes: allowed dtypes; by default all floats of 16 bits or more.
        """
        info = self.stored.tensors.get(name)
        if info is None:
            self.problems.append(f"{name} is missing")
            return None
        if len(info.shape) != axes or 0 in info.shape:
            self.problems.append(f"{name} is {list(info.shape)}, expected {axes} axes")
            return None
        fits = info.dtype in dtypes if dtypes else info.dtype.is_floating_point and info.dtype.itemsize > 1
        if not fits:
            kinds = " or ".join(str(dtype) for dtype in dtypes) or "floats of 16 bits or more"
            self.problems.append(f"{name} is {info.dtype}, expected {kinds}")
            return None
        return info.shape

    def check_tensor(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> bool:
        """Check a tensor's shape and dtype, and return whether both match; if not, add a problem.

        Args:
            dtypes: allowed dtypes; by default all floats of 16 bits or more.
        """
        stored = self.check_shape(name, len(shape), *dtypes)
        if stored is not None and stored != shape:
            self.problems.append(f"{name} is {list(stored)}, not {list(shape)}")
        return stored == shape

    def check_all_scaled(self, found: Container[str]) -> None:
        """Add a problem for each weight of an 8-bit dtype that is not among the matrices found: its scales are missing.

        Args:
            found: names of the matrices.
        """
        self.problems += [
            f"{name} is {info.dtype}, and its scales are missing"
            for name, info in self.stored.tensors.items()
            if name.endswith((".weight", "_proj")) and info.dtype in _BYTES and name not in found
        ]

    def require_valid(self) -> None:
        """Check that no problems were found.

        Raises:
            CheckpointError: there are problems; the message names the first.
        """
        if self.problems:
            problems = first_few(self.problems)
            raise CheckpointError(f"{self.stored.path} does not match {self._method}'s layout: {problems}")

    def modules_with(self, suffix: str) -> list[str]:
        """List the modules that have a tensor with this suffix, in the folder's order."""
        return [name.removesuffix(suffix) for name in self.stored.tensors if name.endswith(suffix)]

    def read_bits(self, entry: Mapping[str, Any], allowed: range) -> int:
        """Return the `bits` of quantization_config; if they are not allowed, add a problem and return `allowed[0]`."""
        value = entry.get("bits")
        if type(value) is int and value in allowed:
            return value
        self.problems.append(f"bits of quantization_config is {value!r}, expected {allowed[0]} to {allowed[-1]}")
        return allowed[0]

    def read_group_size(self, entry: Mapping[str, Any]) -> int:
        """Return the `group_size` of quantization_config; -1 means that all inputs share a scale.

        If it is invalid, add a problem and return -1.
        """
        size = entry.get("group_size", -1)
        if type(size) is int and (size == -1 or size > 0):
            return size
        self.problems.append(f"group_size of quantization_config is {size!r}, expected a size, or -1 for one group")
        return -1

    def check_settings(self, entry: Mapping[str, Any], read: Mapping[str, tuple[Any, ...]]) -> None:
        """Add a problem for each setting of quantization_config whose value is not supported.

        Args:
            read: supported values by setting.
        """
        self.problems += [
            f"{key} of quantization_config is {entry[key]!r}, expected {' or '.join(map(repr, values))}"
            for key, values in read.items()
            if entry.get(key) is not None and entry[key] not in values
        ]
