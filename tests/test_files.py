"""Files that are written whole or not at all, and what a killed run leaves of them."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffquant.support.files import write_atomically

# A writer that is killed, or stops, in the moment before its file would be put in place.
WRITER = """
import os, signal, sys
from pathlib import Path
from diffquant.support import files

place = os.replace
def moment(*arguments):
    print("writing", flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    place(*arguments)

files.os.replace = moment
files.write_atomically(Path(sys.argv[1]), "theirs")
"""
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no locks that fit")


def writer(file, sent):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(file), sent], stdout=subprocess.PIPE)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@posix
def test_what_a_killed_run_left_goes_away_when_the_file_is_written_again(tmp_path):
    file = tmp_path / "report.html"
    assert writer(file, "SIGKILL").wait() == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    write_atomically(file, "ours")
    assert names(tmp_path) == ["report.html"]
    assert file.read_text() == "ours"


@posix
def test_what_a_live_run_is_writing_stays(tmp_path):
    file = tmp_path / "report.html"
    other = writer(file, "SIGSTOP")
    try:
        assert other.stdout.readline() == b"writing\n"
        # A signal to go on is lost on a process that has not stopped yet.
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        (temporary,) = names(tmp_path)
        write_atomically(file, "ours")
        assert names(tmp_path) == [temporary, "report.html"]
        os.kill(other.pid, signal.SIGCONT)
        assert other.wait(timeout=30) == 0
    finally:
        other.kill()
        other.wait()
    assert names(tmp_path) == ["report.html"]
    assert file.read_text() == "theirs"


@posix
def test_files_of_others_stay(tmp_path):
    others = [
        ".report.html.0123abcd.tmp",
        ".report.html.0123abcd.diffquant.tmp.bak",
        ".report.html.xxxxxxxx.diffquant.tmp",
        ".other.html.0123abcd.diffquant.tmp",
        "x.report.html.0123abcd.diffquant.tmp",
    ]
    for name in others:
        (tmp_path / name).write_text("theirs")
    (tmp_path / ".report.html.00000000.diffquant.tmp").mkdir()
    (tmp_path / ".report.html.11111111.diffquant.tmp").symlink_to(tmp_path / others[0])
    before = names(tmp_path)
    write_atomically(tmp_path / "report.html", "ours")
    assert names(tmp_path) == sorted([*before, "report.html"])


@posix
def test_a_writer_whose_file_was_taken_away_writes_again(tmp_path, monkeypatch):
    place, taken = os.replace, []

    def take_away(source, destination):
        if not taken:
            taken.append(source)
            os.unlink(source)
        place(source, destination)

    monkeypatch.setattr(os, "replace", take_away)
    write_atomically(tmp_path / "report.html", b"ours")
    assert taken
    assert names(tmp_path) == ["report.html"]


def test_an_error_of_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def fail(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")  # so raised for an open file

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*/report\.html'$"):
        write_atomically(tmp_path / "report.html", "ours")
    assert names(tmp_path) == []


def test_a_folder_that_is_missing_is_an_error(tmp_path):
    started = time.monotonic()
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none/report.html", "ours")
    assert time.monotonic() - started < 5


@posix
def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("x")
    write_atomically(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode
