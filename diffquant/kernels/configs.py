"""Launch configurations of kernels, such as tile sizes: built-in tables, and tuned ones that override them.

A key is "kernel/device class/case", as in "prefill_v1/sm_90/128". `DIFFQUANT_KERNEL_CONFIGS` may name a JSON file of
tuned entries {key: {field: value}}; omitted fields keep their built-in values.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from diffquant.errors import UsageError

VARIABLE = "DIFFQUANT_KERNEL_CONFIGS"

# Values of a configuration's fields, which a comment beside each table describes.
Config = dict[str, int]


def make_attention_config(queries: int, keys: int, warps: int, stages: int) -> Config:
    """Return an attention kernel's launch configuration as an entry of a table.

    Args:
        queries: number of rows of a tile.
        keys: number of keys per step.
        warps: number of warps.
        stages: number of steps whose keys and values are loaded ahead.
    """
    return {"queries": queries, "keys": keys, "warps": warps, "stages": stages}


# Steps are as long as possible, since each step rescales the accumulator: longer ones, in machine code, spill registers
# or wait for single products. Those of sm_80 fit in the 99 KiB of shared memory of Ampere's and Ada's smaller devices.
PREFILL = {
    "prefill_v1/sm_90/64": make_attention_config(128, 128, 8, 3),
    "prefill_v1/sm_90/128": make_attention_config(128, 128, 8, 2),
    "prefill_v1/sm_80/64": make_attention_config(128, 64, 8, 3),
    "prefill_v1/sm_80/128": make_attention_config(128, 64, 8, 2),
    "prefill_v2/sm_90/64": make_attention_config(128, 128, 8, 3),
    "prefill_v2/sm_90/128": make_attention_config(128, 128, 8, 2),
    "prefill_v2/sm_80/64": make_attention_config(128, 64, 4, 3),
    "prefill_v2/sm_80/128": make_attention_config(128, 64, 8, 3),
}


def choose_config(table: Mapping[str, Config], key: str) -> Config:
    """Return a kernel's launch configuration: the entry `key` of its built-in table, with the user's tuned values.

    Raises:
        UsageError: the file of tuned values is invalid, or names an unknown field of this configuration.
    """
    shipped, tuned = table[key], _read_tuned().get(key, {})
    if unknown := sorted(tuned.keys() - shipped.keys()):
        raise UsageError(
            f"kernel configuration {key}: unknown {', '.join(unknown)}; choose from {', '.join(sorted(shipped))}"
        )
    return shipped | tuned


@contextmanager
def override_configs(entries: dict[str, Config]) -> Iterator[None]:
    """Within a context, override launch configurations by entries as in a tuned file. For tuning and tests."""
    tuned = _read_tuned()
    before = dict(tuned)
    tuned.update(entries)
    try:
        yield
    finally:
        tuned.clear()
        tuned.update(before)


@cache
def _read_tuned() -> dict[str, Config]:
    """Read the tuned entries from the file named by `DIFFQUANT_KERNEL_CONFIGS`."""
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
