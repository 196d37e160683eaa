"""Proof that an exported folder is its model: the verb `verify`."""

from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto

from diffquant.errors import CheckpointError, ToleranceError
from diffquant.export.files import RANGES_FILE, check_exported
from diffquant.export.graph.external import load_graph
from diffquant.export.graph.matmul import MATMUL
from diffquant.export.graph.plan import check_exportable
from diffquant.export.manifest import Manifest, check_unchanged, read_manifest
from diffquant.export.runtime.device import RuntimeDevice
from diffquant.export.runtime.generation import read_context
from diffquant.export.verification.bodies import body_problems
from diffquant.export.verification.caches import cache_scales, scale_error
from diffquant.export.verification.comparison import Comparison
from diffquant.export.verification.latent_reference import LatentReference
from diffquant.export.verification.passages import sample_passages
from diffquant.export.verification.reference import Reference
from diffquant.export.verification.report import Measure, Verification
from diffquant.export.verification.rotation import rotation_excess
from diffquant.export.verification.state_reference import StateReference
from diffquant.model.architecture import Architecture
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.source.ranges import read_any_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.allocator import freed_memory_kept
from diffquant.support.digests import FileDigests
from diffquant.support.progress import Progress, silent

# A scale of the cache may differ by this share from calibration's.
SCALE_LIMIT = 0.01
# Of a Transformer it is `Reference`.
_TWINS: Mapping[type[Architecture], type[Reference]] = {
    SambaYArchitecture: StateReference,
    Motif3Architecture: LatentReference,
}


def verify(
    folder: Path,
    source: Path | str | Source,
    tolerance: float | None = None,
    threads: int = 0,
    device: str = "auto",
    progress: Progress = silent,
) -> Verification:
    """Compare an exported folder with the checkpoint it was made from.

    Args:
        folder: folder that `export` wrote.
        source: checkpoint that it was exported from.
        tolerance: relative RMS error allowed of the logits of whole runs; by default a few times what rounding alone
            does to the reference.
        threads: number of ONNX Runtime's threads; 0 takes all cores.
        device: where ONNX Runtime computes: "auto", "cpu", "cuda" or "cuda:N"; the reference stays on the processor.
        progress: called with the routes that were compared.

    Raises:
        CheckpointError: the folder was edited after export, or made from another checkpoint, or cannot run.
        MissingDependencyError: ONNX Runtime cannot use the device.
        ToleranceError: something differs by more than rounding explains; its `result` is the Verification.
    """
    folder = Path(folder)
    # Before the checkpoint is opened, which says less where the two were exchanged.
    check_exported(folder)
    source = open_source(source)
    check_exportable(source, "verify")
    chosen = RuntimeDevice.parse(device)
    chosen.check()
    progress(0, 1, "reading the folder and its checkpoint")
    manifest = read_manifest(folder)
    check_unchanged(folder, manifest)
    # Without it nothing continues a text with the graph.
    read_context(folder)
    _check_source(manifest, source)
    graph = load_graph(folder)
    reference = twin_of(source)(source, manifest.options, cache_scales(graph), exact_bits(graph))
    rotary = getattr(reference.model.model, "rotary_emb", None)
    positions = source.architecture.max_position_embeddings
    rotation = None if rotary is None else rotation_excess(graph, rotary, positions)
    passages = sample_passages(source, reference.model.config)
    with freed_memory_kept():
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
        verification = comparison.verification(
            scales=_scale_error(folder, manifest, reference),
            rotation=None if rotation is None else Measure(rotation, 1.0),
            bodies=body_problems(graph, reference.width),
        )
    if not verification.passed:
        raise ToleranceError(str(verification), verification)
    return verification


def twin_of(source: Source) -> type[Reference]:
    """The class of the torch twin of an export of this checkpoint."""
    return _TWINS.get(type(source.architecture), Reference)


def exact_bits(graph: ModelProto) -> set[int]:
    """Widths of codes whose products do not round activations; older exports have 8 bits among them."""
    products = [{each.name: each.i for each in node.attribute} for node in graph.graph.node if node.op_type == MATMUL]
    return {product["bits"] for product in products if product["accuracy_level"] == 1}


def _scale_error(folder: Path, manifest: Manifest, reference: Reference) -> Measure | None:
    """How far the cache's scales are from calibration's; None without a quantized cache, or a record of it."""
    if reference.cache is None or not manifest.calibration.by_name:
        return None
    return Measure(scale_error(reference.cache, read_any_ranges(folder / RANGES_FILE)), SCALE_LIMIT)


def _check_source(manifest: Manifest, source: Source) -> None:
    exported = manifest.weights
    if FileDigests.of(source.checkpoint.weight_files(), exported.algorithm).contents != exported.contents:
        raise CheckpointError(
            f"the folder was exported from {manifest.source['name']}, whose weights are not those of {source.path}; "
            "verify it against its own checkpoint"
        )
