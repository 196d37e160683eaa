"""Attacks: what a stranger could give to a command, and which of its commands then have to say what is wrong."""

import json
import lzma
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from diffquant.onnx import ExportOptions, export
from diffquant.quantization.engine_folder import make_modelling_text
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.attacks.contents import FILES
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.packed_folders import write_packed

CHECKPOINT = ("inspect", "plan", "quantize", "export", "generate", "eval", "serve")
EXPORT = ("inspect", "run", "verify", "eval")
RESULTS = ("report", "compare")
_SLOW = "(([a-z0-9_.])+)+!"
_CODE = "open('EXECUTED', 'w').close()\n"


@dataclass(frozen=True)
class Attack:
    """Something hostile.

    Attributes:
        name: what it is, for people.
        base: name of the sound folder or file that it starts from.
        make: function that makes a copy of it hostile.
        commands: commands that read it.
        harmless: those of them that may end well, since they need nothing of what is hostile.
    """

    name: str
    base: str
    make: Callable[[Path], object]
    commands: tuple[str, ...] = CHECKPOINT
    harmless: tuple[str, ...] = ()


def make_sound(folder: Path) -> dict[str, Path]:
    """Sound folders and files by name."""
    lm = tiny_lm.write_diff_v2(folder / "checkpoint")
    write_checkpoint(folder / "llama", "llama")
    write_packed(folder / "gptq", "gptq")
    quantize(lm, folder / "packed", Recipe.of(weights="4:g16"))
    export(lm, folder / "export", ExportOptions())
    (folder / "gguf").mkdir()
    write_gguf(folder / "gguf/model.gguf", folder / "llama")
    for name in ("results", "recipe"):
        (folder / name).mkdir()
    return {place.name: place for place in folder.iterdir()}


def _put(content: str, name: str) -> Callable[[Path], object]:
    """A file of tests/attacks/files under the name of one in the folder."""
    return lambda folder: shutil.copyfile(FILES / content, folder / name)


def _code(folder: Path) -> None:
    """Code in the folder and beside it, where an auto_map would find it."""
    for place in (folder, folder.parent / "outside"):
        place.mkdir(exist_ok=True)
        (place / "evil.py").write_text(_CODE)


def _auto_map(file: str, value: object) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        _code(folder)
        edit_json(folder / file, auto_map=value, tokenizer_class="Evil") if "tokenizer" in file else edit_json(
            folder / file, auto_map=value
        )

    return make


def _linked_code(folder: Path) -> None:
    _auto_map("config.json", {"AutoConfig": "sub/evil.Evil"})(folder)
    (folder / "sub").symlink_to(folder.parent / "outside")


def _model_type(folder: Path) -> None:
    """Code that is diffquant's own but for what the model_type adds."""
    kind = 'x"; open("EXECUTED", "w").close(); Z = "'
    edit_json(folder / "config.json", model_type=kind)
    (folder / "modeling_diffquant.py").write_text(make_modelling_text("modeling_diffquant.py", kind))


