"""What is compared of a file or a text: plain data that a reviewer can read, without what changes from run to run."""

import hashlib
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import torch
from safetensors import safe_open

# Times, versions, digests of the code and what a folder is called on this machine.
_VOLATILE_KEYS = re.compile(
    r"(seconds|_s|date|commit|code|version|versions|torch|python|platform|processor|machine|threads|cores|host"
    r"|diffquant|producer_version|onnxruntime|transformers|transformers_version|packages|instructions|kernel|peak_bytes"
    r"|kv_ranges\.safetensors|process_peak|memory|tokens_per_second|sha256)$"
)
_VOLATILE_TEXT = (
    (re.compile(r"\b\d+(\.\d+)? (s|ms|seconds|minutes|min)\b"), "N s"),
    (re.compile(r"\b\d+\.\d+\.\d+(\+\w+)?\b"), "VERSION"),
    (re.compile(r"ONNX Runtime \d+\.\d+"), "ONNX Runtime VERSION"),
    (re.compile(r"\b\d+(\.\d+)? tokens/s"), "N tokens/s"),
    (re.compile(r"process peak \d+ MB"), "process peak N MB"),
    (re.compile(r"\d+ of \d+ cells were measured by code with uncommitted changes\.\n"), ""),
    (re.compile(r"\d{4}-\d\d-\d\d( \d\d:\d\d UTC)?"), "DATE"),
)
_PICTURES = (".png", ".svg", ".html")


def view(path: Path, is_exact: bool) -> Any:
    """A file as plain data: tensors by dtype, shape and digest, JSON by its values, a graph by its nodes.

    A tokenizer is long and copied as it is: its digest stands for it.
    """
    match path.suffix:
        case ".safetensors":
            return _tensors(path, is_exact)
        case ".onnx":
            return _graph(path, is_exact)
        case ".json" if path.name == "tokenizer.json":
            return _digest(json.dumps(stable(json.loads(path.read_text())), sort_keys=True).encode())
        case ".json":
            return stable(json.loads(path.read_text()))
        case ".jsonl":
            return [stable(json.loads(line)) for line in path.read_text().splitlines()]
        case ".md" | ".yaml" | ".csv" | ".txt":
            return stable_text(path.read_text()).splitlines()
        case suffix if suffix in _PICTURES:
            return "there"
    return _digest(path.read_bytes()) if is_exact else "there"


def stable(value: Any) -> Any:
    """Plain data without what changes from run to run."""
    if isinstance(value, dict):
        return {key: "VOLATILE" if _VOLATILE_KEYS.search(key) else stable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [stable(item) for item in value]
    return stable_text(value) if isinstance(value, str) else value


def stable_text(text: str) -> str:
    for pattern, word in _VOLATILE_TEXT:
        text = pattern.sub(word, text)
    return text


def differences(old: Any, new: Any, is_exact: bool, where: str = "") -> list[str]:
    """Places where two views differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [
            line
            for name in names
            for line in differences(old.get(name, "ABSENT"), new.get(name, "ABSENT"), is_exact, f"{where}/{name}")
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, is_exact, f"{where}[{i}]")]
    return [] if _same(old, new, is_exact) else [f"{where}: {old!r} became {new!r}"]


def _same(old: Any, new: Any, is_exact: bool) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        # Even where codes are exact, an error's mean is a sum whose order depends on the processor.
        return math.isclose(old, new, rel_tol=1e-6 if is_exact else 1e-2, abs_tol=1e-12 if is_exact else 1e-4)
    if is_exact or type(old) is not type(new):
        return bool(old == new)
    if isinstance(old, str):
        return _words(old) == _words(new)
    return bool(old == new)


def _words(text: str) -> list[str]:
    """The words of a text without fractions, whose last digit depends on the processor, and without their digests."""
    return re.sub(r"-?\d+\.\d+|\b[0-9a-f]{32}\b", "F", text).split()


def _tensors(path: Path, is_exact: bool) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        metadata = stable({key: _data(value) for key, value in sorted((file.metadata() or {}).items())})
    shown = {}
    for name, tensor in tensors.items():
        kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        shown[name] = f"{kind} {_digest(raw)}" if is_exact else kind
    return {"metadata": metadata, "tensors": shown}


def _data(text: str) -> Any:
    """What a text says as JSON, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _graph(path: Path, is_exact: bool) -> dict[str, Any]:
    model = onnx.load(path, load_external_data=False)
    kinds = Counter(node.op_type for node in model.graph.node)
    nodes = [f"{node.op_type}({', '.join(node.input)}) -> {', '.join(node.output)}" for node in model.graph.node]
    bodies = {f.name: [node.op_type for node in f.node] for f in model.functions}
    inline = b"".join(each.SerializeToString(deterministic=True) for each in model.graph.initializer)
    return {
        "inputs": [value.name for value in model.graph.input],
        "outputs": [value.name for value in model.graph.output],
        "opsets": {each.domain: each.version for each in model.opset_import},
        "functions": bodies,
        "nodes": _digest("\n".join(nodes).encode()),
        "kinds": dict(sorted(kinds.items())),
        "initializers": [f"{each.name} {each.data_type} {list(each.dims)}" for each in model.graph.initializer],
        "constants": _digest(inline) if is_exact else "there",
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
