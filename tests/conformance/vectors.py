"""The op's test vectors: how they are made, stored in vectors.json.xz, and read."""

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffquant.onnx.graph.op import VERSION, AttentionAttributes
from tests.conformance.formula import compute
from tests.conformance.op_call import OUTPUTS, Made, Vector, random_inputs

FILE = Path(__file__).parent / "vectors.json.xz"
_TYPES = {"float": "f4", "float16": "f2", "int8": "i1", "uint8": "u1", "int32": "i4"}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
# Digits that a float32 needs to be itself again.
_DIGITS = 9


_V2 = {"generation": 2}
_GROUPED = {"num_pairs": 8, "signals_per_noise": 4}
_TURNED = {"do_rotary": 1, "rotary_interleaved": 1}
VECTORS: Mapping[str, Made] = {
    "generation 1, first call": Made({}),
    "generation 1, rotated": Made(_TURNED, (5, 5)),
    "generation 1, one KV pair, rotated, decode": Made({"num_kv_pairs": 1} | _TURNED, (5,), new=1, past=4),
    "generation 1, chunk into a larger buffer": Made(_TURNED, (6,), new=3, past=9),
    "generation 1, ragged first call": Made(_TURNED, (2, 5, 4), past=0),
    "generation 1, ragged decode": Made(_TURNED, (2, 6, 4), new=1, past=7),
    "generation 1, lambda of each token": Made({}, per_token=True),
    "generation 1, window": Made({"local_window_size": 2} | _TURNED),
    "generation 2, first call": Made(_V2, per_token=True),
    "generation 2, one lambda": Made(_V2),
    "generation 2, rotated half": Made(_V2 | {"do_rotary": 1}, (5, 5), per_token=True),
    "generation 2, rotated interleaved, decode": Made(_V2 | _TURNED, (4, 4), new=1, past=3, per_token=True),
    "generation 2, window, decode": Made(_V2 | {"local_window_size": 3}, (6,), new=1, past=5, per_token=True),
    "8-bit cache, first call": Made({"kv_bit_width": 8} | _TURNED, past=0),
    "8-bit cache, decode": Made({"kv_bit_width": 8}, (5,), new=1, past=6),
    "6-bit cache, decode": Made({"kv_bit_width": 6} | _TURNED, (5,), new=1, past=6),
    "4-bit cache, generation 2, decode": Made(_V2 | {"kv_bit_width": 4}, (5,), new=1, past=4, per_token=True),
    "logits by row": Made({"logit_bits": 4, "logit_granularity": "row"}),
    "logits by head, shifted": Made({"logit_bits": 4, "logit_granularity": "head", "logit_shift": 1}, (5, 3), past=0),
    "logits by pair": Made({"logit_bits": 6, "logit_granularity": "pair"}, (5, 3), past=0),
    "logits by tensor, generation 2": Made(_V2 | {"logit_bits": 3, "logit_granularity": "tensor"}, per_token=True),
    "four signals to a noise": Made(_GROUPED | _TURNED, (5, 5)),
    "four signals to a noise, ragged decode": Made(_GROUPED | _TURNED, (5, 3), new=1, past=5),
    "three signals to a noise, one KV pair": Made({"num_pairs": 6, "num_kv_pairs": 1, "signals_per_noise": 3}),
    "four signals to a noise, 8-bit cache": Made(_GROUPED | {"kv_bit_width": 8}, (5,), new=1, past=4),
    "four signals to a noise, logits by pair": Made(_GROUPED | {"logit_bits": 5, "logit_granularity": "pair"}),
    "four signals to a noise, logits by tensor": Made(_GROUPED | {"logit_bits": 5, "logit_granularity": "tensor"}),
    "two gates": Made(_V2, per_token=True, gates={"signal_gate": "each"}),
    "one signal gate for all": Made({}, gates={"signal_gate": "scalar"}),
    "output gate": Made(_TURNED, gates={"output_gate": "each"}),
    "grouped generation 2 with an output gate, decode": Made(
        _GROUPED | _V2 | {"do_rotary": 1}, (4, 4), new=1, past=6, per_token=True, gates={"output_gate": "each"}
    ),
    "everything at once": Made(
        _GROUPED | _V2 | _TURNED | {"local_window_size": 3, "kv_bit_width": 8},
        (6,),
        new=2,
        past=8,
        per_token=True,
        gates={"signal_gate": "each", "output_gate": "each"},
    ),
    "float16, four signals to a noise": Made(_GROUPED | _TURNED, half=True),
    "float16, generation 2, gated": Made(
        _V2, per_token=True, gates={"signal_gate": "each", "output_gate": "each"}, half=True
    ),
}


def make_vectors() -> list[Vector]:
    """Every vector, computed by the formula."""
    return [_make(name, made, seed) for seed, (name, made) in enumerate(VECTORS.items())]


def read_vectors(file: Path = FILE) -> list[Vector]:
    """The vectors of a file that `write_vectors` wrote."""
    return [
        Vector(
            entry["name"],
            AttentionAttributes(**entry["attributes"]),
            {name: _array(tensor) for name, tensor in entry["inputs"].items()},
            {name: _array(entry[name]) for name in OUTPUTS},
        )
        for entry in json.loads(lzma.decompress(file.read_bytes()))["vectors"]
    ]


def write_vectors(vectors: list[Vector], file: Path = FILE) -> None:
    """Write vectors as compressed JSON, a line for each tensor."""
    entries = []
    for vector in vectors:
        lines = [f'"name": {json.dumps(vector.name)}', f'"attributes": {json.dumps(vector.attributes.to_dict())}']
        tensors = ",\n   ".join(f'"{name}": {_text(value)}' for name, value in vector.inputs.items())
        lines.append(f'"inputs": {{\n   {tensors}}}')
        lines += [f'"{name}": {_text(value)}' for name, value in vector.outputs.items()]
        entries.append("{" + ",\n  ".join(lines) + "}")
    listed = ",\n ".join(entries)
    text = f'{{"op": "DifferentialAttention", "version": {VERSION}, "vectors": [\n {listed}\n]}}\n'
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def _make(name: str, made: Made, seed: int) -> Vector:
    base: dict[str, Any] = {"num_pairs": 4, "num_kv_pairs": 2, "generation": 1, "scale": made.width**-0.5}
    attributes = AttentionAttributes(**base | dict(made.attributes))
    inputs = random_inputs(attributes, made, made.width, np.random.default_rng(seed))
    computed = compute(attributes, inputs)
    kinds = {"output": inputs["query"].dtype}
    outputs = {part: value.astype(kinds.get(part, value.dtype)) for part, value in computed.items()}
    return Vector(name, attributes, inputs, outputs)


def _array(tensor: Mapping[str, Any]) -> np.ndarray:
    values = np.array(tensor["values"], np.float64).reshape(tensor["shape"])
    return values.astype(_TYPES[tensor["type"]])


def _text(value: np.ndarray) -> str:
    numbers = [int(x) if value.dtype.kind in "iu" else float(f"{x:.{_DIGITS}g}") for x in value.flatten().tolist()]
    return json.dumps({"type": _NAMES[value.dtype], "shape": list(value.shape), "values": numbers})
