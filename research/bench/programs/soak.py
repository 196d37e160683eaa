"""A process that serves exported folders for an hour: its memory, minute by minute, and whether its answers change.

    python -m research.bench.programs.soak MODEL... --json bench/results/soak.json

Each model is exported with 4-bit weights and an 8-bit cache, and open in two sessions of one thread. A round continues
a prompt in every session, in turns token by token; gives up a long prompt after its first tokens; reads with a cache
that grows from call to call; and decodes a batch of 16, with caches that are bound where they lie. Speed is not
measured: what else the machine does may take as much of it as it likes.
"""

import gc
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from diffquant.benchmarks.measuring import describe_environment, parse_status_bytes
from diffquant.errors import ToleranceError
from diffquant.onnx import Generator
from diffquant.onnx.runtime.session import InPlaceDecoder
from research.bench.programs.contestants import LOW_BITS
from research.bench.programs.engines import export_kernels, write_export
from tests.support.apart import JsonFile, tell

PROMPTS = ("The old man", "A house, and the door of it,", "It")
GROWTH_LIMIT = 8_000_000
BATCH, ROWS = 16, 24
# What is allocated once and kept is allocated in the first rounds, which are not counted.
_FIRST_ROUNDS = 10


@dataclass(frozen=True)
class Sample:
    """The process at one time.

    Attributes:
        seconds: time since it began to be counted.
        rounds: rounds that were served by then.
        resident: bytes of memory that it holds, mapped files included.
        anonymous: the same without mapped files.
    """

    seconds: float
    rounds: int
    resident: int
    anonymous: int


@dataclass(frozen=True)
class Soak:
    """Samples of a process that served.

    Attributes:
        samples: the first at the beginning and the last at the end.
        tokens: number of tokens that were generated.
        is_constant: whether every round's tokens were the first one's.
    """

    samples: tuple[Sample, ...]
    tokens: int
    is_constant: bool

    @property
    def grown(self) -> int:
        """Bytes by which the process has grown from the first sample to the last."""
        return self.samples[-1].resident - self.samples[0].resident

    def check(self) -> None:
        """Check that the process has not grown and went on saying the same.

        Raises:
            ToleranceError: it has, or its tokens changed.
        """
        if not self.is_constant:
            raise ToleranceError("the tokens of a later round are not those of the first one")
        if self.grown > GROWTH_LIMIT:
            raise ToleranceError(
                f"the process has grown by {self.grown / 1e6:.1f} MB, which is over {GROWTH_LIMIT / 1e6:.0f} MB, in "
                f"{self.samples[-1].rounds} rounds"
            )


def main(
    models: Annotated[list[Path], typer.Argument(help="Checkpoints that have a tokenizer.")],
    seconds: Annotated[float, typer.Option(min=1, help="How long to serve.")] = 3600,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between samples.")] = 60,
    file: JsonFile = None,
) -> None:
    """Serve exported folders, and hold the process's memory to a bound."""
    about = describe_environment("onnx", "onnxruntime")
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(number) for number in range(len(models))]
        # What exporting takes of memory is another process's: a server has none of it.
        with ProcessPoolExecutor(1, get_context("spawn")) as writer:
            list(writer.map(partial(write_export, LOW_BITS), models, folders))
        soak = serve(folders, seconds, every)
    result: dict[str, Any] = {
        "environment": about,
        "models": [model.name for model in models],
        "options": LOW_BITS,
        "sessions": 2 * len(models),
        "threads": 1,
        "batch": BATCH,
        "kernels": export_kernels(),
        **asdict(soak),
        "grown": soak.grown,
        "aims": {"grown": GROWTH_LIMIT},
    }
    tell(result, file, summary(soak))
    soak.check()


def summary(soak: Soak) -> str:
    """A line about what was served and how the process grew."""
    last = soak.samples[-1]
    return (
        f"{last.rounds} rounds, {soak.tokens} tokens in {last.seconds:.0f} s: {soak.grown / 1e6:+.1f} MB of "
        f"{soak.samples[0].resident / 1e6:.0f} MB"
    )


def serve(folders: Sequence[Path], seconds: float, every: float = 60) -> Soak:
    """Serve each folder from two sessions for so long, and look at this process's memory now and then."""
    sessions = [Generator(folder, 1) for folder in folders for _ in range(2)]
    wanted = _round(sessions)
    is_constant = all(_round(sessions) == wanted for _ in range(_FIRST_ROUNDS))
    started, rounds, count = time.monotonic(), 0, sum(map(len, wanted))
    samples = [_sample(0.0, 0)]
    while samples[-1].seconds < seconds:
        is_constant &= _round(sessions) == wanted
        rounds += 1
        passed = time.monotonic() - started
        if passed >= min(samples[-1].seconds + every, seconds):
            samples.append(_sample(passed, rounds))
    return Soak(tuple(samples), rounds * count, is_constant)


def _round(sessions: Sequence[Generator]) -> list[list[int]]:
    """Tokens of everything that a round asks for."""
    made: list[list[int]] = []
    for prompt in PROMPTS:
        streams = [session.generate_tokens(session.text.encode(prompt), ROWS) for session in sessions]
        made += [[token for token in each if token is not None] for each in zip(*zip_longest(*streams), strict=True)]
    for session in sessions:
        text = session.text.encode(" ".join(PROMPTS * 8))
        given_up = session.generate_tokens(text, 8 * ROWS)
        made.append([next(given_up), next(given_up)])
        del given_up
    # Sessions of one folder compute the same: each does one of the two.
    for growing, batched in zip(sessions[::2], sessions[1::2], strict=True):
        made += [_grown(growing), *_batch(batched)]
    return made


def _grown(session: Generator) -> list[int]:
    """Tokens of a few calls, each of whose caches is made anew with one row more."""
    model, ids = session.model, np.array([session.text.encode(PROMPTS[1])])
    past, tokens, length = model.allocate_cache(1), [], 0
    for _ in range(ROWS // 4):
        length += ids.shape[1]
        (logits,), past = model.run(ids, np.ones((1, length), np.int64), past)
        tokens.append(int(logits[0, -1].argmax()))
        ids = np.array([tokens[-1:]])
    return tokens


def _batch(session: Generator) -> list[list[int]]:
    """Tokens of a batch."""
    ids = np.random.default_rng(0).integers(3, 90, (BATCH, ROWS))
    state, tokens = InPlaceDecoder(session.model, BATCH, 2 * ROWS), []
    for _ in range(ROWS // 4):
        ids = state.step(ids)[:, -1:].argmax(-1)
        tokens.append(ids)
    answers: list[list[int]] = np.concatenate(tokens, 1).tolist()
    return answers


def _sample(seconds: float, rounds: int) -> Sample:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return Sample(round(seconds, 1), rounds, parse_status_bytes(status, "VmRSS"), parse_status_bytes(status, "RssAnon"))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
