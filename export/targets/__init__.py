"""Formats that checkpoints are exported to: one registered file each in this folder, all of which are loaded here."""

from importlib import import_module
from pkgutil import iter_modules

from diffquant.export.targets.registry import ExportReport, ExportTarget, register, target_of

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["ExportReport", "ExportTarget", "register", "target_of"]
