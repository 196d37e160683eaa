"""Cases of the ONNX operator, their expected results by `diffquant.attention.naive`, and models of one node."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from diffquant.attention.naive import naive
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.model.attention import apply_rotary_embedding
from diffquant.onnx.graph.body import BodyKind, make_function_body
from diffquant.onnx.graph.op import CONTRIB, DOMAIN, GATES, NAME, VERSION, AttentionAttributes
from diffquant.recipe.scheme import FULL, Scheme
from tests.conformance.schemas import schema

OPSET, IR = 23, 10

Inputs = dict[str, np.ndarray]
Shape = Sequence[str | int | None]


@dataclass(frozen=True)
class Case:
    """Shapes and attributes of a call; `rope` is "", "half" or "interleaved"."""

    generation: int = 1
    pairs: int = 4
    kv_pairs: int = 2
    width: int = 16
    rope: str = "interleaved"
    window: int = -1
    kv_bits: int = 0
    logits: Scheme = FULL
    signals: int = 1
    gates: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.pairs + self.pairs // self.signals

    @property
    def row(self) -> int:
        return self.width * (2 if self.generation == 1 else 1)

    @property
    def attributes(self) -> AttentionAttributes:
        return AttentionAttributes(
            num_pairs=self.pairs,
            num_kv_pairs=self.kv_pairs,
            generation=self.generation,
            scale=self.width**-0.5,
            do_rotary=int(bool(self.rope)),
            rotary_interleaved=int(self.rope == "interleaved"),
            local_window_size=self.window,
            kv_bit_width=self.kv_bits,
            logit_bits=self.logits.bits if self.logits.quantizes else 0,
            logit_granularity=self.logits.granularity or "row",
            logit_shift=int(self.logits.has_transform("shift")),
            signals_per_noise=self.signals,
        )

    def plain(self) -> "Case":
        return replace(self, kv_bits=0)


def random_inputs(case: Case, batch: int, length: int, seed: int = 0) -> Inputs:
    """Random query, key, value and lambda of a whole sequence, and the tables and scales."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    made: Inputs = {
        "query": normal(batch, length, case.heads * case.width) * 2,
        "key": normal(batch, length, case.kv_pairs * case.row),
        "value": normal(batch, length, case.kv_pairs * case.row),
        "lambda": normal(1) if case.generation == 1 else rng.random((batch, length, case.pairs), dtype=np.float32),
    }
    if "signal_gate" in case.gates:
        made["signal_gate"] = rng.random((batch, length, case.pairs), dtype=np.float32)
    if "output_gate" in case.gates:
        made["output_gate"] = normal(batch, length, case.pairs * case.row)
    if case.rope:
        angles = np.arange(128)[:, None] / 100.0 ** (np.arange(0, case.width, 2) / case.width)
        tables = np.tile(angles, (1, case.row // case.width))
        made |= {"cos_cache": np.cos(tables).astype("f4"), "sin_cache": np.sin(tables).astype("f4")}
    if case.kv_bits:
        top = 3.0 / (2 ** (case.kv_bits - 1) - 1)
        for name in ("k_scale", "v_scale"):
            made[name] = (top * (0.5 + rng.random((1, case.kv_pairs, 1, case.row)))).astype("f4")
    return made


def on_a_lattice(case: Case, batch: int, length: int, seed: int = 3) -> Inputs:
    """Inputs whose rotated keys and logits are exact in float32: no rounding of them depends on the order of sums.

    Queries are whole numbers, as keys are or else 64ths beside a cache's scales, which are powers of two; positions
    turn by quarters.
    """
    rng = np.random.default_rng(seed)

    def whole(count: int, parts: int) -> np.ndarray:
        return (rng.integers(-3 * parts, 3 * parts + 1, (batch, length, count)) / parts).astype("f4")

    made = random_inputs(case, batch, length, seed)
    made["query"] = whole(case.heads * case.width, 1)
    made["key"] = whole(case.kv_pairs * case.row, 64 if case.kv_bits else 1)
    if case.rope:
        quarters = np.arange(length + 1)[:, None] * np.arange(1, case.width // 2 + 1) % 4
        quarters = np.tile(quarters, (1, case.row // case.width))
        made["cos_cache"] = np.array([1, 0, -1, 0], "f4")[quarters]
        made["sin_cache"] = np.array([0, 1, 0, -1], "f4")[quarters]
    if case.kv_bits:
        made |= {name: np.exp2(np.round(np.log2(made[name]))).astype("f4") for name in ("k_scale", "v_scale")}
    return made


def expected(
    case: Case,
    inputs: Inputs,
    tokens: slice,
    dtype: torch.dtype = torch.float64,
    codes: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Output [B, T, h·dv] that the op must give for `tokens` of a sequence whose keys up to their end are there.

    Args:
        dtype: dtype to compute in.
        codes: codes of K and V that the cache holds [B, h_kv, S, row]; the nearest ones by default.
    """
    q, k, v, lam = _operands(case, inputs, tokens, dtype)
    if case.kv_bits:
        if codes is None:
            limit = 2 ** (case.kv_bits - 1)
            codes = [np.clip(np.rint(x), 1 - limit, limit - 1) for x in quotients(case, inputs, tokens.stop, dtype)]
        k, v = (
            _by_row(torch.from_numpy(each).to(dtype)) * torch.from_numpy(inputs[name]).to(dtype).flatten()
            for each, name in zip(codes, ("k_scale", "v_scale"), strict=True)
        )
        k, v = _heads(k, case.kv_pairs * case.row // case.width), _heads(v, case.kv_pairs)
    groups = q[:, :, tokens].unflatten(1, (-1, case.signals + 1))
    queries = [groups[:, :, :-1].flatten(1, 2), groups[:, :, -1]]
    keys = [k[:, i::2] for i in (0, 1)] if case.generation == 1 else [k, k]
    gates = {name: torch.from_numpy(inputs[name][:, tokens]).to(dtype) for name in case.gates}
    signal_gate = gates["signal_gate"].transpose(1, 2)[..., None] if "signal_gate" in gates else None
    mask = Mask(window=case.window if case.window > 0 else None)
    y = naive(
        AttentionCall(
            queries, keys, v, lam, scale=case.width**-0.5, mask=mask, logits=case.logits, signal_gate=signal_gate
        )
    )
    y = y.transpose(1, 2).flatten(2)
    return (y * gates["output_gate"] if "output_gate" in gates else y).float().numpy()


def quotients(case: Case, inputs: Inputs, end: int, dtype: torch.dtype = torch.float64) -> list[np.ndarray]:
    """K, rotated, and V of the first `end` tokens over their scales [B, h_kv, S, row], which codes round."""
    _, k, v, _ = _operands(case, inputs, slice(0, end), dtype)
    return [
        _heads(_by_row(x) / torch.from_numpy(inputs[name]).to(dtype).flatten(), case.kv_pairs).numpy()
        for x, name in ((k, "k_scale"), (v, "v_scale"))
    ]


def codes_in(cache: np.ndarray, bits: int, rows: int) -> np.ndarray:
    """Codes [B, h_kv, rows, row] in the first rows of a cache, as the op's specification packs them."""
    if bits == 8:
        return cache[:, :, :rows].astype(int)
    stored = np.unpackbits(cache[:, :, :rows], axis=-1, bitorder="little")
    digits = stored.reshape(*stored.shape[:3], -1, bits).astype(int)
    codes: np.ndarray = (digits << np.arange(bits)).sum(-1) - 2 ** (bits - 1)
    return codes


def _operands(case: Case, inputs: Inputs, tokens: slice, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Q and K, rotated, and V of all tokens up to the end of `tokens` [B, heads, S, width], and λ of `tokens`."""
    x = {name: torch.from_numpy(value).to(dtype) for name, value in inputs.items()}
    q = _heads(x["query"][:, : tokens.stop], case.heads)
    k = _heads(x["key"][:, : tokens.stop], case.kv_pairs * case.row // case.width)
    v = _heads(x["value"][:, : tokens.stop], case.kv_pairs)
    if case.rope:
        cos, sin = (x[name][None, : tokens.stop, : case.width // 2] for name in ("cos_cache", "sin_cache"))
        q, k = (apply_rotary_embedding(t, (cos, sin), case.rope) for t in (q, k))
    lam = x["lambda"] if case.generation == 1 else x["lambda"][:, tokens].transpose(1, 2)[..., None]
    return q, k, v, lam


def _heads(rows: torch.Tensor, count: int) -> torch.Tensor:
    split: torch.Tensor = rows.unflatten(-1, (count, -1))
    return split.transpose(1, 2)


def _by_row(heads: torch.Tensor) -> torch.Tensor:
    return heads.transpose(1, 2).flatten(2)


def one_node(
    case: Case,
    kind: BodyKind | None,
    float_type: int = TensorProto.FLOAT,
    cached: bool = True,
) -> onnx.ModelProto:
    """ONNX model of one node; `kind` is that of its function body, None for none."""
    cache_type = {0: float_type, 8: TensorProto.INT8, 6: TensorProto.UINT8, 4: TensorProto.UINT8}[case.kv_bits]
    stored_width = case.row * (case.kv_bits or 8) // 8 if case.kv_bits in (4, 6) else case.row
    absent = set() if case.rope else {"cos_cache", "sin_cache"}
    absent |= set() if case.kv_bits else {"k_scale", "v_scale"}
    absent |= set() if cached else {"past_key", "past_value"}
    absent |= set(GATES) - set(case.gates)
    past: Shape = ["B", case.kv_pairs, "P", stored_width]
    kv: Shape = ["B", "T", case.kv_pairs * case.row]
    values: dict[str, tuple[int, Shape]] = {
        "query": (float_type, ["B", "T", case.heads * case.width]),
        "key": (float_type, kv),
        "value": (float_type, kv),
        "lambda": (TensorProto.FLOAT, [1] if case.generation == 1 else ["B", "T", case.pairs]),
        "past_key": (cache_type, past),
        "past_value": (cache_type, past),
        "seqlens_k": (TensorProto.INT32, ["B"]),
        "total_sequence_length": (TensorProto.INT32, []),
        "cos_cache": (float_type, ["M", case.row // 2]),
        "sin_cache": (float_type, ["M", case.row // 2]),
        "k_scale": (TensorProto.FLOAT, [1, case.kv_pairs, 1, case.row]),
        "v_scale": (TensorProto.FLOAT, [1, case.kv_pairs, 1, case.row]),
        "signal_gate": (TensorProto.FLOAT, ["B", "T", case.pairs]),
        "output_gate": (float_type, ["B", "T", case.pairs * case.row]),
    }
    inputs = [helper.make_tensor_value_info(n, *v) for n, v in values.items() if n not in absent]
    present: tuple[int, Shape] = (cache_type, ["B", case.kv_pairs, "S", stored_width])
    outputs = [
        helper.make_tensor_value_info("output", float_type, ["B", "T", case.pairs * case.row]),
        helper.make_tensor_value_info("present_key", *present),
        helper.make_tensor_value_info("present_value", *present),
    ]
    names = ["" if p.name in absent else p.name for p in schema().inputs]
    node = helper.make_node(NAME, names, [o.name for o in outputs], domain=DOMAIN, **case.attributes.to_dict())
    functions = [make_function_body(kind, case.attributes, case.width, OPSET, cached, case.gates)] if kind else []
    domains = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    domains += [helper.make_opsetid(CONTRIB, 1)] if kind == "contrib" else []
    graph = helper.make_graph([node], "one_node", inputs, outputs)
    return helper.make_model(graph, opset_imports=domains, functions=functions, ir_version=IR)


def feed(
    inputs: dict[str, np.ndarray],
    tokens: slice,
    past: tuple[np.ndarray, np.ndarray] | None,
    ends: list[int] | None = None,
) -> dict[str, np.ndarray]:
    """Inputs of one call; `ends` are the sequences' lengths after it where they differ."""
    per_token = ("query", "key", "value", "signal_gate", "output_gate")
    call = {n: np.ascontiguousarray(v[:, tokens]) if n in per_token else v for n, v in inputs.items()}
    if inputs["lambda"].ndim == 3:
        call["lambda"] = np.ascontiguousarray(inputs["lambda"][:, tokens])
    batch = inputs["query"].shape[0]
    call["seqlens_k"] = np.array(ends or [tokens.stop] * batch, "i4") - 1
    call["total_sequence_length"] = np.array(tokens.stop, "i4")
    if past is not None:
        call |= {"past_key": past[0], "past_value": past[1]}
    return call


def empty_past(case: Case, batch: int, rows: int = 0, dtype: str = "f4") -> tuple[np.ndarray, np.ndarray]:
    width = case.row // 2 if case.kv_bits == 4 else case.row
    kind = {0: dtype, 8: "i1", 4: "u1"}[case.kv_bits]
    past_key, past_value = (np.zeros((batch, case.kv_pairs, rows, width), kind) for _ in range(2))
    return past_key, past_value
