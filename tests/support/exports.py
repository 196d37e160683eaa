"""Exports as tests make them, each once, with ranges calibrated on random tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.checkpoints.ranges import Ranges
from diffquant.onnx import ExportOptions, export
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids


def cache_ranges(source: Path, options: ExportOptions) -> Ranges | None:
    """Ranges of an export's quantized cache, calibrated on random tokens; None for one in the activations' type."""
    if options.kv_bits == 16:
        return None
    return calibrate_cache(source, Recipe(weights=options.weights), random_ids(2, 64))


def export_to(folder: Path, source: Path, **options: Any) -> Path:
    """Export a checkpoint by options as text has them; the folder."""
    parsed = ExportOptions.parse(**options)
    export(source, folder, parsed, ranges=cache_ranges(source, parsed))
    return folder


def exports_in(root: Path) -> Callable[..., tuple[Path, Path]]:
    """A function from a source, its context and options to its checkpoint and its export, each made once."""
    checkpoints: dict[tuple[str, int | None], Path] = {}
    made: dict[tuple[Any, ...], Path] = {}

    def make(source: str = "unilm-v2-half", context: int | None = None, **options: Any) -> tuple[Path, Path]:
        of, key = (source, context), (source, context, *options.items())
        if of not in checkpoints:
            changes: dict[str, Any] = {} if context is None else {"max_position_embeddings": context}
            checkpoints[of] = write_checkpoint(root / f"{source} {context}", source, **changes)
        if key not in made:
            made[key] = export_to(root / f"export {len(made)}", checkpoints[of], **options)
        return checkpoints[of], made[key]

    return make
