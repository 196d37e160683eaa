import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from diffquant.support.progress import Countdown

PROGRAM = """
import sys, time
from diffquant.support.progress import progress_for
show = progress_for("quantize")
for done in range(5):
    show(done * 1e9, 4e9, f"model.layers.{done}.mlp.down_proj.weight and more than fits into the line")
    time.sleep(0.25)
"""


def on_a_terminal(program, columns=50):
    """All that a program writes to stderr where that is a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
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


def lines_of(written):
    return [line.strip() for line in written.replace("\x1b[K", "").split("\r") if line.strip()]


@pytest.fixture(scope="module")
def drawn():
    status, written = on_a_terminal(PROGRAM)
    assert status == 0
    return lines_of(written)


def test_a_line_has_the_label_the_share_the_time_left_and_what_is_under_way(drawn):
    assert drawn[0].startswith("quantize   0%  ? left, model.layers.0.mlp")
    assert any(re.match(r"quantize  50%  00:0\d left, model\.layers\.2\.mlp", line) for line in drawn)
    assert re.match(r"quantize 100%  00:0[1-9], model\.layers\.4\.mlp", drawn[-1])


@pytest.mark.parametrize("columns", [50, 80])
def test_no_line_is_wider_than_the_terminal_and_none_scrolls(columns):
    _, written = on_a_terminal(PROGRAM, columns)
    assert columns - 2 < max(map(len, lines_of(written))) <= columns
    # A line that wraps, or one that is not redrawn in place, would scroll.
    assert written.count("\n") == 1


def test_the_time_left_runs_down_while_nothing_is_reported():
    program = PROGRAM.replace("range(5)", "(0, 1)").replace("4e9", "10e9").replace("0.25", "3.2")
    _, written = on_a_terminal(program)
    left = [int(seconds) for seconds in re.findall(r" 10%  00:(\d\d) left", written)]
    assert len(left) >= 3
    assert left[0] - left[-1] >= 2
    assert left == sorted(left, reverse=True)


def test_a_program_that_fails_leaves_no_line_behind_its_message():
    status, written = on_a_terminal(PROGRAM.replace("time.sleep(0.25)", "done == 2 and sys.exit('error: why')"))
    assert status == 1
    shown = written.replace("\r\n", "\n").split("error: why")
    assert shown[1].replace("\r", "").strip() == ""


FAILING = """
from diffquant.errors import UsageError
from diffquant.support.program import run_program
def work():
    show(1, 2, "half")
    raise UsageError("why")
run_program(work)
"""


def test_an_error_takes_the_line_off_the_terminal_before_its_message():
    status, written = on_a_terminal(PROGRAM + FAILING)
    assert status == 2
    assert re.search(r"\r\x1b\[Kerror: why\s*$", written)


def test_short_work_is_silent_off_a_terminal():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_long_work_is_a_line_per_minute_off_a_terminal():
    # A clock on which each report comes 25 seconds after the one before.
    hurried = "import time\nclock = iter(range(0, 10**6, 5))\ntime.monotonic = lambda: next(clock)\n"
    program = hurried + PROGRAM.replace("range(5)", "range(41)").replace("4e9", "40e9").replace("time.sleep(0.25)", "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    form = re.compile(r"quantize \d+% after \d+ min(, about \d+ (s|min) left)?: model\.layers\.")
    assert all(form.match(line) for line in lines)
    minutes = [int(re.search(r"after (\d+) min", line)[1]) for line in lines]
    assert minutes == sorted(minutes)
    assert len(lines) - 1 <= minutes[-1] < 15
    assert lines[-1].startswith("quantize 100% after")


def test_the_time_left_is_never_nothing_while_work_is_left(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    countdown = Countdown(0.0)
    clock[0] = 10.0
    countdown.report(0.2)
    assert countdown.seconds_left == pytest.approx(40)
    clock[0] = 15.0
    assert countdown.seconds_left == pytest.approx(35)
    # A step that takes ten times as long as those before: the mean is what is known.
    clock[0] = 110.0
    assert countdown.seconds_left == pytest.approx(110 * 0.62 / 0.38)
    countdown.report(0.4)
    assert countdown.seconds_left == pytest.approx(165)
    clock[0] = 10000.0
    assert countdown.seconds_left > 1000


WAITING = """
import time
from diffquant.support.progress import clear_line, hide_line_briefly, progress_for, show_waiting
import sys
line = show_waiting("verify: loading ...")
line.__enter__()
time.sleep(1.3)
hide_line_briefly()
print("note: something", file=sys.stderr)
time.sleep(1.1)
shown = progress_for("verify")
shown(0, 2, "layer 1")
time.sleep(1.2)
hide_line_briefly()
print("note: something else", file=sys.stderr)
time.sleep(1.2)
"""


def test_a_line_stands_there_before_there_is_progress():
    _, written = on_a_terminal(WAITING)
    before, after, drawn_again = re.split(r"note: something(?: else)?\r\n", written.replace("\x1b[K", ""))
    assert before.startswith("\rverify: loading ...\rverify: loading ... 1 s\r")
    waited, drawn = after.split("verify   0%", 1)
    assert waited.strip("\r\n") == "verify: loading ... 2 s"
    assert "loading" not in drawn
    assert "\r\x1b[Knote: something else" in written
    assert "verify   0%" in drawn_again


@pytest.mark.parametrize("columns", [30, 50])
def test_a_long_line_goes_on_below_at_a_word_and_a_pipe_keeps_it_whole(columns):
    text = "note: a sentence of more words than thirty columns hold\n  indented twice, and that is just as long as this"
    program = (
        f"import sys\nfrom diffquant.support.terminal import fit_to_terminal as "
        f"fit\nsys.stderr.write(fit({text!r}, sys.stderr))"
    )
    _, written = on_a_terminal(program, columns)
    lines = written.split("\r\n")
    assert max(map(len, lines)) <= columns
    assert " ".join(written.split()) == " ".join(text.split())
    assert all(line.startswith("    ") for line in lines[lines.index(next(x for x in lines if "twice" in x)) + 1 :])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == text