def _entry(**entry: Any) -> Callable[[Path], object]:
    """Change entries of quantization_config."""

    def make(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        edit_json(folder / "config.json", quantization_config=config["quantization_config"] | entry)

    return make


def _slow_target(folder: Path) -> None:
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    (name,) = groups
    _entry(config_groups={name: groups[name] | {"targets": [f"re:{_SLOW}", "Linear"]}})(folder)


def _many_names(file: str, count: int = 100_000) -> Callable[[Path], object]:
    """JSON of so many names, the first of them twice."""

    def make(folder: Path) -> None:
        text = (folder / file).read_text().rstrip().removesuffix("}")
        names = "".join(f',"k{n}":0' for n in range(count))
        (folder / file).write_text(f'{text}{names},"k0":0}}')

    return make


def _many_names_in_header(folder: Path) -> None:
    """A safetensors header whose metadata have so many names, one of them twice."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    names = b",".join(b'"k%d":""' % n for n in range(100_000))
    header = header.replace(b'{"__metadata__":{', b'{"__metadata__":{' + names + b',"k0":"",', 1)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


def _index(target: str) -> Callable[[Path], object]:
    """An index whose shard is a file elsewhere."""

    def make(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.mkdir(exist_ok=True)
        os.rename(folder / "model.safetensors", outside / "secret.safetensors")
        path = target.format(outside=outside)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": path}})
        )

    return make


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Something that is no plain file, in place of a file."""

    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def _link_to(target: str) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        outside = path.parent.parent / "outside"
        outside.mkdir(exist_ok=True)
        (outside / "secret").write_text("{}")
        path.symlink_to(target.format(outside=outside))

    return make


def _tokenizer(**entry: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "tokenizer.json", **entry)


def _slow_splits(folder: Path) -> None:
    """A pattern that goes back and forth over what generate and eval read."""
    split = {"type": "Split", "pattern": {"Regex": "((?:[a-zA-Z ])+)+!!"}, "behavior": "Isolated", "invert": False}
    _tokenizer(pre_tokenizer=split)(folder)


def _graph(change: Callable[[onnx.ModelProto], object]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        change(model)
        onnx.save(model, folder / "model.onnx")

    return make


def _external(**entries: str) -> Callable[[Path], object]:
    """Other places of external data."""

    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.external_data:
                kept = {entry.key: entry.value for entry in tensor.external_data} | entries
                del tensor.external_data[:]
                for key, value in kept.items():
                    tensor.external_data.add(key=key, value=value)

    return _graph(change)


def _data_and_outside(folder: Path) -> tuple[Path, Path]:
    """An exported folder's external data, and a new folder beside it."""
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    return next(file for file in folder.iterdir() if re.match(r"model\.onnx.", file.name)), outside


def _outside_data(path: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        data, outside = _data_and_outside(folder)
        shutil.copyfile(data, outside / "secret.data")
        _external(location=path.format(outside=outside))(folder)

    return make


def _linked_data(target: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        data, outside = _data_and_outside(folder)
        os.rename(data, outside / "secret.data")
        data.symlink_to(target.format(outside=outside))

    return make


def _attributes(**values: int) -> Callable[[Path], object]:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name in values:
                    attribute.i = values[attribute.name]

    return _graph(change)


def _expands(name: str) -> Callable[[Path], object]:
    """A result that is 3 GB once expanded."""

    def make(folder: Path) -> None:
        compressor, zeros = lzma.LZMACompressor(preset=0), b"0" * (1 << 24)
        with (folder / name).open("wb") as file:
            file.write(compressor.compress(b'{"settings":{},"cells":"'))
            for _ in range(192):
                file.write(compressor.compress(zeros))
            file.write(compressor.flush())

    return make


def _nested_result(folder: Path) -> None:
    shutil.copyfile(FILES / "nested.json", folder / "sweep.json")


_IN_HEADER = partial(Attack, base="checkpoint")
_IGNORED = tuple(command for command in CHECKPOINT if command != "serve")
_OF_TOKENIZER = ("inspect", "plan", "quantize", "export", "serve")

ATTACKS = (
    *(
        _IN_HEADER(f"safetensors: {name}", make=_put(name, "model.safetensors"))
        for name in sorted(file.name for file in FILES.glob("*.safetensors"))
    ),
    Attack("safetensors: 100,000 names, one twice", "checkpoint", _many_names_in_header),
    Attack(
        "a pickle beside no safetensors",
        "checkpoint",
        _instead("model.safetensors", lambda path: _put("pytorch_model.bin", "pytorch_model.bin")(path.parent)),
    ),
    *(
        Attack(f"config.json: {name}", "checkpoint", _put(name, "config.json"))
        for name in sorted(file.name for file in FILES.glob("*.json"))
    ),
    Attack("config.json: 100,000 names, one twice", "checkpoint", _many_names("config.json")),
    Attack(
        "tokenizer_config.json: 100,000 names, one twice",
        "checkpoint",
        _many_names("tokenizer_config.json"),
        # `serve` looks at every entry of the file, both of one name included.
        harmless=("inspect", "plan", "serve"),
    ),
    *(
        Attack(f"auto_map: {name}", "packed", _auto_map("config.json", {"AutoConfig": value}), harmless=_IGNORED)
        for name, value in {
            "code of the folder": "evil.Evil",
            "code beside it": "outside--evil.Evil",
            "code above it": "../outside/evil.Evil",
            "code of the hub": "evilorg/evil--evil.Evil",
        }.items()
    ),
    Attack("auto_map: code in a linked folder", "packed", _linked_code, harmless=_IGNORED),
    Attack(
        "auto_map: a tokenizer's code beside it",
        "packed",
        _auto_map("tokenizer_config.json", {"AutoTokenizer": [None, "outside--evil.Evil"]}),
        harmless=_IGNORED,
    ),
    Attack("a model_type that is code", "packed", _model_type, harmless=_IGNORED),
    Attack("a slow pattern in GPTQ's dynamic", "gptq", _entry(dynamic={_SLOW: {"bits": 4}}), harmless=CHECKPOINT),
    Attack("a slow pattern in compressed-tensors' targets", "packed", _slow_target, harmless=CHECKPOINT),
    Attack(
        "a slow pattern in compressed-tensors' ignore", "packed", _entry(ignore=[f"re:{_SLOW}"]), harmless=CHECKPOINT
    ),
    *(
        Attack(f"an index: shard {path}", "checkpoint", _index(path))
        for path in (
            "../outside/secret.safetensors",
            "{outside}/secret.safetensors",
            "/dev/zero",
            "../../../etc/passwd",
        )
    ),
    *(
        Attack(f"{name}: a FIFO", "checkpoint", _instead(name, os.mkfifo), harmless=harmless)
        for name, harmless in {
            "config.json": (),
            "model.safetensors": (),
            "tokenizer.json": ("inspect", "plan"),
            "tokenizer_config.json": ("inspect", "plan"),
            "generation_config.json": CHECKPOINT,
        }.items()
    ),
    *(
        Attack(f"{name}: a link to {target}", "checkpoint", _instead(name, _link_to(target)), harmless=harmless)
        for name, harmless in {
            "config.json": (),
            "model.safetensors": (),
            "tokenizer.json": ("inspect", "plan"),
        }.items()
        for target in ("{outside}/secret", "/dev/zero", "/proc/self/mem")
    ),
    Attack("tokenizer.json: nested", "checkpoint", _put("nested.json", "tokenizer.json"), harmless=_OF_TOKENIZER),
    Attack("tokenizer.json: a slow pattern", "checkpoint", _slow_splits, harmless=CHECKPOINT),
    *(
        Attack(f"GGUF: {name}", "gguf", _put(name, "model.gguf"), CHECKPOINT[:-1])
        for name in sorted(file.name for file in FILES.glob("*.gguf"))
    ),
    *(
        Attack(f"a recipe: {name}", "recipe", _put(name, "recipe.yaml"), ("recipe",))
        for name in sorted(file.name for file in FILES.glob("*.yaml"))
    ),
    Attack("ONNX: data above the folder", "export", _outside_data("../outside/secret.data"), EXPORT),
    Attack("ONNX: data at an absolute path", "export", _outside_data("{outside}/secret.data"), EXPORT),
    Attack("ONNX: data behind a link", "export", _linked_data("{outside}/secret.data"), EXPORT),
    Attack("ONNX: data without end", "export", _linked_data("/dev/zero"), EXPORT),
    Attack("ONNX: an offset beyond the end", "export", _external(offset=str(2**40)), EXPORT),
    Attack("ONNX: a negative offset", "export", _external(offset="-4096"), EXPORT),
    Attack("ONNX: a length of 2^62", "export", _external(length=str(2**62)), EXPORT),
    Attack(
        "ONNX: attributes whose product is 0",
        "export",
        _attributes(num_pairs=2**32, num_kv_pairs=2**32, signals_per_noise=2**32),
        EXPORT,
    ),
    Attack("ONNX: attributes of 2^63 - 1", "export", _attributes(num_pairs=2**63 - 1, num_kv_pairs=2**63 - 1), EXPORT),
    Attack("ONNX: attributes of 0", "export", _attributes(num_pairs=0, num_kv_pairs=0), EXPORT),
    Attack("a sweep's result that expands", "results", _expands("sweep.json.xz"), RESULTS),
    Attack("a fidelity's result that expands", "results", _expands("fidelity.json.xz"), RESULTS),
    Attack("a sweep's result: nested", "results", _nested_result, RESULTS),
)
