"""The roundings by name: every rule by which weights can become codes and scales, one file each."""

import sys
from collections.abc import Mapping

from diffquant.errors import UsageError
from diffquant.quantization.roundings.base import ROUNDINGS, Round, Rounder, Rounding, register
from diffquant.recipe.rounding import RoundingSettings
from diffquant.scheme import Scheme
from diffquant.support.discovery import import_all
from diffquant.support.listing import first_few
from diffquant.support.spelling import spelled
from diffquant.support.suggestion import did_you_mean
from diffquant.text.corpus import load_text, text_digest

__all__ = ["Round", "Rounder", "Rounding", "checked_rounding", "register", "rounding_named", "text_read_digest"]

import_all(sys.modules[__name__])


def rounding_named(name: str) -> Rounding:
    """The rounding that has a name.

    Raises:
        UsageError: there is none; the nearest name is suggested.
    """
    if name not in ROUNDINGS:
        raise UsageError(f"unknown rounding {name!r}{did_you_mean(name, list(ROUNDINGS))}")
    return ROUNDINGS[name]


def checked_rounding(settings: RoundingSettings, schemes: Mapping[str, Scheme]) -> Rounding:
    """The rounding that a recipe's settings name, checked to do what they and the schemes ask of it.

    Args:
        schemes: scheme of each module whose weight is quantized.

    Raises:
        UsageError: there is no such rounding, the settings name a text and it reads none, or options that it does not
            have, or it works row by row and scales span rows, every such module named.
    """
    rounding = rounding_named(settings.name)
    if settings.reads and not rounding.needs_text:
        readers = " or ".join(name for name, each in ROUNDINGS.items() if each.needs_text)
        raise UsageError(
            f"{spelled('text')} and {spelled('tokens')} say which text {spelled('rounding', readers)} reads; give them "
            "only with it"
        )
    foreign = [name for name in settings.options if name not in rounding.options]
    if foreign:
        owners = " or ".join(name for name, each in ROUNDINGS.items() if each.options.issuperset(foreign))
        raise UsageError(f"rounding {rounding.name} takes no {', '.join(foreign)}; leave out, or name {owners}")
    spanning = {m: scheme for m, scheme in schemes.items() if scheme.sharing.spans_rows or scheme.sharing.tile}
    if spanning and rounding.row_by_row:
        kinds = " or ".join(dict.fromkeys("block" if each.sharing.tile else "tensor" for each in spanning.values()))
        raise UsageError(
            f"{spelled('rounding', rounding.name)} works row by row and {first_few(spanning, ', ')} have one scale a "
            f"{kinds}; use a group or row granularity, or {spelled('rounding', 'nearest')}"
        )
    return rounding


def text_read_digest(settings: RoundingSettings) -> str | None:
    """16 hex digits of the text that a rounding reads, without reading it through a model; None if it reads none.

    Raises:
        UsageError: there is no such rounding, or the text cannot be read.
    """
    return text_digest(load_text(settings.text)) if rounding_named(settings.name).needs_text else None
