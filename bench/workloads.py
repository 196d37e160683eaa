"""Workloads: shapes of the paper's models and of the demo's, and random inputs of their attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask

# A typical λ; speed does not depend on it.
LAM = 0.37
LARGEST = 1 << 24


@dataclass(frozen=True)
class Model:
    """Sizes of a DIFF model; the matched Transformer has 2h heads of width d.

    Attributes:
        name: name in `MODELS` and in reports.
        hidden: hidden size.
        layers: number of layers.
        pairs: number h of head pairs.
        kv_pairs: number of KV pairs; smaller than `pairs` if several pairs share keys and values.
        width: width d of a query or key.
        value_width: width dv of a value.
        inner: intermediate size of the MLP.
        vocabulary: vocabulary size.
    """

    name: str
    hidden: int
    layers: int
    pairs: int
    kv_pairs: int
    width: int
    value_width: int
    inner: int
    vocabulary: int = 100288

    @property
    def shares_keys(self) -> bool:
        """Whether both maps read the same keys, as in V2."""
        return self.value_width == self.width


def _paper(name: str, hidden: int, layers: int, pairs: int, inner: int | None = None) -> Model:
    width = hidden // (2 * pairs)
    return Model(name, hidden, layers, pairs, pairs, width, 2 * width, inner or hidden * 8 // 3)


# Source: arXiv 2410.05258, the 3B model of section 3.1 and the scaled sizes of section 3.2 (its appendix's tables).
MODELS = {
    model.name: model
    for model in (
        _paper("830M", 1536, 24, 8),
        _paper("1.4B", 2048, 24, 8),
        _paper("2.8B", 2560, 32, 10),
        _paper("3B", 3072, 28, 12, 8192),
        _paper("6.8B", 4096, 32, 16),
        _paper("13.1B", 5120, 40, 20),
        Model("smollm2-135m-diff-v2", 576, 30, 9, 3, 64, 64, 1536, 49152),
        Model("diffllama-1b", 2048, 19, 16, 8, 64, 128, 5504, 32000),
    )
}
# A V2 model with the 3B model's hidden size: as many query heads and values as its Transformer.
V2 = Model("3B as V2", 3072, 28, 24, 24, 128, 128, 8192)


def find_model(name: str) -> Model:
    """Return the model with a name in `MODELS`.

    Raises:
        UsageError: no model has that name.
    """
    if name not in MODELS:
        raise UsageError(f"unknown workload {name!r}; choose from {', '.join(MODELS)}")
    return MODELS[name]


@dataclass(frozen=True)
class Workload:
    """Shape of an attention call: a batch of sequences with `keys` tokens, the last `queries` of which are new.

    Attributes:
        model: sizes of the model.
        queries: number of new tokens.
        keys: context length in tokens, the new ones included.
        batch: batch size.
        dtype: name of the torch dtype.
    """

    model: Model
    queries: int
    keys: int
    batch: int
    dtype: str

    @property
    def name(self) -> str:
        what = f"{self.queries}" if self.queries == self.keys else f"{self.queries} of {self.keys}"
        return f"{self.model.name}, {what} tokens, batch {self.batch}, {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch dtype of the call.

        Raises:
            UsageError: it is not float32, float16 or bfloat16.
        """
        dtype: torch.dtype | None = getattr(torch, self.dtype, None)
        if dtype is None or dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UsageError(f"unknown dtype {self.dtype!r}; choose from float32, float16, bfloat16")
        return dtype


@dataclass(frozen=True)
class CallWithState(AttentionCall):
    """An attention call with an object that its peer needs in order to compute it.

    Attributes:
        state: that object, a cache or a function that runs a module.
    """

    state: Any = None


def get_prepared_object(call: AttentionCall) -> Any:
    """Return the cache or function that a peer's `make` stored in a call as its `state`.

    Raises:
        UsageError: the call has no state, since the `make` of another peer made it.
    """
    if not isinstance(call, CallWithState):
        raise UsageError("this call has no prepared cache or module: create it with the peer's own `make`")
    return call.state


def make_differential_call(work: Workload, device: str) -> AttentionCall:
    """Make a causal call of DIFF attention with random inputs, in the memory layout that projections produce."""
    generator = torch.Generator(device).manual_seed(0)
    model = work.model

    def heads(count: int, length: int, width: int) -> Tensor:
        rows = torch.randn(work.batch, length, count, width, generator=generator, device=device)
        return rows.to(work.torch_dtype).transpose(1, 2)

    q = heads(2 * model.pairs, work.queries, model.width).unflatten(1, (model.pairs, 2)).unbind(2)
    if model.shares_keys:
        k = [heads(model.kv_pairs, work.keys, model.width)] * 2
        lam = torch.rand(work.batch, model.pairs, work.queries, 1, generator=generator, device=device)
    else:
        k = list(heads(2 * model.kv_pairs, work.keys, model.width).unflatten(1, (model.kv_pairs, 2)).unbind(2))
        lam = torch.tensor(LAM, device=device)
    v = heads(model.kv_pairs, work.keys, model.value_width)
    return AttentionCall(list(q), k, v, lam, scale=model.width**-0.5, mask=Mask())


def make_transformer_call(work: Workload, device: str) -> AttentionCall:
    """Make a causal call of the matched Transformer with random inputs, and K and V as large as the DIFF model's."""
    generator = torch.Generator(device).manual_seed(0)
    model = work.model
    kv_heads = model.kv_pairs if model.shares_keys else 2 * model.kv_pairs

    def heads(count: int, length: int) -> Tensor:
        rows = torch.randn(work.batch, length, count, model.width, generator=generator, device=device)
        return rows.to(work.torch_dtype).transpose(1, 2)

    q, k, v = heads(2 * model.pairs, work.queries), heads(kv_heads, work.keys), heads(kv_heads, work.keys)
    return AttentionCall([q], [k], v, None, scale=model.width**-0.5, mask=Mask())


def parse_lengths(text: str) -> list[int]:
    """Parse a list of lengths and ranges, such as "512,1024" or "1K-16K"; a range doubles from first to last.

    Raises:
        UsageError: the text is not such a list.
    """
    lengths_named: list[int] = []
    for part in text.split(","):
        ends = [_length(end, text) for end in part.strip().split("-")]
        if len(ends) > 2 or ends[0] > ends[-1]:
            raise UsageError(f"cannot read {text!r}: a range is FIRST-LAST, such as 1K-16K")
        length = ends[0]
        while length <= ends[-1]:
            lengths_named.append(length)
            length *= 2
    return list(dict.fromkeys(lengths_named))


def _length(text: str, all_text: str) -> int:
    digits, factor = (text[:-1], 1024) if text[-1:] in ("K", "k") else (text, 1)
    if not digits.isdecimal() or not 1 <= int(digits) * factor <= LARGEST:
        raise UsageError(
            f"cannot read {all_text!r}: {text!r} is not a count; expected a value such as 512,1K or 1K-16K"
        )
    return int(digits) * factor
