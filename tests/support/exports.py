"""Ranges that exports in tests are given beside their checkpoint."""

from pathlib import Path

from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.checkpoints.ranges import Ranges
from diffquant.onnx import ExportOptions
from diffquant.recipe import Recipe
from tests.support.models import random_ids


def cache_ranges(source: Path, options: ExportOptions) -> Ranges | None:
    """Ranges of an export's quantized cache, calibrated on random tokens; None for one in the activations' type."""
    if options.kv_bits == 16:
        return None
    return calibrate_cache(source, Recipe(weights=options.weights), random_ids(2, 64))
