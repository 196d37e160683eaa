"""Checkpoints with something wrong in them: each is refused in a line, or works, and nothing in between.

A sound checkpoint is changed in one place: a value, key or byte of a JSON file, a tensor's header or data, an end.
A forked process then quantizes it, loads it and its quantized copy, and computes. Allowed are one DiffQuantError, or
finite logits from both; a foreign exception, a hang, a crash, a leftover, a changed input, or a copy that cannot be
loaded are not.

    python -m tests.fuzz.checkpoints --count 10000
"""

import json
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import DiffQuantError
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.fuzz.program import run
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_checkpoint

SECONDS = 10
_HUGE = 1e12
ODD: list[Any] = [
    None, [], {}, "x", "", -1, 0, 1, 2, 3, 7, 1e-320, 1e308, 0.5, 10**30, 10**9, True, False, [1], ["x"], {"a": 1},
    float("nan"), float("inf"), "1", "\0", "٤", [[]], -0.0, 2**31, 2**63,
]  # fmt: skip
_STATUS = {0: "works", 3: "refused", 4: "foreign", 5: "unreadable copy", 6: "not finite", 7: "leftover"}
_STATUS[8] = "input changed"

_STRETCHED: tuple[dict[str, Any], ...] = (
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 24},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)

# A folder and a source of chance -> what was changed, in words.
Mutation = Callable[[Path, random.Random], str]


def change_value(folder: Path, chance: random.Random) -> str:
    """Put something odd in place of a value somewhere in a JSON file."""
    file = chance.choice(_json_files(folder))
    content = json.loads(file.read_text())
    all_places = list(places(content))
    if not all_places:
        return f"{file.name} is left"
    holder, key = chance.choice(all_places[:400])
    holder[key] = chance.choice(ODD)
    file.write_text(json.dumps(content))
    return f"{file.name}: {key} = {holder[key]!r}"


def change_config(folder: Path, chance: random.Random) -> str:
    """Put something odd in place of a value of config.json, or take the key away."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    holder, key = chance.choice(list(places(content)))
    if chance.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
        said = f"config.json without {key}"
    else:
        holder[key] = chance.choice(ODD)
        said = f"config.json: {key} = {holder[key]!r}"
    file.write_text(json.dumps(content))
    return said


def change_text(folder: Path, chance: random.Random) -> str:
    """Damage the text of a JSON file: cut it, repeat a part, nest it, or change a byte."""
    file = chance.choice(_json_files(folder))
    text = file.read_bytes()
    at = chance.randrange(max(1, len(text)))
    damaged = {
        "cut": text[:at],
        "byte": text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :],
        "repeat": text[:at] + text[max(0, at - 40) :],
        "nest": b"[" * 100_000,
        "null": text[:at] + b"\0" + text[at:],
    }
    way = chance.choice(list(damaged))
    file.write_bytes(damaged[way])
    return f"{file.name}: {way} at {at}"


def change_header(folder: Path, chance: random.Random) -> str:
    """Change an entry of a safetensors header."""
    file = chance.choice(sorted(folder.glob("*.safetensors")))
    header, data = _split(file)
    name = chance.choice([name for name in header if name != "__metadata__"])
    way = chance.choice(["drop", "rename", "shape", "dtype", "offset"])
    if way == "drop":
        del header[name]
    elif way == "rename":
        header[name + chance.choice(["x", ".weight", "\0"])] = header.pop(name)
    elif way == "shape":
        header[name]["shape"] = chance.choice([[], [1], [0], [2**40, 2], header[name]["shape"][::-1]])
    elif way == "dtype":
        header[name]["dtype"] = chance.choice(["F16", "BF16", "F64", "I32", "U8", "X", "F8_E4M3"])
    else:
        header[name]["data_offsets"] = [chance.randrange(-4, 2**20), chance.randrange(2**40)]
    _join(file, header, data)
    return f"{file.name}: {way} of {name}"


def change_data(folder: Path, chance: random.Random) -> str:
    """Change some bytes of a tensor's data, or cut the file."""
    file = chance.choice(sorted(folder.glob("*.safetensors")))
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    if chance.random() < 0.3:
        file.write_bytes(content[:at])
        return f"{file.name} is cut at {at}"
    content[at : at + 4] = chance.choice([b"\xff\xff\xff\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\x7f", os.urandom(4)])
    file.write_bytes(content)
    return f"{file.name}: bytes at {at}"


