"""A survey of a CUDA device: what the kernels find there, which of them run, and why the others do not."""

import os
from dataclasses import dataclass

import torch

from diffquant.kernels.configs import VARIABLE
from diffquant.kernels.gpu import (
    capability,
    device_class,
    device_refusal,
    fp8_refusal,
    shared_memory,
    triton_version,
    unpacked_product_refusal,
)

# Architectures that the tables of configurations were made for.
_ARCHITECTURES = {"sm_80": "Ampere", "sm_90": "Hopper"}


@dataclass(frozen=True)
class KernelSurvey:
    """Which kernels a device can run.

    Attributes:
        capability: compute capability, as in "9.0".
        shared_memory: bytes of shared memory that one block may ask for.
        triton: version of Triton; None if it is not installed.
        table: class of devices whose configurations are used.
        tuned: file of tuned configurations; None if there is none.
        refused: reason by kernel that does not run.
    """

    capability: str
    shared_memory: int
    triton: str | None
    table: str
    tuned: str | None
    refused: dict[str, str]

    def __str__(self) -> str:
        is_own = self.table.removeprefix("sm_") == self.capability.replace(".", "")
        tables = f"{_ARCHITECTURES[self.table]}'s configurations ({self.table})" + (
            "" if is_own else ", none being made for this device"
        )
        lines = [
            f"CUDA kernels: capability {self.capability}, {self.shared_memory:,} bytes of shared memory a block, "
            f"Triton {self.triton or 'not installed'}, {tables}" + (f", tuned by {self.tuned}" if self.tuned else "")
        ]
        return "\n".join([*lines, *(f"  not {kernel}: {reason}" for kernel, reason in self.refused.items())])


def survey(device: torch.device) -> KernelSurvey:
    """Survey of a CUDA device."""
    version = triton_version()
    everything = device_refusal(device)
    refusals = {
        "packed linear layers from 17 tokens on, which write the weight out first": unpacked_product_refusal(device),
        "attention triton-fp8": fp8_refusal(device),
    }
    if everything is not None:
        refusals = {"any of them": everything}
    return KernelSurvey(
        capability=".".join(map(str, capability(device))),
        shared_memory=shared_memory(device),
        triton=None if version is None else ".".join(map(str, version)),
        table=device_class(device),
        tuned=os.environ.get(VARIABLE),
        refused={kernel: reason for kernel, reason in refusals.items() if reason is not None},
    )
