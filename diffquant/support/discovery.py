"""Registries that fill themselves: to extend one, add a file to its package."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def import_all(package: ModuleType) -> None:
    """Import every module of a package, in alphabetical order, so that each registers what it defines."""
    for module in sorted(info.name for info in iter_modules(package.__path__)):
        import_module(f"{package.__name__}.{module}")
