"""The graph of a checkpoint's architecture, and the tensors that are streamed beside it."""

from collections.abc import Mapping

from onnx import ModelProto

from diffquant.export.graph.cache_scales import Scales
from diffquant.export.graph.decoder import Decoder
from diffquant.export.graph.plan import ExportPlan
from diffquant.export.graph.sambay import SambaYDecoder
from diffquant.export.graph.streaming import Streamed, place
from diffquant.model.sambay.architecture import SambaYArchitecture


def build(plan: ExportPlan, scales: Mapping[int, Scales]) -> tuple[ModelProto, list[Streamed]]:
    """The exported model, and the tensors of its data file in order.

    Args:
        plan: checkpoint to export, with its weights in exported form.
        scales: scales of the quantized cache by layer; none for a cache in the activations' type.
    """
    of_states = isinstance(plan.source.architecture, SambaYArchitecture)
    decoder = SambaYDecoder(plan, scales) if of_states else Decoder(plan, scales)
    decoder.emit()
    initializers, _ = place(decoder.linears.streamed, plan.options.layout.data_name)
    return decoder.model(decoder.linears.with_views(initializers)), decoder.linears.streamed
