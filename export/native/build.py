"""Compiles the native kernels. Imports only the standard library, since the wheel's build runs this file alone."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = "libdiffquant_onnx.dylib" if sys.platform == "darwin" else "libdiffquant_onnx.so"
SOURCES = Path(__file__).parent

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# g++ warns of uninitialized registers in AVX-512's intrinsics headers.
_FLAGS += ["-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_INTEL, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
# Files compiled only for some machines, with their flags. The library checks at run time what the CPU supports.
_PROCESSOR_FLAGS = {
    "kernel_avx2": (_INTEL, _AVX2),
    "kernel_avx512": (_INTEL, _AVX512),
    "matmul_avx2": (_INTEL, _AVX2),
    "matmul_avx512vnni": (_INTEL, [*_AVX512, "-mavx512vnni"]),
    "matmul_amx": (_INTEL, [*_AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8"]),
    "matmul_neon": (_ARM, ["-march=armv8.2-a+dotprod"]),
}
# Files skipped if the compiler does not support their flags (AMX needs g++ 11), and the macro that tells the others.
_NEWEST = {"matmul_amx": "-DDIFFQUANT_WITHOUT_AMX"}
_SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def find_compiler() -> str | None:
    """Return the C++ compiler's command: $CXX if set, else a compiler on the PATH, or None if there is none."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)


def build(library: Path, compiler: str, sanitize: bool = False, sources: Path = SOURCES) -> None:
    """Compile and link the library; the file is written atomically.

    Args:
        library: file to write.
        compiler: g++ or clang++.
        sanitize: compile with address and undefined-behaviour checks, for tests.
        sources: folder of the C++ files.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its messages are on stderr.
    """
    flags = _FLAGS + (_SANITIZE if sanitize else [])
    left_out = {stem for stem in _NEWEST if not _knows_flags(compiler, _flags_of(stem))}
    flags += [_NEWEST[stem] for stem in left_out]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        compiled = [source for source in _sources_in(sources) if source.stem not in left_out]
        objects = [f"{folder}/{source.stem}.o" for source in compiled]
        commands = [
            [compiler, *flags, *_flags_of(source.stem), "-c", str(source), "-o", written]
            for source, written in zip(compiled, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder) / library.name
        _run([compiler, *flags, "-shared", "-o", str(linked), *objects])
        os.replace(linked, library)


def _flags_of(stem: str) -> list[str]:
    return _PROCESSOR_FLAGS.get(stem, ((), []))[1]


def _knows_flags(compiler: str, flags: list[str]) -> bool:
    """Return whether a compiler supports some flags."""
    command = [compiler, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _sources_in(folder: Path) -> list[Path]:
    machine = platform.machine().lower()
    elsewhere = {stem for stem, (machines, _) in _PROCESSOR_FLAGS.items() if machine not in machines}
    return [source for source in sorted(folder.glob("*.cc")) if source.stem not in elsewhere]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)
