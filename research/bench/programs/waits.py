"""Threads that sleep soon after a product, as commands have them, beside OpenMP's own, which go round in a loop.

    python -m research.bench.programs.waits CHECKPOINT --json bench/results/waits.json

Each turn is a process of its own, one way and the other by turns: a prompt read at once, and tokens one at a time. On a
machine with nothing else to do the two take alike; the result says how busy it was.
"""

import os
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import environment, run_in_turns
from diffquant.support.machine import limit_spinning
from tests.support.apart import JsonFile, run_apart, tell

_PROMPT, _PROMPTS, _TOKENS = 160, 3, 24
_PROGRAM = """
import json, sys, time
import torch
import diffquant
model = diffquant.load(sys.argv[1], dtype=torch.float32)
prompt, calls = int(sys.argv[2]), {"prompt": int(sys.argv[3]), "token": int(sys.argv[4])}
ids = torch.arange(prompt)[None]
found = {}
with torch.no_grad():
    for name, given in (("prompt", ids), ("token", ids[:, :1])):
        model(given)
        began = time.process_time(), time.monotonic()
        for _ in range(calls[name]):
            model(given)
        found[name] = {
            "cpu_seconds": (time.process_time() - began[0]) / calls[name],
            "seconds": (time.monotonic() - began[1]) / calls[name],
        }
print(json.dumps(found))
"""


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint.")],
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    file: JsonFile = None,
) -> None:
    """Time a model with either way of waiting."""
    result = measure_waits(model, repeats)
    tell(result, file, waits_summary(result))


def measure_waits(model: Path, repeats: int) -> dict[str, Any]:
    """Seconds a call of either way's turns, and their ratios."""
    plain = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ.pop("GOMP_SPINCOUNT", None)
    limit_spinning()
    turn = partial(run_apart, "-c", _PROGRAM, model, _PROMPT, _PROMPTS, _TOKENS)
    turns = run_in_turns({"brief": turn, "own": partial(turn, variables=plain)}, repeats)
    return {
        "environment": environment(),
        "model": model.name,
        "prompt_tokens": _PROMPT,
        **turns,
        "ratios": {
            work: {quantity: _ratio(**turns, work=work, quantity=quantity) for quantity in ("cpu_seconds", "seconds")}
            for work in ("prompt", "token")
        },
    }


def _ratio(brief: list[dict[str, Any]], own: list[dict[str, Any]], work: str, quantity: str) -> float:
    """Median of how many times as much the other way takes in turns that followed one another."""
    return float(median(theirs[work][quantity] / ours[work][quantity] for ours, theirs in zip(brief, own, strict=True)))


def waits_summary(result: dict[str, Any]) -> str:
    """Line of text with the ratios."""
    told = [
        f"a {work} takes {ratio['seconds']:.1f} times as long and {ratio['cpu_seconds']:.1f} times the CPU seconds"
        for work, ratio in result["ratios"].items()
    ]
    return f"with OpenMP's own waits, at a load of {result['environment']['load_average']:g}: {'; '.join(told)}"


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
