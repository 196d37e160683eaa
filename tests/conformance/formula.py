"""The op in NumPy and float64, as docs/differential-attention-op.md says it: one query of one pair at a time.

Nothing of diffquant computes here, so that the vectors made with it are an oracle for all that does.
"""

from collections.abc import Mapping

import numpy as np

from diffquant.onnx.graph.op import AttentionAttributes

Arrays = Mapping[str, np.ndarray]


def compute(attributes: AttentionAttributes, inputs: Arrays) -> dict[str, np.ndarray]:
    """Outputs of one call by name; rows that the page leaves open are zero."""
    call = _Call(attributes, inputs)
    present = {part: call.stored(part) for part in ("key", "value")}
    keys, values = (call.read(part, present[part]) for part in ("key", "value"))
    output = call.attend(keys, values)
    return {"output": output, "present_key": present["key"], "present_value": present["value"]}


def spans(inputs: Arrays) -> list[tuple[int, int]]:
    """Positions of each sequence's new tokens: the first, and one past the last."""
    tokens = inputs["query"].shape[1]
    first_call = tokens == int(inputs["total_sequence_length"])
    ends = [int(last) + 1 for last in inputs["seqlens_k"]]
    return [(0 if first_call else end - tokens, end) for end in ends]


class _Call:
    """A call's sizes, by the page's letters."""

    def __init__(self, attributes: AttentionAttributes, inputs: Arrays) -> None:
        self.attributes, self.inputs = attributes, inputs
        self.h, self.h_kv = attributes.num_pairs, attributes.num_kv_pairs
        self.r = attributes.signals_per_noise
        self.n = self.h // self.r
        batch, tokens, columns = inputs["query"].shape
        self.B, self.T, self.d = batch, tokens, columns // (self.h + self.n)
        self.dk = 2 * self.d if attributes.generation == 1 else self.d
        self.spans = spans(inputs)
        past = inputs["past_key"].shape[2] if "past_key" in inputs else 0
        self.rows = max(past, int(inputs["total_sequence_length"]))
        self.bits = attributes.kv_bit_width

    def stored(self, part: str) -> np.ndarray:
        """The cache after the call [B, h_kv, rows, stored elements]."""
        types: dict[int, np.dtype] = {8: np.dtype(np.int8), 6: np.dtype(np.uint8), 4: np.dtype(np.uint8)}
        kind = types.get(self.bits, self.inputs["query"].dtype)
        elements = self.dk if self.bits in (0, 8) else self.dk * self.bits // 8
        present = np.zeros((self.B, self.h_kv, self.rows, elements), kind)
        if f"past_{part}" in self.inputs:
            past = self.inputs[f"past_{part}"]
            present[:, :, : past.shape[2]] = past
        new = self.inputs[part].astype(np.float64).reshape(self.B, self.T, self.h_kv, self.dk)
        for b, (start, end) in enumerate(self.spans):
            for t in range(end - start):
                for j in range(self.h_kv):
                    row = self.turned(new[b, t, j], start + t) if part == "key" else new[b, t, j]
                    present[b, j, start + t] = self.encoded(row, part, j)
        return present

    def turned(self, row: np.ndarray, position: int) -> np.ndarray:
        """A key row, or a query head, rotated by a position."""
        if not self.attributes.do_rotary:
            return row
        half = len(row) // 2
        cos, sin = (self.inputs[f"{name}_cache"][position, :half].astype(np.float64) for name in ("cos", "sin"))
        is_interleaved = self.attributes.rotary_interleaved
        first, second = (slice(0, None, 2), slice(1, None, 2)) if is_interleaved else (slice(half), slice(half, None))
        turned = np.empty_like(row)
        turned[first] = row[first] * cos - row[second] * sin
        turned[second] = row[first] * sin + row[second] * cos
        return turned

    def encoded(self, row: np.ndarray, part: str, kv_pair: int) -> np.ndarray:
        """A row as the cache stores it."""
        if not self.bits:
            return row
        limit = 2 ** (self.bits - 1)
        codes: np.ndarray = np.clip(np.rint(row / self.scales(part)[kv_pair]), 1 - limit, limit - 1).astype(int)
        if self.bits == 8:
            return codes
        binary = "".join(format(code + limit, f"0{self.bits}b")[::-1] for code in codes)
        return np.array([int(binary[i : i + 8][::-1], 2) for i in range(0, len(binary), 8)])

    def read(self, part: str, present: np.ndarray) -> np.ndarray:
        """Keys or values as attention reads them [B, h_kv, rows, dk]."""
        if self.bits == 0:
            return present.astype(np.float64)
        codes = present.astype(int)
        if self.bits < 8:
            binary = np.unpackbits(present, axis=-1, bitorder="little")
            digits = binary.reshape(*present.shape[:3], self.dk, self.bits)
            codes = (digits * 2 ** np.arange(self.bits)).sum(-1) - 2 ** (self.bits - 1)
        rows: np.ndarray = codes * self.scales(part)[None, :, None]
        return rows

    def scales(self, part: str) -> np.ndarray:
        """Scale of each channel [h_kv, dk]."""
        return self.inputs[f"{part[0]}_scale"][0, :, 0].astype(np.float64)

    def attend(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The output [B, T, h·dv]."""
        output = np.zeros((self.B, self.T, self.h, self.dk))
        for b, (start, end) in enumerate(self.spans):
            logits = self.rounded({
                (s, m, t): self.logits(b, s, m, t, keys)
                for s in range(self.h)
                for m in range(2)
                for t in range(end - start)
            })  # fmt: skip
            for s in range(self.h):
                for t in range(end - start):
                    seen = self.seen(b, t)
                    signal, noise = (softmax(logits[s, m, t]) @ values[b, self.kv_pair(s), seen] for m in range(2))
                    output[b, t, s] = self.weight("signal_gate", b, t, s) * signal
                    output[b, t, s] -= self.weight("lambda", b, t, s) * noise
        flat = output.reshape(self.B, self.T, -1)
        return flat * self.inputs["output_gate"].astype(np.float64) if "output_gate" in self.inputs else flat

    def kv_pair(self, s: int) -> int:
        return s // (self.h // self.h_kv)

    def seen(self, b: int, t: int) -> slice:
        """Keys that a query sees."""
        end, window = self.spans[b][0] + t + 1, self.attributes.local_window_size
        return slice(max(0, end - window) if window > 0 else 0, end)

    def logits(self, b: int, s: int, m: int, t: int, keys: np.ndarray) -> np.ndarray:
        """Logits of pair s's map m at query t over the keys that it sees."""
        head = s // self.r * (self.r + 1) + (self.r if m else s % self.r)
        query = self.inputs["query"][b, t, head * self.d : (head + 1) * self.d].astype(np.float64)
        first = m * self.d if self.attributes.generation == 1 else 0
        rows = keys[b, self.kv_pair(s), self.seen(b, t), first : first + self.d]
        logits: np.ndarray = rows @ self.turned(query, self.spans[b][0] + t) * self.attributes.scale
        return logits

    def rounded(self, logits: dict[tuple[int, int, int], np.ndarray]) -> dict[tuple[int, int, int], np.ndarray]:
        """One sequence's logits by (pair, map, query), rounded as the page says."""
        bits, shifts = self.attributes.logit_bits, self.attributes.logit_shift
        if not bits:
            return logits
        if shifts:
            logits = {at: row - row.max() for at, row in logits.items()}
        shared: dict[tuple[int, ...], float] = {}
        for at, row in logits.items():
            key = self.sharing(*at)
            shared[key] = max(shared.get(key, 0.0), float(np.abs(row).max()))
        rounded = {}
        for at, row in logits.items():
            largest = shared[self.sharing(*at)]
            step = (min(largest, 12.0) / (2**bits - 1) if shifts else largest / (2 ** (bits - 1) - 1)) or 1.0
            codes = np.rint(row / step)
            rounded[at] = step * (np.maximum(codes, -(2**bits - 1)) if shifts else codes)
        return rounded

    def sharing(self, s: int, m: int, t: int) -> tuple[int, ...]:
        """The granularity of a logit's step."""
        return {"row": (s, m, t), "head": (s, m), "pair": (s,), "tensor": ()}[self.attributes.logit_granularity]

    def weight(self, name: str, b: int, t: int, s: int) -> float:
        """λ, or the signal's gate, of a pair at a query."""
        if name not in self.inputs:
            return 1.0
        given = self.inputs[name]
        return float(given[0] if given.ndim == 1 else given[b, t, s])


def softmax(row: np.ndarray) -> np.ndarray:
    """Softmax of a row of logits."""
    weights = np.exp(row - row.max())
    normed: np.ndarray = weights / weights.sum()
    return normed
