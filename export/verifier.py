"""Implementation of `diffquant verify`: compare an exported folder with the checkpoint it was made from."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, helper, numpy_helper
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffquant.checkpoints.ranges import read_any_ranges
from diffquant.checkpoints.source import Source, open_source
from diffquant.errors import CheckpointError, ToleranceError, UsageError
from diffquant.onnx.files import RANGES_FILE, check_exported
from diffquant.onnx.graph.body import BodyKind, make_function_body
from diffquant.onnx.graph.op import CONTRIB, DOMAIN, GATES, INPUTS, NAME, AttentionAttributes
from diffquant.onnx.graph.ops import MATMUL, QUANTIZED_ATTENTION, matmul_function, quantized_attention_function
from diffquant.onnx.graph.plan import check_exportable
from diffquant.onnx.manifest import Manifest, check_unchanged, read_manifest
from diffquant.onnx.runtime.device import RuntimeDevice
from diffquant.onnx.runtime.generation import read_context_length
from diffquant.onnx.runtime.interface import load_graph
from diffquant.onnx.verification.caches import read_cache_scales, scale_error
from diffquant.onnx.verification.comparison import Comparison
from diffquant.onnx.verification.passages import sample_passages
from diffquant.onnx.verification.reference import Reference
from diffquant.onnx.verification.report import Measure, Verification
from diffquant.support.digests import FileDigests
from diffquant.support.machine import keep_freed_memory
from diffquant.support.progress import Progress, report_nothing

# Largest relative difference of a cache's scale from calibration's.
SCALE_LIMIT = 0.01
# With half as many weights and busy cores, two threads take 5 times the CPU seconds of one.
_WEIGHTS_OF_A_THREAD = 2**28


def verify(
    folder: Path,
    source: Path | str | Source,
    tolerance: float | None = None,
    threads: int = 0,
    device: str = "auto",
    progress: Progress = report_nothing,
) -> Verification:
    """Compare an exported folder with the checkpoint it was made from.

    Args:
        folder: folder that `export` wrote.
        source: checkpoint that it was exported from.
        tolerance: largest relative RMS error allowed in the logits of whole runs; by default `MARGIN` times the error
            that rounding alone causes in the reference.
        threads: number of ONNX Runtime's threads; 0 uses all cores.
        device: where ONNX Runtime computes: "auto", "cpu", "cuda" or "cuda:N"; the reference runs on the CPU.
        progress: called with the work done, the total, and the current route.

    Raises:
        CheckpointError: the folder was edited after export, was exported from another checkpoint, or cannot run.
        MissingDependencyError: ONNX Runtime cannot use the device.
        ToleranceError: some difference is larger than rounding explains; the error's `result` is the Verification.
    """
    folder = Path(folder)
    # Checked before the checkpoint is opened: this error is clearer if the user swapped the two arguments.
    check_exported(folder)
    source = open_source(source)
    check_exportable(source, "verify")
    chosen = RuntimeDevice.parse(device)
    chosen.check()
    progress(0, 1, "reading the folder and its checkpoint")
    manifest = read_manifest(folder)
    check_unchanged(folder, manifest)
    # Raises if the context length is invalid: text generation needs it.
    read_context_length(folder)
    _check_source(manifest, source)
    graph = load_graph(folder)
    with keep_freed_memory(), _few_threads(source):
        reference = find_reference(source)(
            source, manifest.options, read_cache_scales(graph), find_float32_matmul_bits(graph)
        )
        rotary = getattr(reference.model.model, "rotary_emb", None)
        positions = source.architecture.max_position_embeddings
        rotation = None if rotary is None else rope_error_ratio(graph, rotary, positions)
        passages = sample_passages(source, reference.model.config)
        comparison = Comparison(
            folder,
            manifest,
            reference,
            passages,
            tolerance=tolerance,
            threads=threads,
            device=chosen.name,
            progress=progress,
        )
        verification = comparison.verify_all_routes(
            scales=_scale_error(folder, manifest, reference),
            rotation=None if rotation is None else Measure(rotation, 1.0),
            bodies=body_problems(graph, reference.width),
        )
    if not verification.passed:
        raise ToleranceError(str(verification), verification)
    return verification


@contextmanager
def _few_threads(source: Source) -> Iterator[None]:
    """Limit torch's threads inside the context to what the model's size keeps busy.

    The passages are short: with a small model, threads wait for each other longer than they compute.
    """
    before = torch.get_num_threads()
    weights = sum(math.prod(each.shape) for each in source.architecture.parameters.values())
    torch.set_num_threads(max(1, min(before, weights // _WEIGHTS_OF_A_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def find_reference(source: Source) -> type[Reference]:
    """Return the class of the torch reference for exports of this checkpoint's architecture."""
    reference_class: type[Reference] = resolve_name(source.architecture.export).reference_class
    return reference_class


def find_float32_matmul_bits(graph: ModelProto) -> set[int]:
    """Return the bit widths of weights that a graph multiplies by float32 activations.

    Only graphs of older versions have 8 among them.
    """
    products = [{each.name: each.i for each in node.attribute} for node in graph.graph.node if node.op_type == MATMUL]
    return {product["bits"] for product in products if product["accuracy_level"] == 1}


def _scale_error(folder: Path, manifest: Manifest, reference: Reference) -> Measure | None:
    """Compare the cache's scales with calibration's; return None if there is no quantized cache or no record."""
    if reference.cache is None or not manifest.calibration.by_name:
        return None
    return Measure(scale_error(reference.cache, read_any_ranges(folder / RANGES_FILE)), SCALE_LIMIT)


