"""Inputs other than checkpoints with something wrong in them: each is refused in a line, or read as what it says.

A sound scheme, recipe, file of items, labelled text, search journal, sweep cell, file of ranges or GGUF file is changed
in one to three places and read. Allowed are a DiffQuantError and a value that can be true; of journals, cells and
ranges that is what was written, since their damage must never pass for a measurement. A foreign exception, a hang or
another value are not.

    python -m tests.fuzz.inputs --count 10000
"""

import gzip
import json
import lzma
import random
import signal
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from diffquant.checkpoints.imatrix import read_imatrix, write_imatrix
from diffquant.checkpoints.ranges import Ranges, read_any_ranges, write_ranges
from diffquant.errors import DiffQuantError
from diffquant.measure.cells import Cell
from diffquant.measure.protocols.hellaswag import load_items
from diffquant.measure.results import TaskResult
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.support.outputs import Journal
from examples.shots.labelled import load_dataset
from tests.fuzz.checkpoints import ODD, SECONDS, places
from tests.fuzz.program import run
from tests.support.checkpoints import write_llama
from tests.support.gguf_files import write_gguf

_NASTY = (
    b"\0", b"\xff\xfe", b"\xd9\xa4", b"\xe2\x80\xa8", b"9" * 5000, b"-", b":", b"e999", b"NaN", b"null", b"[" * 9,
    b"{}", b"\"", b"'", b"\\", b"\n", b"\r", b"\t", b"&a [*a, *a]", b"!!python/object", b"1e400", b"true", b"=", b"$",
)  # fmt: skip

SCHEMES = (b"4:g32", b"6:row", b"8:tensor", b"16", b"4:row:shift", b"8:static", b"4:c64", b"6:b128", b"5:head:alike")
RECIPE = b"""weights: 4:g32
k: 8:c64
v: 4:g32
logits: 6:row:shift
residual: 16
rounding: mse
overrides:
  "*.mlp.*": 6:row
  "*.layers.1.*.logits": 8:row
"""
ITEMS = b"\n".join(
    json.dumps({"query": f"query {n}", "endings": ["one", "two", "three"], "label": n % 3}).encode() for n in range(4)
)
LABELLED = {
    ".jsonl": b'{"text": "how far", "label": "distance"}\n{"text": "who", "label": "person"}\n',
    ".csv": b'text,label\nhow far,distance\n"who, then",person\n',
    ".tsv": b"text\tlabel\nhow far\tdistance\nwho\tperson\n",
    ".label": b"NUM:dist How far is it ?\nHUM:ind Who was it ?\n",
    ".json": b'{"train": [["how far", "distance"], ["who", "person"]], "test": [["how long", "distance"]]}',
}


