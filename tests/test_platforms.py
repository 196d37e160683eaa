"""What Windows and macOS lack is needed by no module and by no verb that writes."""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from diffquant.data import pocket_models
from diffquant.support.files import PreallocatedFile
from tests.support.tables import in_one_test
from tests.support.thorough import sampled, thorough

ROOT = Path(__file__).parents[1]
LINKS = {"benchmarks": "bench", "calib": "calib", "onnx": "export"}

# Other libraries come first, since they have ways of their own on other systems.
WITHOUT_POSIX = """
import os, pkgutil, signal, sys
import accelerate, filelock, huggingface_hub, matplotlib, psutil, tokenizers, torch, transformers, typer
import transformers.modeling_utils, torch.utils.cpp_extension
try:
    import onnx, onnxruntime
except ImportError:
    onnx = None
for name in ("fcntl", "resource", "termios", "pwd", "grp", "syslog"):
    sys.modules[name] = None
for name in ("pwrite", "pread", "sched_getaffinity", "sysconf", "fork", "getuid", "geteuid", "uname", "killpg",
             "getpgid", "mkfifo", "O_CLOEXEC", "O_DIRECTORY", "posix_fallocate", "getloadavg", "wait4"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGALRM", "SIGUSR1", "SIGHUP", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
"""
EVERY_MODULE = """
import importlib
import diffquant
NEED_MORE = {"triton", "vllm", "lm_eval", "scipy", "flash_attn", "onnx", "onnxruntime", "onnx_ir", "bitsandbytes"}
for module in pkgutil.walk_packages(diffquant.__path__, "diffquant."):
    if module.name.endswith(("__main__", "libdiffquant_onnx")):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in NEED_MORE:
            raise
"""
EVERY_WRITER = """
from pathlib import Path
import diffquant
from diffquant import data
from diffquant.calib.calibration.calibrate import calibrate
from diffquant.checkpoints.ranges import write_ranges

folder = Path(sys.argv[1])
(pocket,) = (path for path in data.pocket_models("needle") if path.name == "needle-diff-v1")
diffquant.quantize(pocket, folder / "four", diffquant.Recipe.of(weights="4:g32"))
ranges, _ = calibrate(pocket, tokens=256, window=64)
write_ranges(folder / "scales.safetensors", ranges)
assert len(diffquant.load(folder / "four").model.layers) == len(diffquant.load(pocket).model.layers)
if onnx:
    from diffquant.onnx.exporter import export
    from diffquant.onnx.runtime.generation import peak_bytes
    export(folder / "four", folder / "onnx")
    assert (folder / "onnx/model.onnx").is_file()
    assert peak_bytes() > 1e6
assert not [path.name for path in folder.iterdir() if "diffquant-" in path.name or path.suffix == ".partial"]
"""


@thorough
def test_modules_import_and_checkpoints_are_written_where_the_system_is_not_posix(tmp_path):
    code = WITHOUT_POSIX + EVERY_MODULE + EVERY_WRITER
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@thorough
def test_what_a_code_page_cannot_write_is_replaced():
    pocket = str(pocket_models("needle")[1])
    done = subprocess.run(
        [sys.executable, "-m", "diffquant", "inspect", pocket],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        encoding="cp1252",
    )
    assert done.returncode == 0, done.stderr
    assert "? by layer" in done.stdout


@pytest.mark.parametrize("closed", sampled([">&- 2>&- <&-", ">&-", "2>&-"], 3))
def test_a_command_whose_streams_are_closed_does_its_work(tmp_path, closed):
    line = f'exec "$0" -m diffquant quantize "$1" -o "$2" --weights 8:row --effort fast {closed}'
    words = [sys.executable, str(pocket_models("needle")[1]), str(tmp_path / "low")]
    done = subprocess.run(["sh", "-c", line, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "low" / "model.safetensors").exists()


@in_one_test("has_pwrite", [True, False])
def test_threads_put_bytes_in_their_places(tmp_path, monkeypatch, has_pwrite):
    if not has_pwrite:
        monkeypatch.delattr("os.pwrite")
    expected = bytes(range(256)) * 64
    with closing(PreallocatedFile(tmp_path / "file", len(expected))) as file, ThreadPoolExecutor(8) as pool:
        offsets = range(len(expected) - 7, -7, -7)
        pieces = [(max(0, o), expected[max(0, o) : o + 7]) for o in offsets]
        list(pool.map(lambda piece: file.put(memoryview(piece[1]), piece[0]), pieces))
    assert (tmp_path / "file").read_bytes() == expected


@pytest.fixture
def clone_without_links(tmp_path):
    """The files that an import or an installation starts from, as `git clone -c core.symlinks=false` leaves them."""
    left_out = shutil.ignore_patterns("data", *LINKS)
    shutil.copytree(ROOT / "diffquant", tmp_path / "diffquant", ignore=left_out)
    shutil.copy(ROOT / "setup.py", tmp_path)
    for link, folder in LINKS.items():
        (tmp_path / "diffquant" / link).write_text(f"../{folder}")
    return tmp_path


@pytest.mark.parametrize("command", sampled(["-c 'import diffquant'", "-m diffquant --help", "setup.py egg_info"], 3))
def test_a_clone_without_symbolic_links_says_how_to_make_them(clone_without_links, command):
    call = [sys.executable, *shlex.split(command)]
    done = subprocess.run(call, cwd=clone_without_links, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: this clone was made without symbolic links")
    assert all(f"diffquant/{link}" in last for link in LINKS)
    assert "git config core.symlinks true" in last
