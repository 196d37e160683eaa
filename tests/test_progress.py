import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

COLUMNS = 50
PROGRAM = """
import sys, time
from diffquant.support.progress import progress_for
show = progress_for("quantize")
for done in range(5):
    show(done * 1e9, 4e9, f"model.layers.{done}.mlp.down_proj.weight and more than fits into the line")
    time.sleep(0.25)
"""


def on_a_terminal(program):
    """All that a program writes to stderr where that is a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    with subprocess.Popen([sys.executable, "-c", program], stderr=theirs, stdout=subprocess.PIPE) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 4096):
                written += part
        except OSError:  # the other side is closed
            pass
        assert process.stdout.read() == b""
    os.close(ours)
    return process.returncode, written.decode()


@pytest.fixture(scope="module")
def drawn():
    status, written = on_a_terminal(PROGRAM)
    assert status == 0
    return [line.strip() for line in written.replace("\x1b[A", "").split("\r") if line.strip()]


def test_a_line_has_the_label_the_share_the_time_left_and_what_is_under_way(drawn):
    assert drawn[0].startswith("quantize   0%  ? left, model.layers.0.mlp")
    assert any(re.match(r"quantize  50%  00:0\d left, model\.layers\.2\.mlp", line) for line in drawn)
    assert re.match(r"quantize 100%  00:0[1-9], model\.layers\.4\.mlp", drawn[-1])


def test_no_line_is_wider_than_the_terminal(drawn):
    assert COLUMNS - 2 < max(map(len, drawn)) <= COLUMNS


def test_a_program_that_fails_leaves_no_line_behind_its_message():
    status, written = on_a_terminal(PROGRAM.replace("time.sleep(0.25)", "done == 2 and sys.exit('error: why')"))
    assert status == 1
    shown = written.replace("\r\n", "\n").split("error: why")
    assert shown[1].replace("\r", "").strip() == ""


def test_progress_is_silent_off_a_terminal():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_to_do_is_all_done():
    program = 'from diffquant.support.progress import progress_for\nprogress_for("convert")(0, 0, "nothing")'
    assert "convert 100%" in on_a_terminal(program)[1]
