"""Raw files of runs: where they were made, what they say of losses and weights, and how they are written."""

import hashlib
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from diffquant.benchmarks.measuring import describe_environment
from diffquant.support.files import write_atomically
from research.train.loop import CHECKPOINT

ENVIRONMENTS = "environments.json"


def environments(folder: Path) -> dict[str, Any]:
    """This process's environment and, of a run that goes on from a checkpoint, those of the processes before it."""
    note, now = folder / ENVIRONMENTS, describe_environment()
    earlier = json.loads(note.read_text(encoding="utf-8")) if note.exists() and (folder / CHECKPOINT).exists() else []
    write_atomically(note, json.dumps([*earlier, now]))
    return {"environment": now} | ({"earlier_environments": earlier} if earlier else {})


def losses(log: Path) -> dict[int, float]:
    """Losses of a training by step, each the mean of the steps since the one before; none if it ended too early."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the float32 parameters in order: two trainings that are one have one."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def write_result(record: Mapping[str, Any], folder: Path) -> Path:
    """Write a raw file whole, packed by xz; numbers keep six digits."""
    content = json.dumps(_rounded(record), ensure_ascii=False).replace('], "', '],\n"').replace('}, "', '},\n"') + "\n"
    file = folder / f"{record['run']}.json.xz"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lzma.compress(content.encode(), preset=9))
    return file


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
