"""How torch.onnx.export writes `torch.ops.diffquant.differential_attention`: as the op's node.

program = torch.onnx.export(model, args, dynamo=True, custom_translation_table=TRANSLATIONS, ...)
proto = program.model_proto
add_body(proto, "contrib")
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto
from onnxscript import opset23
from onnxscript.values import Op, Opset

import diffquant.attention.op  # noqa: F401  registers the operator
from diffquant.export.graph.op import DOMAIN, NAME, VERSION, schema

_NODE = Op(Opset(DOMAIN, VERSION), NAME, schema())


def translate(
    query: Any,
    key: Any,
    value: Any,
    lam: Any,
    past_key: Any,
    past_value: Any,
    seqlens_k: Any,
    cos_cache: Any,
    sin_cache: Any,
    num_pairs: int,
    num_kv_pairs: int,
    generation: int,
    scale: float,
    rotary_interleaved: int = 0,
    local_window_size: int = -1,
    logit_bits: int = 0,
    logit_granularity: str = "row",
    logit_shift: int = 0,
) -> Any:
    """The node for one call; arguments are the operator's."""
    past = opset23.Shape(past_key, start=2, end=3)
    length = opset23.Shape(query, start=1, end=2)
    total = opset23.Cast(opset23.Squeeze(opset23.Add(past, length)), to=TensorProto.INT32)
    inputs = [query, key, value, lam, past_key, past_value, seqlens_k, total, cos_cache, sin_cache, None, None]
    return _NODE(
        *inputs,
        num_pairs=num_pairs,
        num_kv_pairs=num_kv_pairs,
        generation=generation,
        scale=scale,
        do_rotary=int(cos_cache is not None),
        rotary_interleaved=rotary_interleaved,
        local_window_size=local_window_size,
        kv_bit_width=0,
        logit_bits=logit_bits,
        logit_granularity=logit_granularity,
        logit_shift=logit_shift,
    )


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.diffquant.differential_attention.default: translate
}
