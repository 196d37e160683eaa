"""The model card of an exported folder."""

from diffquant.export.graph.plan import ExportPlan
from diffquant.formats.front_matter import front_matter
from diffquant.quantization.card import FAMILY
from diffquant.support.escaping import markdown_code, markdown_text

_CARD = """{head}
# {title}, for ONNX Runtime

Exported from {name} ({model_type}) by diffquant.

| part | precision |
|---|---|
| weights | {weights} |
| KV cache | {cache} |
| attention logits | {logits} |
| embedding and head | {embed} |
| activations | {dtype} |

`diffquant run FOLDER --prompt TEXT` continues a prompt. ONNX Runtime opens {model} by itself as well{why}.
diffquant.json has what it was made from.
"""

_FUNCTION = "an operator of\ndiffquant's own comes with its function body of standard operators"


def exported_card(plan: ExportPlan) -> str:
    """Model card of an exported folder: what it was made from, at which precision, and what runs it."""
    checkpoint, options = plan.source.checkpoint, plan.options
    tags = ["diffquant", "onnxruntime", *([FAMILY] if plan.source.spec.maps > 1 else [])]
    is_rounded = plan.source.packed or options.weights.quantizes or options.embed_bits < 16
    return _CARD.format(
        head=front_matter("onnx", tags, checkpoint.front_matter, "quantized" if is_rounded else None),
        title=markdown_text(checkpoint.name),
        name=markdown_code(checkpoint.name),
        model_type=markdown_text(str(checkpoint.config.get("model_type"))),
        weights="as the checkpoint stores them" if plan.source.packed else options.weights,
        cache=f"{options.kv_bits} bits" if options.cache else "none",
        logits=options.logits,
        embed=f"{options.embed_bits} bits",
        dtype=options.dtype,
        model=options.layout.model,
        why="" if options.portable else f": {_FUNCTION}",
    )
