"""The verb `doctor`: checks what is installed, and shows what each missing extra would add."""

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffquant.errors import MissingDependencyError
from diffquant.support.machine import cores
from diffquant.support.terminal import PrintableResult
from diffquant.verbs.arguments import check_arguments

if TYPE_CHECKING:
    from diffquant.kernels.gpu import KernelSurvey


_BUILD = "python -m diffquant.onnx.native builds it"
# What each extra adds; extras for developers are left out.
ADDED_BY = {
    "onnx": "the export, verify and run commands, and eval of exported models",
    "onnx-gpu": "exported models on CUDA, instead of onnxruntime",
    "gpu": "the CUDA kernels",
    "flash": "only the attention backend flash_attn",
    "datasets": "calibration data from datasets",
    "search": "the search command",
    "ray": "sweeps on a Ray cluster",
    "peers": "lm-eval's tasks",
    "vllm": "the serve command on a CPU; on a GPU it uses the vllm that is installed",
}


@dataclass(frozen=True, repr=False)
class Diagnosis(PrintableResult):
    """The installed packages and kernels, and the device.

    Attributes:
        native_kernel: instruction set of the ONNX operator's kernel, or None if its library was not built.
        cuda_kernels: description of the first CUDA device, or None if torch finds no CUDA device.
        required: version of each required package, or None if the package is missing.
        extras: by name of the extra, the version of each of its packages, or None if the package is missing.
        unmet: by package, the version requirement, such as ">=2.7", that the installed version does not meet.
    """

    diffquant: str
    python: str
    cores: int
    device: str
    bfloat16: bool
    native_kernel: str | None
    cuda_kernels: "KernelSurvey | None"
    required: dict[str, str | None]
    extras: dict[str, dict[str, str | None]]
    unmet: dict[str, str]

    @property
    def is_complete(self) -> bool:
        """Whether every required package is installed in a supported version."""
        return None not in self.required.values() and not self.unmet.keys() & self.required.keys()

    def __str__(self) -> str:
        from diffquant.support.installation import install_command

        lines = [
            f"diffquant {self.diffquant}, Python {self.python}, {self.cores} cores",
            f"device: {self.device}; bfloat16 arithmetic: {'native' if self.bfloat16 else 'emulated, slow'}",
            f"ONNX kernel: {self.native_kernel or 'not built, so models run slower; ' + _BUILD}",
            str(self.cuda_kernels or "CUDA kernels: torch finds no CUDA device"),
            "required: " + ", ".join(self._describe_version(*each) for each in self.required.items()),
        ]
        for extra, versions in self.extras.items():
            missing = [name for name, version in versions.items() if version is None]
            present = ", ".join(self._describe_version(*each) for each in versions.items() if each[1])
            state = f"lacks {', '.join(missing)}, for {ADDED_BY[extra]}"
            lines.append(
                f"extra {extra}: {present + '; ' if present and missing else present}{state if missing else ''}"
            )
        return "\n".join([*lines, f"an extra is added by {install_command('EXTRA')}"])

    def _describe_version(self, package: str, version: str | None) -> str:
        bound = self.unmet.get(package)
        return f"{package} {version or 'MISSING'}" + (f" (NOT {bound})" if bound else "")


def diagnose(native_kernel: str | None) -> Diagnosis:
    """Check the installed packages and the device.

    Args:
        native_kernel: instruction set of the ONNX op's kernel, or None if it was not built.
    """
    # Imported here, since `import diffquant` imports this file, and few programs call `doctor`.
    from packaging.requirements import Requirement

    from diffquant.serving.vllm import OLDEST
    from diffquant.support.installation import __version__, installed_version, requirements

    needed = requirements()
    if installed_version("vllm"):
        # The extra requires vLLM's CPU build; the GPU build replaces it.
        needed["vllm"] = [Requirement(f"vllm>={OLDEST}")]
    versions = {
        extra: {each.name: installed_version(each.name) or None for each in wanted} for extra, wanted in needed.items()
    }
    required = versions[""]
    device, bfloat16 = _device() if required["torch"] else ("unknown without torch", False)
    return Diagnosis(
        diffquant=__version__,
        python=platform.python_version(),
        cores=cores(),
        device=device,
        bfloat16=bfloat16,
        native_kernel=native_kernel,
        cuda_kernels=_cuda_kernels() if required["torch"] else None,
        required=required,
        extras={extra: versions[extra] for extra in ADDED_BY if extra in versions},
        unmet={
            each.name: str(each.specifier)
            for extra, wanted in needed.items()
            for each in wanted
            if (version := versions[extra][each.name]) and not each.specifier.contains(version, prereleases=True)
        },
    )


def _device() -> tuple[str, bool]:
    import torch

    from diffquant.support.devices import is_bfloat16_native

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), is_bfloat16_native("cuda")
    capability = torch.backends.cpu.get_cpu_capability()
    return f"CPU ({capability})", is_bfloat16_native()


def _cuda_kernels() -> "KernelSurvey | None":
    import torch

    from diffquant.kernels.gpu import survey_kernels

    return survey_kernels(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


@check_arguments
def doctor() -> "Diagnosis":
    """Show what is installed, and what each extra would add.

        diffquant doctor

    Raises:
        MissingDependencyError: a required package is missing or its version is not supported; its `result` is the
            diagnosis.
    """
    from diffquant.onnx.native import attention_instruction_set
    from diffquant.support.installation import install_command

    diagnosis = diagnose(attention_instruction_set())
    if not diagnosis.is_complete:
        raise MissingDependencyError(
            f"a required package is missing, or its version is not supported: {install_command()}", diagnosis
        )
    return diagnosis
