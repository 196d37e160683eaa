"""vLLM's OpenAI server for a folder that diffquant wrote, run until it is interrupted."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from diffquant.checkpoints.compressed_config import has_packed_weights
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.errors import DiffQuantError, UsageError
from diffquant.serving.cache import AUTO, is_fp8
from diffquant.support.names import option_name

_PAUSE = 0.5
# Seconds that the server has to finish its requests when it is stopped.
_PATIENCE = 20
Implementation = Literal["plugin", "folder"]


@dataclass(frozen=True)
class ServerPlan:
    """A server to start.

    Attributes:
        command: command line of vLLM's OpenAI server.
        environment: environment variables that the server needs in addition to this process's.
        url: URL of its API.
        name: name of the model in requests.
        cache: vLLM's name of the cache's format.
        notes: sentences about what was not tested, and about results that differ from diffquant's.
    """

    command: list[str]
    environment: dict[str, str]
    url: str
    name: str
    cache: str
    notes: list[str]

    @property
    def curl(self) -> str:
        """A curl command that requests a few tokens from the server."""
        asked = json.dumps({"model": self.name, "prompt": "The capital of France is", "max_tokens": 16})
        return f"curl {self.url}/completions -H 'Content-Type: application/json' -d {quote(asked)}"


def server_environment(implementation: Implementation) -> dict[str, str]:
    """Return the server's environment variables: no telemetry or download, no thread binding, the plugin or none."""
    chosen = os.environ.get("VLLM_PLUGINS")
    # `python -m` imports from the current folder first, which may be the model's.
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if implementation == "folder":
        environment["VLLM_PLUGINS"] = "none"
    elif chosen is not None and "diffquant" not in chosen.split(","):
        environment["VLLM_PLUGINS"] = f"{chosen},diffquant"
    return environment


def run_server(plan: ServerPlan, on_ready: Callable[[], None]) -> None:
    """Run a planned server until it is interrupted.

    Args:
        on_ready: called once the server answers.

    Raises:
        DiffQuantError: the server did not start, or ended without being interrupted.
    """
    for note in plan.notes:
        sys.stderr.write(f"note: {note}\n")
    # vLLM's output is progress, so it goes to stderr; stdout is for the caller's output.
    server = subprocess.Popen(
        plan.command, env=os.environ | plan.environment, stdout=sys.stderr, start_new_session=True
    )
    try:
        _wait_until_ready(server, plan)
        on_ready()
        server.wait()
    finally:
        _terminate(server)
    raise DiffQuantError(f"vLLM's server ended with status {server.returncode}; see its output above")


def check_cpu(folder: Path, cache: str, implementation: Implementation) -> None:
    """Check that this CPU can run vLLM's low-bit kernels, which need AVX-512 on x86.

    Raises:
        UsageError: the CPU lacks AVX-512, and either the cache is fp8, or the folder has packed weights and
            `implementation` is not the plugin, which unpacks them.
    """
    import torch

    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() == "AVX512":
        return
    if is_fp8(cache):
        raise UsageError(
            f"vLLM's cache {cache} needs AVX-512, which this processor does not have; use {option_name('cache', AUTO)}"
        )
    if implementation == "folder" and has_packed_weights(open_checkpoint(folder).config):
        raise UsageError(
            f"{folder} has packed weights, for which vLLM without the plugin needs AVX-512: leave out "
            f"{option_name('implementation', 'folder')}, since the plugin unpacks them"
        )


def check_port(host: str, port: int) -> None:
    """Check that the server can listen at an address.

    Raises:
        UsageError: the server cannot listen there, for example because the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"cannot listen at {host}, port {port}: {error.strerror}; choose another {option_name('port')}"
            ) from error


def _wait_until_ready(server: "subprocess.Popen[bytes]", plan: ServerPlan) -> None:
    """Wait until the server answers or has ended."""
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    address = plan.url.removesuffix("/v1").removeprefix("http://")
    host, _, port = address.rpartition(":")
    # The server runs on this machine, which a network proxy cannot reach.
    opened = build_opener(ProxyHandler({})).open
    while server.poll() is None:
        try:
            with opened(f"http://{everywhere.get(host, host)}:{port}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(_PAUSE)
    raise DiffQuantError(f"vLLM's server did not start (status {server.returncode}); see its output above")


def _terminate(server: "subprocess.Popen[bytes]") -> None:
    if server.poll() is None:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(_PATIENCE)
    # vLLM's engine is a separate process, which may outlive the server, or miss the signal while it starts.
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