def _check_source(manifest: Manifest, source: Source) -> None:
    exported = manifest.weights
    if FileDigests.compute(source.checkpoint.weight_files(), exported.algorithm).digest_set != exported.digest_set:
        raise CheckpointError(
            f"the folder was exported from {manifest.source['name']}, whose weights are not those of {source.path}; "
            "give the checkpoint that it was exported from"
        )


_TABLES = ("cos_cache", "sin_cache")
_CHUNK = 8192
# Rounding error of a cosine, and the error per radian of its angle that a frequency's last digit causes.
_UNIT = {"float32": 2.0**-22, "float16": 2.0**-10}
_PER_RADIAN = 2.0**-22


def rope_error_ratio(graph: onnx.ModelProto, rotary: LlamaRotaryEmbedding, positions: int) -> float | None:
    """Return the error of a graph's RoPE tables divided by the error that rounding explains.

    Args:
        graph: exported model.
        rotary: the checkpoint's rotary embedding.
        positions: number of positions that the tables must have.

    Returns:
        The largest ratio over all entries; infinite if positions are missing, or None if the graph has no tables.
    """
    tables = {each.name: numpy_helper.to_array(each) for each in graph.graph.initializer if each.name in _TABLES}
    if not tables:
        return None
    if any(name not in tables or len(tables[name]) < positions for name in _TABLES):
        return float("inf")
    starts = range(0, positions, _CHUNK)
    return float(np.max([_excess(tables, rotary, range(at, min(at + _CHUNK, positions))) for at in starts]))


def _excess(tables: Mapping[str, np.ndarray], rotary: LlamaRotaryEmbedding, at: range) -> float:
    """Return the largest ratio at some positions."""
    places = torch.arange(at.start, at.stop)
    angle = places[:, None] * rotary.inv_freq
    unit = _UNIT[str(tables["cos_cache"].dtype)]
    allowed = rotary.attention_scaling * (unit + _PER_RADIAN * angle)
    parts = []
    for name, wanted in zip(_TABLES, rotary(torch.zeros(1), position_ids=places[None]), strict=True):
        # A table row holds the angles of each head of a key row, one head after another.
        table = torch.from_numpy(tables[name][at.start : at.stop].astype(np.float32)).unflatten(1, (-1, angle.shape[1]))
        parts.append(((table - wanted[0, :, None, : angle.shape[1]]).abs() / allowed[:, None]).max())
    return float(torch.stack(parts).max())


# The ops with native kernels, whose nodes have attributes.
_OPS = (NAME, QUANTIZED_ATTENTION, MATMUL)


def body_problems(model: ModelProto, width: int) -> list[str]:
    """Return sentences on nodes whose attributes differ from those of their function bodies; empty if there are none.

    Args:
        width: width of a query head.
    """
    bodies = {(each.domain, each.name): each for each in model.functions}
    nodes = [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in _OPS]
    windows = [attributes.get("local_window_size", -1) for attributes in map(_attributes, nodes)]
    widest = max((window for window in windows if isinstance(window, int)), default=-1)
    return [problem for node in nodes for problem in _problems(node, bodies.get((DOMAIN, node.op_type)), width, widest)]


def _problems(node: NodeProto, found: FunctionProto | None, width: int, widest: int) -> Iterator[str]:
    if found is None:
        yield f"{node.name}: the file has no body of {node.op_type}, and computes nothing without the native library"
        return
    try:
        made = _make_body(node, found, width, widest)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        yield f"{node.name}: its attributes are not valid for {node.op_type} ({error})"
        return
    if made.SerializeToString(deterministic=True) != found.SerializeToString(deterministic=True):
        yield f"{node.name}: {_first_difference(made, found)}"


def _make_body(node: NodeProto, found: FunctionProto, width: int, widest: int) -> FunctionProto:
    """Make a function body from a node's attributes, of the same kind as the one in the file."""
    attributes, versions = _attributes(node), {each.domain: each.version for each in found.opset_import}
    opset = versions.get("", 0)
    if node.op_type == MATMUL:
        return matmul_function(opset)
    if node.op_type == QUANTIZED_ATTENTION:
        return quantized_attention_function(opset, attributes["kv_bit_width"], bool(attributes["do_rotary"]))
    given = {name for name, value in zip(INPUTS, node.input, strict=False) if value}
    # Layers may differ in their windows, and share a body made for the widest.
    of_all = replace(AttentionAttributes(**attributes), local_window_size=widest)
    kind: BodyKind = "contrib" if CONTRIB in versions else "pure"
    return make_function_body(
        kind, of_all, width, opset, "past_key" in given, [gate for gate in GATES if gate in given]
    )


def _attributes(node: NodeProto) -> dict[str, Any]:
    values = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    return {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value for name, value in values.items()
    }


def _first_difference(made: FunctionProto, found: FunctionProto) -> str:
    """Describe where a body first differs from the one made from a node's attributes."""
    for wanted, given in zip(made.node, found.node, strict=False):
        if wanted == given:
            continue
        pairs = [{each.name: each for each in node.attribute} for node in (wanted, given)]
        for name in sorted({*pairs[0], *pairs[1]}):
            a, b = (_text(each.get(name)) for each in pairs)
            if a != b:
                return f"{given.op_type}'s {name} is {a} in its attributes, but {b} in its function body"
        return f"its attributes make another function body, from {', '.join(wanted.output)} on"
    return "its function body in the file is not the one that its attributes define"


def _text(attribute: AttributeProto | None) -> str:
    if attribute is None:
        return "absent"
    return " ".join(str(helper.printable_attribute(attribute)).split())[:120]
