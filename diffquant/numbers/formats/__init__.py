"""The number formats by name, one family a file."""

import sys

from diffquant.numbers.formats.base import FORMATS, NumberFormat, format_named, register
from diffquant.support.discovery import import_all

__all__ = ["FORMATS", "NumberFormat", "format_named", "register"]

import_all(sys.modules[__name__])