def change_files(folder: Path, chance: random.Random) -> str:
    """Remove a file, empty it, make a folder of it, or a link to somewhere else."""
    file = chance.choice(sorted(folder.iterdir()))
    way = chance.choice(["remove", "empty", "folder", "link", "loop"])
    file.unlink()
    if way == "empty":
        file.touch()
    elif way == "folder":
        file.mkdir()
    elif way == "link":
        file.symlink_to("/etc/hostname")
    elif way == "loop":
        file.symlink_to(file.name)
    return f"{file.name}: {way}"


MUTATIONS: tuple[Mutation, ...] = (
    change_config, change_config, change_config, change_value, change_text, change_header, change_data, change_files,
)  # fmt: skip


def make_sound(folder: Path) -> list[Path]:
    """Sound checkpoints that the others are made of."""
    llama = tiny_lm.write_llama(folder / "llama")
    quantize(llama, folder / "packed", Recipe.of(weights="4:g16", kv=8))
    others = [write_checkpoint(folder / kind, kind) for kind in ("diffllama", "unilm-v1", "unilm-v2", "motif-grouped")]
    return [llama, folder / "packed", *others, *(_write_stretched(folder / r["rope_type"], r) for r in _STRETCHED)]


def _write_stretched(folder: Path, rope: dict[str, Any]) -> Path:
    write_checkpoint(folder, "diffllama")
    edit_json(folder / "config.json", rope_parameters=rope)
    return folder


def judge(sound: Path, place: Path, seed: int) -> tuple[str, str]:
    """What comes of one changed checkpoint: a word, and what was changed."""
    chance = random.Random(seed)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    changed = Path(shutil.copytree(sound, place / "model"))
    what = f"seed {seed}, {sound.name}: {chance.choice(MUTATIONS)(changed, chance)}"
    child = os.fork()
    if not child:
        os._exit(_verdict(changed, place / "out"))
    return _wait(child), what


def _verdict(model: Path, output: Path) -> int:
    """Exit status of a process that uses a checkpoint, as `_STATUS` names them."""
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    before = _contents(model)
    status = _use(model, output)
    if _contents(model) != before:
        return 8
    left = {entry.name for entry in output.parent.iterdir()} - {model.name, output.name}
    return 7 if left else status


def _use(model: Path, output: Path) -> int:
    ids = torch.arange(1, 9)[None]
    copied = False
    try:
        packed = "quantization_config" in json.loads((model / "config.json").read_bytes() or b"{}")
    except (OSError, ValueError, TypeError, RecursionError):
        packed = False
    try:
        inspect_checkpoint(model)
        if not packed:
            quantize(model, output, Recipe.of(weights="8:row"))
            copied = True
        finite = [_computes(path, ids) for path in ([model] if packed else [model, output])]
        if (model / "tokenizer.json").exists():
            load_tokenizer(model)
    except DiffQuantError as error:
        tokenizer = "tokenizer" in str(error)
        return 5 if copied and not tokenizer else 3
    except BaseException:
        return 4
    return 0 if all(finite) else 6


def _computes(path: Path, ids: torch.Tensor) -> bool:
    """Whether a model's logits are finite, or its weights so large that float32 cannot hold its products."""
    model = load(path)
    largest = max(float(weight.abs().max()) for weight in model.state_dict().values())
    return largest > _HUGE or bool(torch.isfinite(model(ids).logits).all())


def _wait(child: int) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return _STATUS.get(os.waitstatus_to_exitcode(status), f"ended by {status}")
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hang"


def _contents(folder: Path) -> object:
    return contents_of_files(folder) if folder.is_dir() else None


def contents_of_files(folder: Path) -> dict[str, bytes]:
    """The bytes of each plain file of a folder, links and folders left out."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and not file.is_symlink()}


def _json_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key of a value in plain data."""
    if isinstance(content, dict | list):
        keys = list(content) if isinstance(content, dict) else range(len(content))
        for key in keys:
            yield content, key
            yield from places(content[key])


def _split(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _join(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def try_checkpoints(folder: Path, seeds: range) -> tuple[dict[str, Counter[str]], list[str]]:
    """Judge changed checkpoints of many seeds; by kind how many came to what, and a line for each that went wrong."""
    sound = make_sound(folder)
    counts: dict[str, Counter[str]] = {folder.name: Counter() for folder in sound}
    wrong = []
    for seed in seeds:
        chosen = sound[seed % len(sound)]
        verdict, what = judge(chosen, folder / "changed", seed)
        counts[chosen.name][verdict] += 1
        if verdict not in ("works", "refused"):
            wrong.append(f"{verdict}: {what}")
    return counts, wrong


if __name__ == "__main__":
    raise SystemExit(run(__doc__.splitlines()[0], try_checkpoints))
