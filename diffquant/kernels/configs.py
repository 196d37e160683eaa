"""Configurations that say how each kernel cuts its work: a table of fixed ones a kernel, and tuned ones instead.

A key is "kernel/device class/case", as in "prefill_v1/sm_90/128". `DIFFQUANT_KERNEL_CONFIGS` may name a
JSON file of tuned entries: {key: {field: value}}, where fields left out keep the shipped value.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from diffquant.errors import UsageError

VARIABLE = "DIFFQUANT_KERNEL_CONFIGS"

Config = TypeVar("Config")
Entries = dict[str, dict[str, int]]


@dataclass(frozen=True)
class AttentionTile:
    """A tile of an attention kernel.

    Attributes:
        queries: number of rows of queries.
        keys: number of keys a step.
        warps: number of warps.
        stages: number of steps loaded ahead.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# The longest steps whose loops, read from machine code, neither spill nor wait for single products: each step
# rescales the accumulator. Those of sm_80 fit the 99 KiB of Ampere's and Ada's smaller devices.
PREFILL = {
    "prefill_v1/sm_90/64": AttentionTile(128, 128, 8, 3),
    "prefill_v1/sm_90/128": AttentionTile(128, 128, 8, 2),
    "prefill_v1/sm_80/64": AttentionTile(128, 64, 8, 3),
    "prefill_v1/sm_80/128": AttentionTile(128, 64, 8, 2),
    "prefill_v2/sm_90/64": AttentionTile(128, 128, 8, 3),
    "prefill_v2/sm_90/128": AttentionTile(128, 128, 8, 2),
    "prefill_v2/sm_80/64": AttentionTile(128, 64, 4, 3),
    "prefill_v2/sm_80/128": AttentionTile(128, 64, 8, 3),
}


def choose(table: Mapping[str, Config], key: str) -> Config:
    """Configuration under `key`: as tuned, else as shipped."""
    tuned = _tuned().get(key)
    return table[key] if tuned is None else _with_fields(table[key], key, tuned)


@contextmanager
def trying(entries: Entries) -> Iterator[None]:
    """Use these entries, in the file's form, for as long as the context is open. For tuners and tests."""
    tuned = _tuned()
    before = dict(tuned)
    tuned.update(entries)
    try:
        yield
    finally:
        tuned.clear()
        tuned.update(before)


@cache
def _tuned() -> Entries:
    """Tuned entries of the file that the environment names."""
    file_name = os.environ.get(VARIABLE)
    if not file_name:
        return {}
    try:
        entries = json.loads(Path(file_name).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{VARIABLE}: cannot read {file_name}: {error}") from error
    if not isinstance(entries, dict) or not all(_is_entry(entry) for entry in entries.values()):
        raise UsageError(f'{VARIABLE}: {file_name} is not {{"kernel/device/case": {{"field": integer}}}}')
    return entries


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and all(type(value) is int for value in entry.values())


def _with_fields(shipped: Config, key: str, tuned: dict[str, int]) -> Config:
    known = {field.name for field in fields(shipped)}  # type: ignore[arg-type]
    unknown = sorted(tuned.keys() - known)
    if unknown:
        raise UsageError(
            f"kernel configuration {key}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    return replace(shipped, **tuned)  # type: ignore[type-var]
