"""Runs that are killed before a chosen operation on files, and started again.

Every operation on a file below a folder (open, rename, remove, make, list, truncate) raises an audit event, before
which the process can be ended as `kill -9` ends it. A forked process runs the verb, so that nothing is imported twice.

    python -m tests.fuzz.kills            # every operation of every verb; prints what did not come back
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from diffquant.calib.calibration.calibrate import calibrate
from diffquant.calib.search.allocation import Budget
from diffquant.calib.search.outputs import write_search
from diffquant.calib.search.search import Search
from diffquant.checkpoints.ranges import check_calibrated_output, is_own_ranges, write_ranges
from diffquant.errors import DiffQuantError, OutputExistsError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.outputs import write_outputs
from diffquant.measure.sweep.run import run_sweep
from diffquant.onnx import ExportOptions, export
from diffquant.quantization.conversion import convert
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import write_diffllama

_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}
_FAILED = 3


@dataclass(frozen=True)
class Verb:
    """A command that writes an output.

    Attributes:
        name: name of the command.
        prepare: function that makes its inputs in a folder.
        run: function of the folder of inputs and of the output; a run after a kill calls it again.
        result: function from the output to what two equal outputs share.
        old: function that puts an older output there first, which `run` then replaces; None where there is none.
    """

    name: str
    prepare: Callable[[Path], object]
    run: Callable[[Path, Path], object]
    result: Callable[[Path], object]
    old: Callable[[Path, Path], object] | None = None


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def _searched(folder: Path) -> tuple[str, set[str]]:
    """The recipe, and the names of all files: a refused run, which leaves files out, is another result."""
    return next(folder.glob("recipe-*.yaml")).read_text(), {file.name for file in folder.iterdir()}


def _quantize(weights: str, overwrite: bool) -> Callable[[Path, Path], object]:
    return lambda inputs, output: quantize(inputs, output, Recipe.of(weights=weights, kv=8), overwrite=overwrite)


def _sweep(inputs: Path, output: Path) -> None:
    reading = {"characters": 300, "window": 64, "stride": 64}
    grid = {"bits": (16, 4), "targets": ("logits", "weights"), "granularities": ("row",), "dtype": "float32"}
    options = SweepOptions(tasks=("perplexity",), task_options=reading, **grid)
    write_outputs(result := run_sweep([inputs], options, output), output)
    result.require_complete()


def _search(inputs: Path, output: Path) -> None:
    settings = {"targets": ("k", "logits"), "windows": 1, "window": 32, "check_characters": 200}
    search = Search(inputs, Budget(bits=6.0), output, **settings)
    write_search(search.run(), output)


def _calibrate(inputs: Path, output: Path) -> None:
    check_calibrated_output(output, False, is_own_ranges(output))
    ranges, _ = calibrate(inputs, ("k", "v"), tokens=128, window=32)
    write_ranges(output, ranges)


VERBS = (
    Verb("quantize", lambda f: write_diffllama(f, shard_size="80KB"), _quantize("4:g32", overwrite=False), _files),
    Verb(
        "quantize --overwrite",
        lambda f: write_diffllama(f, shard_size="80KB"),
        _quantize("4:g32", overwrite=True),
        _files,
        old=_quantize("8:row", overwrite=False),
    ),
    Verb("convert", tiny_lm.write_llama, lambda i, o: convert(i, o, "diff-v2"), _files),
    Verb("export", tiny_lm.write_diff_v2, lambda i, o: export(i, o, ExportOptions()), _files),
    Verb("sweep", tiny_lm.write_diff_v2, _sweep, lambda folder: (folder / "table.csv").read_text()),
    Verb("search", tiny_lm.write_diff_v2, _search, _searched),
    Verb("calibrate", tiny_lm.write_llama, _calibrate, Path.read_bytes),
)


def operations(verb: Verb, inputs: Path, place: Path) -> int:
    """Number of operations on files below `place` that a whole run makes."""
    counter = place.parent / f"{place.name}-count"
    status = _forked(lambda: counter.write_text(str(_counted(verb, inputs, _prepared(verb, inputs, place)))))
    if status != 0:
        raise RuntimeError(f"{verb.name} fails by itself")
    return int(counter.read_text())


def survives(verb: Verb, inputs: Path, place: Path, expected: object, kill_at: int) -> str | None:
    """Kill a run before an operation and run it again.

    Returns:
        What is wrong afterwards; None where the output is the expected one and nothing else is left.
    """
    output = _prepared(verb, inputs, place)
    if _forked(lambda: _counted(verb, inputs, output, kill_at)) != signal.SIGKILL:
        return "it had ended before"
    if _forked(lambda: _again(verb, inputs, output)) != 0:
        return f"the next run failed; left are {sorted(entry.name for entry in place.iterdir())}"
    if not output.exists() or verb.result(output) != expected:
        return "the next run made another output"
    left = sorted(entry.name for entry in place.iterdir() if entry != output)
    return f"left behind: {', '.join(left)}" if left else None


def expected_result(verb: Verb, inputs: Path, place: Path) -> object:
    """What a run that nothing interrupts makes."""
    output = _prepared(verb, inputs, place)
    if _forked(lambda: verb.run(inputs, output)) != 0:
        raise RuntimeError(f"{verb.name} fails by itself")
    return verb.result(output)


def _prepared(verb: Verb, inputs: Path, place: Path) -> Path:
    """Path of the output in an empty folder, with an older one there where the verb replaces one."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    output = place / "out"
    if verb.old is not None and _forked(lambda: verb.old(inputs, output)) != 0:
        raise RuntimeError(f"{verb.name}: there is no older output")
    return output