class _Hang(BaseException):
    """An input took longer than it may; no `except Exception` holds it up."""


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        sound: contents that are read without complaint.
        judge: function of a content that reads it; returns whether what it gives can be true, and None where damage
            was noticed and the measurement would be made again.
    """

    sound: tuple[bytes, ...]
    judge: Callable[[bytes], bool | None]


def kinds(folder: Path) -> dict[str, Kind]:
    """Every kind of input by its name, with files in a folder."""
    return {
        "schemes": Kind(SCHEMES, _scheme_is_itself),
        "recipes": Kind((RECIPE,), _reading(folder / "recipe.yaml", _recipe_is_itself)),
        "items": Kind(
            (ITEMS, gzip.compress(ITEMS), lzma.compress(ITEMS)), _reading(folder / "items.jsonl", _items_can_be_scored)
        ),
        "labelled texts": _labelled(folder),
        "journals": _journals(folder),
        "cells": _cells(folder),
        "ranges": _ranges(folder),
        "GGUF files": _gguf(folder),
        "imatrices": _imatrices(folder),
    }


def _reading(path: Path, judge: Callable[[Path], bool]) -> Callable[[bytes], bool]:
    def written_and_read(content: bytes) -> bool:
        path.write_bytes(content)
        return judge(path)

    return written_and_read


def _scheme_is_itself(content: bytes) -> bool:
    scheme = Scheme.parse(content.decode("utf-8", "surrogateescape"))
    return Scheme.parse(str(scheme)) == scheme and (scheme.bits == 16 or 2 <= scheme.bits <= 8)


def _recipe_is_itself(path: Path) -> bool:
    recipe = Recipe.read(path)
    return Recipe.from_dict(recipe.to_dict()) == recipe


def _items_can_be_scored(path: Path) -> bool:
    return all(0 <= item.label < len(item.endings) and all(item.endings) for item in load_items(path))


def _labelled(folder: Path) -> Kind:
    suffix_of = {content: suffix for suffix, content in LABELLED.items()}

    def judge(content: bytes) -> bool:
        # A changed content is read under the suffix of each format in turn, as files are that were named wrongly.
        refusals = []
        for suffix in suffix_of.values():
            path = folder / f"labelled{suffix}"
            path.write_bytes(content)
            try:
                dataset = load_dataset(path, None if suffix == ".json" else path)
            except DiffQuantError as error:
                refusals.append(error)
                continue
            if not all(e.text.strip() and e.label.strip() for e in (*dataset.train, *dataset.test)):
                return False
        if len(refusals) == len(suffix_of):
            raise refusals[0]
        return True

    return Kind(tuple(suffix_of), judge)


def _journals(folder: Path) -> Kind:
    key = {"model": "ab" * 32, "window": 64}
    written = {f"layers.{n}.q_proj 4:g32": {"kl": 0.1 + n, "attention": None if n else 0.5} for n in range(4)}
    journal = Journal(folder / "journal", key)
    for name, result in written.items():
        journal.add(name, result)
    path = journal.path

    def judge(content: bytes) -> bool | None:
        path.write_bytes(content)
        again = Journal(folder / "journal", key)
        kept = {name: again.get(name) for name in written if again.get(name) is not None}
        if len(again) != len(kept) or any(kept[name] != written[name] for name in kept):
            return False
        return True if kept == written else None

    return Kind((path.read_bytes(),), judge)


def _cells(folder: Path) -> Kind:
    key = {"model": "ab" * 32, "task": {"name": "hellaswag", "n": 3}}
    cell = Cell(None, "hellaswag", key=key, folder=folder)
    items = {"score": 0.5, "n": 2, "values": [0.0, 1.0], "choices": [1, 2], "kl": 0.25}
    stored = {"seconds": 1.5, "stored": {"weights": 1000, "kv_per_token": 12.5}, "commit": "abc123"}
    measured = {"metric": "acc_norm", **items, **stored, "logit_report": [{"layer": 0, "clipped": 0.125}]}
    cell.write(TaskResult.from_dict(measured))

    def judge(content: bytes) -> bool | None:
        cell.path.write_bytes(content)
        read = cell.read()
        return None if read is None else read.to_cell() == measured

    return Kind((cell.path.read_bytes(),), judge)


def _ranges(folder: Path) -> Kind:
    path = folder / "scales.safetensors"
    torch.manual_seed(0)
    tensors = {f"layers.{n}.{target}": torch.rand(2, 4) + 0.5 for n in range(2) for target in ("k", "v")}
    written = Ranges("ab" * 32, {"tokens": 64, "observer": {"kind": "absmax"}}, 8, tensors)
    write_ranges(path, written)

    def is_what_was_written(path: Path) -> bool:
        read = read_any_ranges(path)
        same = (read.model, read.settings, read.bits) == (written.model, written.settings, written.bits)
        return same and read.tensors.keys() == tensors.keys() and read.digest == written.digest

    return Kind((path.read_bytes(),), _reading(path, is_what_was_written))


def _gguf(folder: Path) -> Kind:
    stated = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    scaled = write_gguf(folder / "scaled.gguf", write_llama(folder / "scaled"), metadata=stated).read_bytes()
    divisors = {"rope_freqs.weight": [1.0, 1.0, 1.0, 1.7096465, 8.0, 8.0, 8.0, 8.0]}
    path = write_gguf(folder / "tiny.gguf", write_llama(folder / "llama"), tensors=divisors)
    ids = torch.arange(1, 9)[None]

    def computes(path: Path) -> bool:
        return bool(torch.isfinite(load(path, dtype=torch.float32)(ids).logits).all())

    return Kind((path.read_bytes(), scaled), _reading(path, computes))


def _imatrices(folder: Path) -> Kind:
    path, means = folder / "imatrix.gguf", {f"blk.{n}.attn_q.weight": torch.arange(1, 9) / 2**n for n in range(3)}
    write_imatrix(path, means, "llama", ["books.txt"], 3, 4)
    older = struct.pack("<i", len(means)) + b"".join(
        struct.pack(f"<i{len(name)}sii8f", len(name), name.encode(), 1, 8, *values.tolist())
        for name, values in means.items()
    )

    def has_importance(path: Path) -> bool:
        return all(bool(((values >= 0) & values.isfinite()).all()) for values in read_imatrix(path).means.values())

    return Kind((path.read_bytes(), older + struct.pack("<ii9s", 3, 9, b"books.txt")), _reading(path, has_importance))


def changed(content: bytes, chance: random.Random) -> bytes:
    """A content with one to three changes."""
    for _ in range(chance.randint(1, 3)):
        content = chance.choice((_change_bytes, _change_bytes, _change_value))(content, chance)
    return content


def _change_bytes(content: bytes, chance: random.Random) -> bytes:
    # Headers come first, and most of a large file is data that any bytes may be.
    at = chance.randrange(max(1, min(len(content), 20_000)))
    end = at + chance.choice((1, 1, 2, 8, 40))
    ways = (
        lambda: content[:at],
        lambda: content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :],
        lambda: content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :] if content else b"",
        lambda: content[:at] + content[end:],
        lambda: content[:end] + content[at:],
        lambda: content[:at] + chance.choice(_NASTY) + content[at:],
        lambda: content[:at] + chance.choice(_NASTY) + content[end:],
        lambda: chance.choice((b"", b"[" * 100_000, b'{"a":' * 50_000, content * 2)),
    )
    return chance.choice(ways)()


def _change_value(content: bytes, chance: random.Random) -> bytes:
    """Something odd in place of a value of a line, or of a whole text, that is JSON."""
    lines = content.split(b"\n") if chance.random() < 0.7 else [content]
    number = chance.randrange(len(lines))
    try:
        data = json.loads(lines[number])
        holder, key = chance.choice(list(places(data)))
    except (ValueError, IndexError, RecursionError):
        return _change_bytes(content, chance)
    holder[key] = chance.choice(ODD)
    lines[number] = json.dumps(data).encode()
    return b"\n".join(lines)


def verdict_on(kind: Kind, content: bytes) -> str:
    """What comes of one content: "works", "refused", or what went wrong."""

    def end(*_: object) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        is_true = kind.judge(content)
    except DiffQuantError as error:
        return "refused" if len(str(error)) < 4000 else "an error of many pages"
    except _Hang:
        return "hang"
    except Exception as error:
        return f"foreign {type(error).__name__}: {str(error)[:80]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if is_true is None:
        return "refused"
    return "works" if is_true else "silently wrong"


def try_inputs(folder: Path, seeds: range) -> tuple[dict[str, Counter[str]], list[str]]:
    """Judge changed inputs of many seeds; by kind how many came to what, and a line for each that went wrong."""
    by_name = kinds(folder)
    names = list(by_name)
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    wrong = []
    for seed in seeds:
        name, chance = names[seed % len(names)], random.Random(seed)
        verdict = verdict_on(by_name[name], changed(chance.choice(by_name[name].sound), chance))
        counts[name][verdict] += 1
        if verdict not in ("works", "refused"):
            wrong.append(f"seed {seed}, {name}: {verdict}")
    return counts, wrong


if __name__ == "__main__":
    raise SystemExit(run(__doc__.splitlines()[0], try_inputs))
