"""`diffquant serve` as the tests of it start it, and what it serves."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import openai

import diffquant
from diffquant.data import pocket_models

ROOT = Path(__file__).parents[2]
NEW = 12


@dataclass
class Served:
    """A server that answers.

    Attributes:
        folder: folder that it serves.
        lines: lines that the command printed, the URL and the command line of curl.
        log: file that stderr goes to.
        client: OpenAI's client of it.
    """

    folder: Path
    lines: list[str]
    log: Path
    client: openai.OpenAI

    def complete(self, prompt: str, **asked: object) -> str:
        asked = {"max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}} | asked
        return self.client.completions.create(model=self.folder.name, prompt=prompt, **asked).choices[0].text

    def running(self) -> float:
        """Number of requests that the engine works on."""
        metrics = urlopen(self.lines[0].replace("/v1", "/metrics")).read().decode()
        return sum(float(number) for number in re.findall(r"^vllm:num_requests_running\S* (\S+)$", metrics, re.M))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(folder: Path, log: Path, *options: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "diffquant", "serve", str(folder), "--port", str(free_port()), *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        try:
            lines = [server.stdout.readline().strip() for _ in range(2)]
            assert all(lines), log.read_text()[-4000:]
            yield Served(folder, lines, log, openai.OpenAI(base_url=lines[0], api_key="none", max_retries=0))
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 130


def write_pocket(folder: Path, kind: str, recipe: dict[str, str]) -> Path:
    """A folder of the pocket model of prose whose name ends in `kind`."""
    pocket = next(path for path in pocket_models("prose") if path.name.endswith(kind))
    diffquant.quantize(pocket, folder, recipe)
    return folder
