"""Roundings by name: the methods that choose a weight's codes and scales, one file each."""

import sys
from collections.abc import Mapping

from diffquant.checkpoints.calibration import combine_digests
from diffquant.checkpoints.corpora import open_corpora
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.texts import text_digest
from diffquant.errors import UsageError
from diffquant.quantization.roundings.base import ROUNDINGS, Round, Rounder, Rounding, register
from diffquant.recipe.rounding import RoundingSettings
from diffquant.recipe.scheme import Scheme
from diffquant.support.names import did_you_mean, first_few, import_all, option_name

__all__ = ["Round", "Rounder", "Rounding", "calibration_digest", "checked_rounding", "register", "rounding_named"]

import_all(sys.modules[__name__])


def rounding_named(name: str) -> Rounding:
    """Return the rounding with the given name.

    Raises:
        UsageError: no rounding has this name; the message suggests the most similar one.
    """
    if name not in ROUNDINGS:
        raise UsageError(f"unknown rounding {name!r}{did_you_mean(name, list(ROUNDINGS))}")
    return ROUNDINGS[name]


def checked_rounding(settings: RoundingSettings, schemes: Mapping[str, Scheme]) -> Rounding:
    """Return the rounding that a recipe's settings name, after checking that it supports them and the schemes.

    Args:
        schemes: scheme of each module whose weight is quantized.

    Raises:
        UsageError: there is no such rounding; the settings select calibration data that it does not read, or options
            that it does not have; or it rounds each row alone, but a scale covers several rows of some modules.
    """
    rounding = rounding_named(settings.name)
    if settings.calibration_settings and not rounding.needs_text:
        readers = " or ".join(name for name, each in ROUNDINGS.items() if each.needs_text)
        raise UsageError(
            f"{' and '.join(map(option_name, settings.calibration_settings))} select the calibration data of "
            f"{option_name('rounding', readers)}; give them only with it"
        )
    foreign = [name for name in settings.options if name not in rounding.options]
    if foreign:
        owners = " or ".join(name for name, each in ROUNDINGS.items() if each.options.issuperset(foreign))
        raise UsageError(f"rounding {rounding.name} has no {', '.join(foreign)}; leave it out, or use {owners}")
    spanning = {m: scheme for m, scheme in schemes.items() if scheme.sharing.spans_rows or scheme.sharing.block_size}
    if spanning and rounding.row_by_row:
        kinds = " or ".join(
            dict.fromkeys("block" if each.sharing.block_size else "tensor" for each in spanning.values())
        )
        raise UsageError(
            f"{option_name('rounding', rounding.name)} rounds row by row, but {first_few(spanning, ', ')} have one "
            f"scale per {kinds}; use a group or row granularity, or {option_name('rounding', 'nearest')}"
        )
    return rounding


def calibration_digest(source: Source, settings: RoundingSettings) -> str | None:
    """Return a digest of a rounding's calibration data or imatrix, or None if it reads neither; no model is run.

    Raises:
        DiffQuantError: there is no such rounding, or the data cannot be read.
    """
    rounding = rounding_named(settings.name)
    if settings.imatrix is not None:
        # Imported here, since it imports gguf.
        from diffquant.checkpoints.imatrix import read_imatrix

        return read_imatrix(settings.imatrix).digest
    if not rounding.needs_text:
        return None
    texts = [corpus.text for corpus in open_corpora(settings.text)]
    if None in texts:
        return rounding.read_calibration(source, settings).digest
    return combine_digests([text_digest(text) for text in texts if text is not None])