def _again(verb: Verb, inputs: Path, output: Path) -> None:
    try:
        verb.run(inputs, output)
    except OutputExistsError:
        # Where it was killed after the output was in place, it says so.
        if not output.exists():
            raise


def _counted(verb: Verb, inputs: Path, output: Path, kill_at: int | None = None) -> int:
    """Run a verb; returns how many operations it made on files beside or below the output."""
    count, prefix = 0, str(output.parent)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event not in _OPERATIONS or not arguments or not str(arguments[0]).startswith(prefix):
            return
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    verb.run(inputs, output)
    return count


def _forked(work: Callable[[], object]) -> int:
    """Exit status of a process that does the work."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        work()
    except DiffQuantError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(_FAILED)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


@dataclass(frozen=True)
class Outcome:
    """What came of killing a verb.

    Attributes:
        operations: number of operations on files that a whole run makes.
        moments: those of them before which it was killed, counted from 1.
        problems: a sentence for each kill after which something was wrong.
    """

    operations: int
    moments: tuple[int, ...]
    problems: tuple[str, ...]


def try_kills(verb: Verb, folder: Path, choose: Callable[[int], Iterable[int]]) -> Outcome:
    """Kill a verb before chosen operations, each time in a new run.

    Args:
        folder: empty folder to work in.
        choose: function from the number of operations to those before which the verb is killed, counted from 1.
    """
    inputs = folder / "inputs"
    if _forked(lambda: verb.prepare(inputs)) != 0:
        raise RuntimeError(f"{verb.name}: there are no inputs")
    expected = expected_result(verb, inputs, folder / "whole")
    count = operations(verb, inputs, folder / "run")
    problem_at = {at: survives(verb, inputs, folder / "run", expected, at) for at in choose(count)}
    problems = tuple(
        f"{verb.name}, killed before operation {at} of {count}: {what}" for at, what in problem_at.items() if what
    )
    return Outcome(count, tuple(problem_at), problems)


def main() -> int:
    torch.set_num_threads(1)
    all_well = True
    for verb in VERBS:
        with tempfile.TemporaryDirectory() as folder:
            outcome = try_kills(verb, Path(folder), lambda count: range(1, count + 1))
        print(*outcome.problems, sep="\n", end="\n" if outcome.problems else "")
        killed = len(outcome.moments)
        print(f"{verb.name}: {killed - len(outcome.problems)} of {killed} kills came back", flush=True)
        all_well = all_well and not outcome.problems
    return 0 if all_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
