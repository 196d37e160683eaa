"""Sweeps over bit widths: `run_sweep` measures, `write_outputs` tabulates, plots and reports.

`diffquant.sweep(models, output)`, the verb of `diffquant.verbs.sweep`, does both.
Names are imported when they are first used, so that `SweepOptions` costs no import of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffquant.sweep.grid import SweepOptions
    from diffquant.sweep.outputs import write_outputs
    from diffquant.sweep.result import SweepResult
    from diffquant.sweep.run import run_sweep

_HOMES = {
    "SweepOptions": "diffquant.sweep.grid",
    "SweepResult": "diffquant.sweep.result",
    "run_sweep": "diffquant.sweep.run",
    "write_outputs": "diffquant.sweep.outputs",
}

__all__ = ["SweepOptions", "SweepResult", "run_sweep", "write_outputs"]


if not TYPE_CHECKING:  # A type checker that saw it would take any name for one of ours.

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
