"""Contents of the hostile files in tests/attacks/files, and what each of them tries.

`python -m tests.attacks.contents` writes the files again.
"""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = Path(__file__).with_name("files")
_FLOATS = b"\0\0\x80\x3f" * 8


def safetensors(header: Any, data: bytes = _FLOATS, length: int | None = None) -> bytes:
    """A safetensors file with a header, plain data or text, and a stated length of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class _Runs:
    """What runs a program when a pickle that holds it is read."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return eval, ("__import__('os').system('touch EXECUTED')",)


def _gguf(tensors: int, entries: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest


def _gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


_ARCHITECTURE = _gguf_text(b"general.architecture") + struct.pack("<I", 8) + _gguf_text(b"llama")


def _gguf_tensor(name: bytes, dims: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    return _gguf_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


# Name of the file -> what it tries, and its bytes.
CONTENTS: dict[str, tuple[str, bytes]] = {
    "overlap.safetensors": (
        "two tensors share bytes",
        safetensors({"a": tensor(0, 32, [8]), "b": tensor(16, 32, [4])}),
    ),
    "hole.safetensors": (
        "bytes between two tensors belong to neither",
        safetensors({"a": tensor(0, 8, [2]), "b": tensor(16, 32, [4])}),
    ),
    "length-2-63.safetensors": ("the header is said to be of 2^63 bytes", safetensors({}, length=2**63)),
    "length-beyond-end.safetensors": ("the header is said to be of 10^8 - 1 bytes", safetensors({}, length=10**8 - 1)),
    "name-twice.safetensors": (
        "one name has two tensors",
        safetensors(
            b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}'
        ),
    ),
    "offset-negative.safetensors": ("a tensor begins before the data", safetensors({"a": tensor(-4, 28, [8])})),
    "offset-beyond-end.safetensors": ("a tensor ends after the file", safetensors({"a": tensor(0, 2**40, [2**38])})),
    "shape-overflow.safetensors": (
        "a shape whose size is 0 in 64 bits",
        safetensors({"a": tensor(0, 0, [2**32, 2**32])}, b""),
    ),
    "nested.safetensors": ("the header is nested 20,000 deep", safetensors(b"[" * 20_000)),
    "no-object.safetensors": ("the header is a list", safetensors([])),
    "pickle.safetensors": ("a pickle that runs a program, named as if it were none", pickle.dumps(_Runs())),
    "pytorch_model.bin": ("a pickle that runs a program", pickle.dumps(_Runs())),
    "nested.json": ("nested 3,000 deep", b'{"a":' * 3000),
    "numbers.json": ("a number of 5,000 digits", b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}"),
    "name-twice.json": ("one key twice", b'{"model_type": "llama", "model_type": "diffllama"}'),
    "offset-beyond-end.gguf": (
        "a tensor begins after the file",
        _gguf(1, 1, _ARCHITECTURE + _gguf_tensor(b"output_norm.weight", (8,), 2**40)),
    ),
    "offset-2-63.gguf": (
        "a tensor's offset is 2^63 + 32",
        _gguf(1, 1, _ARCHITECTURE + _gguf_tensor(b"output_norm.weight", (8,), 2**63 + 32)),
    ),
    "name-twice.gguf": (
        "one name has two tensors",
        _gguf(2, 1, _ARCHITECTURE + 2 * _gguf_tensor(b"output_norm.weight", (8,), 0) + b"\0" * 64),
    ),
    "dims-overflow.gguf": (
        "dimensions whose product is 0 in 64 bits",
        _gguf(1, 1, _ARCHITECTURE + _gguf_tensor(b"token_embd.weight", (2**32, 2**32), 0)),
    ),
    "tensors-2-63.gguf": ("2^63 tensors are said to follow", _gguf(2**63, 1, _ARCHITECTURE)),
    "text-2-63.gguf": ("a text of 2^63 bytes is said to follow", _gguf(0, 1, struct.pack("<Q", 2**63) + b"general")),
    "list-2-60.gguf": (
        "a list of 2^60 numbers is said to follow",
        _gguf(0, 1, _gguf_text(b"a") + struct.pack("<IIQ", 9, 4, 2**60)),
    ),
    "lists-nested.gguf": (
        "lists of lists, 2,000 deep",
        _gguf(0, 1, _gguf_text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000),
    ),
    "aliases.yaml": (
        "aliases of aliases, 10^9 values in all",
        b"a0: &a0 [4:g32, 4:g32]\n"
        + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 10))
        + b"weights: *a9\n",
    ),
    "alias-of-itself.yaml": ("a list that holds itself", b"weights: &a [*a]\n"),
    "tag.yaml": ("a tag that runs a program", b"weights: !!python/object/apply:os.system ['touch EXECUTED']\n"),
    "nested.yaml": ("nested 5,000 deep", b"weights: " + b"[" * 5000),
}


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for name, (_, content) in CONTENTS.items():
        (FILES / name).write_bytes(content)
