"""Cases of `diffquant::QuantizedAttention`, models of one node, and what they must give by torch in float64."""

from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch.nn.functional import scaled_dot_product_attention

from diffquant.onnx.graph.op import CONTRIB, DOMAIN, VERSION
from diffquant.onnx.graph.ops import QUANTIZED_ATTENTION, quantized_attention_function
from tests.conformance.schemas import quantized_attention_schema
from tests.support.attention_cases import Shape, codes_in

OPSET, IR = 23, 10

Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class HeadCase:
    """Shapes and attributes of a call; `rope` is "", "half" or "interleaved"."""

    bits: int = 8
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    rope: str = "half"
    window: int = -1

    @property
    def stored(self) -> int:
        """Stored elements of a cache row."""
        return self.width if self.bits == 8 else self.width * self.bits // 8

    def inputs(self, batch: int, length: int, seed: int = 0) -> Inputs:
        """Random inputs of whole sequences, with the tables of rotation and scales that clip a few values."""
        rng = np.random.default_rng(seed)
        columns = {"query": self.heads, "key": self.kv_heads, "value": self.kv_heads}
        made = {n: rng.standard_normal((batch, length, c * self.width), "f4") for n, c in columns.items()}
        made["query"] *= 2
        if self.rope:
            angles = np.arange(length + 1)[:, None] / 100.0 ** (np.arange(0, self.width, 2) / self.width)
            made |= {"cos_cache": np.cos(angles).astype("f4"), "sin_cache": np.sin(angles).astype("f4")}
        top = 3.0 / (2 ** (self.bits - 1) - 1)
        for name in ("k_scale", "v_scale"):
            made[name] = (top * (0.5 + rng.random((1, self.kv_heads, 1, self.width)))).astype("f4")
        return made

    def past(self, batch: int, rows: int) -> list[np.ndarray]:
        """Caches whose every row is poison: large codes of any sign."""
        codes = np.random.default_rng(1).integers(0, 256, (2, batch, self.kv_heads, rows, self.stored), "u1")
        return list(codes.view("i1" if self.bits == 8 else "u1"))

    def quotients(self, inputs: Inputs, end: int) -> list[np.ndarray]:
        """K, rotated, and V of the first `end` tokens over their scales [B, h_kv, S, d], which codes round."""
        keys = self._turned(self._by_head(inputs["key"][:, :end], self.kv_heads), inputs)
        values = self._by_head(inputs["value"][:, :end], self.kv_heads)
        return [x / inputs[name].astype("f8") for x, name in ((keys, "k_scale"), (values, "v_scale"))]

    def expected(self, inputs: Inputs, tokens: slice, caches: list[np.ndarray]) -> np.ndarray:
        """Output [B, T, h·d] that the op must give for `tokens`, over the codes that the caches hold."""
        query = self._turned(self._by_head(inputs["query"][:, : tokens.stop], self.heads), inputs)[:, :, tokens]
        keys, values = (
            torch.from_numpy(codes_in(cache, self.bits, tokens.stop) * inputs[name].astype("f8"))
            for cache, name in zip(caches, ("k_scale", "v_scale"), strict=True)
        )
        at, of = np.arange(tokens.start, tokens.stop)[:, None], np.arange(tokens.stop)[None]
        seen = (of <= at) & (of > at - self.window if self.window > 0 else True)
        attended = scaled_dot_product_attention(
            torch.from_numpy(query), keys, values, attn_mask=torch.from_numpy(seen), enable_gqa=True
        )
        flat: np.ndarray = attended.transpose(1, 2).flatten(2).numpy()
        return flat

    def _by_head(self, rows: np.ndarray, count: int) -> np.ndarray:
        return rows.astype("f8").reshape(*rows.shape[:2], count, self.width).transpose(0, 2, 1, 3)

    def _turned(self, rows: np.ndarray, inputs: Inputs) -> np.ndarray:
        if not self.rope:
            return rows
        half = self.width // 2
        first, second = (
            (slice(0, None, 2), slice(1, None, 2)) if self.rope == "interleaved" else (slice(half), slice(half, None))
        )
        angle = inputs["cos_cache"].astype("f8") + 1j * inputs["sin_cache"].astype("f8")
        turned = (rows[..., first] + 1j * rows[..., second]) * angle[: rows.shape[2]]
        out = np.empty_like(rows)
        out[..., first], out[..., second] = turned.real, turned.imag
        return out

    def one_node(
        self, has_body: bool = False, float_type: int = TensorProto.FLOAT, is_cached: bool = True
    ) -> onnx.ModelProto:
        """ONNX model of one node, with its function body or without."""
        cache = TensorProto.INT8 if self.bits == 8 else TensorProto.UINT8
        past: tuple[int, Shape] = (cache, ["B", self.kv_heads, "P", self.stored])
        kv: tuple[int, Shape] = (float_type, ["B", "T", self.kv_heads * self.width])
        table: tuple[int, Shape] = (float_type, ["M", self.width // 2])
        scale: tuple[int, Shape] = (TensorProto.FLOAT, [1, self.kv_heads, 1, self.width])
        values: dict[str, tuple[int, Shape]] = {
            "query": (float_type, ["B", "T", self.heads * self.width]),
            "key": kv,
            "value": kv,
            **({"past_key": past, "past_value": past} if is_cached else {}),
            "seqlens_k": (TensorProto.INT32, ["B"]),
            "total_sequence_length": (TensorProto.INT32, []),
            **({"cos_cache": table, "sin_cache": table} if self.rope else {}),
            "k_scale": scale,
            "v_scale": scale,
        }
        present: tuple[int, Shape] = (cache, ["B", self.kv_heads, "S", self.stored])
        outputs: dict[str, tuple[int, Shape]] = {"output": (float_type, ["B", "T", self.heads * self.width])}
        outputs |= {"present_key": present, "present_value": present}
        attributes = {
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "scale": self.width**-0.5,
            "do_rotary": int(bool(self.rope)),
            "rotary_interleaved": int(self.rope == "interleaved"),
            "local_window_size": self.window,
            "kv_bit_width": self.bits,
        }
        names = [each.name if each.name in values else "" for each in quantized_attention_schema().inputs]
        node = helper.make_node(QUANTIZED_ATTENTION, names, list(outputs), domain=DOMAIN, **attributes)
        domains = {"": OPSET, DOMAIN: VERSION} | ({CONTRIB: 1} if has_body else {})
        return helper.make_model(
            helper.make_graph([node], "one_node", _declared(values), _declared(outputs)),
            opset_imports=[helper.make_opsetid(*domain) for domain in domains.items()],
            functions=[quantized_attention_function(OPSET, self.bits, bool(self.rope))] if has_body else [],
            ir_version=IR,
        )


def _declared(values: dict[str, tuple[int, Shape]]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, *kind) for name, kind in values.items()]


def feed(
    inputs: Inputs, tokens: slice, past: list[np.ndarray] | None, ends: list[int] | None = None
) -> dict[str, np.ndarray]:
    """Inputs of one call; `ends` are the sequences' lengths after it where they differ."""
    per_token = ("query", "key", "value")
    call = {n: np.ascontiguousarray(v[:, tokens]) if n in per_token else v for n, v in inputs.items()}
    call["seqlens_k"] = np.array(ends or [tokens.stop] * len(inputs["query"]), "i4") - 1
    call["total_sequence_length"] = np.array(tokens.stop, "i4")
    return call | ({} if past is None else dict(zip(("past_key", "past_value"), past, strict=True)))
