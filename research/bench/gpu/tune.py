"""Tuning of the kernels: tries neighbours of the bundled configurations, and writes faster ones to a file.

    python -m research.bench.gpu.tune kernels.json

The file is for the environment variable `DIFFQUANT_KERNEL_CONFIGS`: {"kernel/device class/case": {field: value}}.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import torch

from diffquant.benchmarks import linears
from diffquant.benchmarks.contest import SECTIONS, relative_error, tolerance
from diffquant.benchmarks.measuring import make_timer, run_in_turns
from diffquant.benchmarks.workloads import MODELS, V2, Model, Workload
from diffquant.errors import DiffQuantError, UsageError
from diffquant.kernels.configs import PREFILL, Config, choose_config, override_configs
from diffquant.kernels.gpu import device_class
from diffquant.support.files import write_json
from diffquant.support.outputs import check_output_file, has_fields
from diffquant.support.plain_data import parse_json
from diffquant.support.progress import Progress, progress_for, report_nothing

# Least speedup of a new configuration, more than the noise of measurements.
GAIN = 1.03
_TURNS = 5
_KEYS = {"decode": 16384}
_LENGTH = 8192

Check = Callable[[], bool]


def main() -> int:
    """Tune the kernels of this device, print what was found, and return the exit code."""
    # Not typer: a machine with a GPU may have torch, triton and numpy alone.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="JSON file to write")
    try:
        print(tune(parser.parse_args().file, progress_for("tune")))
    except DiffQuantError as error:
        parser.error(str(error))
    return 0


def tune(path: Path, progress: Progress = report_nothing) -> str:
    """Tune every kernel configuration of this device, and write the faster ones to a file.

    Return a summary with a line for each configuration.

    Raises:
        UsageError: there is no CUDA device.
        OutputExistsError: the path exists and is not a file of configurations.
    """
    if not torch.cuda.is_available():
        raise UsageError("kernels are tuned on a CUDA device, and torch finds none; run this on a machine with a GPU")
    tables = active_configs()
    check_output_file(path, has_fields(path, ()) and parse_json(path.read_bytes()).keys() <= tables.keys())
    here = f"/{device_class(torch.device('cuda'))}/"
    keys = [key for key in tables if here in key]
    tuned: dict[str, Config] = {}
    lines = []
    for done, key in enumerate(keys):
        progress(done, len(keys), key)
        try:
            work, is_right = make_tuning_case(key)
            before, now, changed = tune_config(key, tables[key], work, is_right)
        except Exception as error:  # a kernel that cannot run must not prevent the tuning of others
            lines.append(f"{key}: unchanged, {type(error).__name__}: {error}".splitlines()[0])
            continue
        if changed:
            tuned[key] = changed
        lines.append(f"{key}: {before:.3f} -> {now:.3f} ms" + (f" with {changed}" if changed else ", as shipped"))
    write_json(path, tuned)
    return "\n".join([*lines, f"wrote {len(tuned)} of {len(keys)} entries to {path}"])


def active_configs() -> dict[str, Config]:
    """Return the active configurations of all kernels by key, "kernel/device class/case"."""
    # Imported here because they need Triton, which may not be installed on a machine without a GPU.
    from diffquant.kernels.attention import prefill_int8, prefill_simulated
    from diffquant.kernels.cache import decode_split
    from diffquant.kernels.linear import gemm, gemv

    tables: list[Mapping[str, Config]] = [PREFILL]
    tables += [module.TILES for module in (prefill_int8, prefill_simulated, decode_split, gemv, gemm)]
    return {key: choose_config(table, key) for table in tables for key in table}


def list_neighbour_values(config: Config, field: str) -> Iterator[int]:
    """Yield the values to try for a field of a configuration: `stages` ± 1, half and double of any other."""
    value = config[field]
    if field == "stages":
        yield from (other for other in (value - 1, value + 1) if other >= 1)
    else:
        yield from (other for other in (value // 2, value * 2) if other >= 1)


def tune_config(key: str, config: Config, work: Callable[[], object], is_right: Check) -> tuple[float, float, Config]:
    """Tune the fields of one configuration, one after another; values that fail or give wrong results are skipped.

    Args:
        key: key of the configuration.
        config: its current fields.
        work: runs the kernel with the active configuration.
        is_right: returns whether the kernel's result is correct.

    Returns:
        Milliseconds before, milliseconds after, and the changed fields.
    """
    changed: Config = {}
    before = now = _milliseconds(work)
    for field in config:
        start = changed.get(field, config[field])
        for value in list_neighbour_values(config, field):
            entry = changed | {field: value}
            with override_configs({key: config | entry}):
                try:
                    milliseconds = _milliseconds(work) if is_right() else float("inf")
                except Exception:  # too many registers, too little shared memory, an unsupported shape
                    continue
            if milliseconds * GAIN < now and value != start:
                now, changed = milliseconds, entry
    return before, now, changed


def make_tuning_case(key: str) -> tuple[Callable[[], object], Check]:
    """Return a function that runs a kernel, and one that returns whether the kernel's result is correct.

    Args:
        key: key of the kernel's configuration, see `active_configs`.

    Raises:
        UsageError: no workload of the bench uses the configuration.
    """
    kernel, _, case, *bits = key.split("/")
    if kernel in ("gemv", "gemm"):
        return _linear_probe(kernel, int(case))
    section, name, model = _attention_of(kernel, int(case), bits == ["16"])
    keys = _KEYS.get(kernel, _LENGTH)
    work = Workload(model, 1 if section == "decode" else keys, keys, 8 if section == "decode" else 1, "float16")
    peer = SECTIONS[section][name]
    call = peer.make(work, "cuda")
    allowed = tolerance(peer, work.torch_dtype)
    return lambda: peer.attention(call), lambda: relative_error(peer, call) <= allowed


def _attention_of(kernel: str, width: int, of_states: bool) -> tuple[str, str, Model]:
    """Return the section, peer and model whose call uses a configuration.

    Args:
        kernel: name of the kernel.
        width: head width, or for "decode" the width of values.
        of_states: for "decode", whether the cache has 16 bits, not codes.

    Raises:
        UsageError: no workload of the bench uses the configuration.
    """
    names = {
        "prefill_v1": "DIFF, fused",
        "prefill_v2": "DIFF, fused",
        "prefill_int8": "DIFF, fused, int8 QK, fp8 PV",
        "simulated": "DIFF, simulated logits 8:row",
    }
    v1 = {64: MODELS["diffllama-1b"], 128: MODELS["3B"]}
    v2 = {64: MODELS["smollm2-135m-diff-v2"], 128: V2}
    if kernel == "decode":
        model = next((m for m in (*v2.values(), *v1.values()) if m.value_width == width), None)
        section, name = "decode", f"DIFF, fused, {16 if of_states else 4}-bit cache"
    else:
        model = (v2 if kernel == "prefill_v2" else v1).get(width)
        section, name = "attention", names.get(kernel, "")
    if model is None or not name:
        raise UsageError("no bench workload uses this entry")
    return section, name, model


def _linear_probe(kernel: str, case: int) -> tuple[Callable[[], object], Check]:
    """Return `make_tuning_case` of a linear kernel; `case` is gemv's bits, or gemm's number of tokens."""
    bits, tokens = (case, 1) if kernel == "gemv" else (4, case)
    model = MODELS["3B"]
    weight = torch.randn(model.inner, model.hidden, device="cuda", dtype=torch.float16) * 0.02
    x = torch.randn(tokens, model.hidden, device="cuda", dtype=torch.float16)
    product = linears.PATHS[f"packed, {bits} bits"][0]([weight])[0]
    wanted = product(x, 0).float()
    return lambda: product(x, 0), lambda: bool(((product(x, 0).float() - wanted).norm() / wanted.norm()) < 1e-2)


def _milliseconds(work: Callable[[], object]) -> float:
    return median(run_in_turns({"": make_timer(work, "cuda")}, _TURNS)[""])


if __name__ == "__main__":
    raise SystemExit(main())
