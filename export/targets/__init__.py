"""Formats that checkpoints are exported to: one registered file each in this folder, all of which are loaded here."""

import sys

from diffquant.export.targets.registry import ExportTarget, register, runtime_of, target_of
from diffquant.support.discovery import import_all

import_all(sys.modules[__name__])

__all__ = ["ExportTarget", "register", "runtime_of", "target_of"]
