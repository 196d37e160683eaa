"""The graph of a checkpoint's architecture, and the tensors that are streamed beside it."""

from collections.abc import Mapping

from onnx import ModelProto

from diffquant.export.graph.cache_scales import Scales
from diffquant.export.graph.decoder import Decoder
from diffquant.export.graph.motif3 import Motif3Decoder
from diffquant.export.graph.plan import ExportPlan
from diffquant.export.graph.sambay import SambaYDecoder
from diffquant.export.graph.streaming import Streamed, place
from diffquant.model.architecture import Architecture
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.model.sambay.architecture import SambaYArchitecture

# Of a Transformer it is `Decoder`.
_DECODERS: Mapping[type[Architecture], type[Decoder]] = {
    SambaYArchitecture: SambaYDecoder,
    Motif3Architecture: Motif3Decoder,
}


def build(plan: ExportPlan, scales: Mapping[int, Scales]) -> tuple[ModelProto, list[Streamed]]:
    """The exported model, and the tensors of its data file in order.

    Args:
        plan: checkpoint to export, with its weights in exported form.
        scales: scales of the quantized cache by layer; none for a cache in the activations' type.
    """
    decoder = _DECODERS.get(type(plan.source.architecture), Decoder)(plan, scales)
    decoder.emit()
    initializers, _ = place(decoder.linears.streamed, plan.options.layout.data_name)
    return decoder.model(decoder.linears.with_views(initializers)), decoder.linears.streamed
