"""The walk through README notices what would turn a stranger away."""

import os
import sys

import pytest

from tests.support.watched import loop_seconds, run, waits
from tests.walk import _DURATION, Step, misstated, says_the_same, steps_of, walk, words_of

PAGE = """
```sh
diffquant doctor    # 2 s
a --b \\
    c
```

```
$ one x   # 3 s
first
second
$ two y   # 1 min
```

```python
import this  # 4 s
```
"""
DURATION = "  # 1 s"
LOOP = "<!-- The loop of tests/walk.py took 1.50 CPU seconds there. -->\n"


@pytest.fixture(autouse=True)
def loop(monkeypatch):
    """A processor that is as fast as README's."""
    monkeypatch.setattr("tests.walk.loop_seconds", lambda: 1.5)


def program(tmp_path, body):
    """Variables with which `diffquant` is a shell script."""
    file = tmp_path / "bin/diffquant"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return os.environ | {"PATH": f"{file.parent}:{os.environ['PATH']}"}


def walked(command, tmp_path, capsys, shown=""):
    """What the walk says of a page's `diffquant` that does what a shell command does."""
    faults = walk(f"{LOOP}```\n$ diffquant  {command}\n{shown}```\n", tmp_path, program(tmp_path, command))
    said = capsys.readouterr().out
    assert faults == said.count("      ! ")
    return said


def test_commands_are_found_with_what_is_shown_below_them():
    steps = list(steps_of(PAGE))
    assert [(step.line, step.command.split("\n")[0], step.shown) for step in steps] == [
        (3, "diffquant doctor    # 2 s", None),
        (4, "a --b c", None),
        (9, "one x   # 3 s", ["first", "second"]),
        (12, "two y   # 1 min", []),
        (16, "python - <<'END'  # 4 s", None),
    ]


def test_seconds_and_speeds_may_differ_and_sizes_may_not():
    assert (
        words_of(["3 MB in 10.2 s, 88.1 tokens/s"])
        == words_of(["3 MB in", "  9 s, 7 tokens/s"])
        != words_of(["4 MB in 9 s, 7 tokens/s"])
    )


@pytest.mark.parametrize(
    ("command", "shown", "fault"),
    [
        ("echo hello", "hello\n", "README does not say how long it takes"),
        ("echo hello" + DURATION, "good bye\n", "README shows other lines"),
        ("false" + DURATION, "", "it ended with 1"),
        (f"printf '%081d\\n' 0{DURATION}", f"{0:081}\n", "a line has 81 columns"),
        (f"printf '\\r%081d' 0 >&2{DURATION}", "", "a line has 81 columns"),
    ],
)
def test_a_fault_is_told(command, shown, fault, tmp_path, capsys):
    assert fault in walked(command, tmp_path, capsys, shown)


def test_silence_is_measured_before_between_and_after_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tests.walk.LONGEST_SILENCE", 0.4)
    for command in ("sleep 1", "echo; sleep 1; echo >&2", "echo >&2; sleep 1"):
        assert run(command, tmp_path, dict(os.environ)).silence > 0.9
    assert "it said nothing for 1 s" in walked("sleep 1" + DURATION, tmp_path, capsys)
    assert "said nothing" not in walked("for i in 1 2 3; do sleep 0.2; echo $i >&2; done" + DURATION, tmp_path, capsys)


def test_what_waits_for_a_core_is_not_silent(tmp_path):
    # Two programs that work without a word, on one core: each waits for half of the time.
    core = min(os.sched_getaffinity(0))
    work = f"taskset -c {core} {sys.executable} -c 'import time; t = time.time() + 6\nwhile time.time() < t: pass'"
    both = run(f"{work} & {work}; wait", tmp_path, dict(os.environ))
    assert both.seconds > 6
    assert both.silence < both.seconds - 1.5
    assert both.cpu < both.seconds + 1
    assert max(waits(os.getpid()).values()) >= 0


@pytest.mark.parametrize(
    ("stated", "cpu", "is_wrong"),
    [
        ("20 s", 20, False),
        ("20 s", 99, False),
        ("20 s", 101, True),
        ("1 to 3 min", 300, False),
        ("1 to 3 min", 901, True),
        ("1 to 3 min", 21, True),
        ("about 2 min", 40, True),
        ("5 s", 0.1, False),
    ],
)
def test_a_duration_is_held_to_the_work_that_there_is(stated, cpu, is_wrong):
    found = _DURATION.search(f"diffquant verify a b   # {stated}: PASS if 3 of 4 min")
    assert (misstated(found, cpu) is not None) is is_wrong


def test_a_page_that_does_not_record_its_processor_is_told(tmp_path, capsys):
    walk("```sh\ndiffquant a # 1 s\n```", tmp_path, program(tmp_path, "true"))
    assert "does not say how long the loop of tests/walk.py took" in capsys.readouterr().out
    assert loop_seconds() > 0.05


def test_a_command_sees_a_terminal_of_80_columns(tmp_path):
    look = (
        "import os, sys; print(*(os.get_terminal_size(stream.fileno()).columns for stream in (sys.stdout, sys.stderr)))"
    )
    assert run(f'{sys.executable} -c "{look}"', tmp_path, dict(os.environ)).stdout == "80 80\n"


def test_a_result_that_is_larger_than_16_bits_is_a_fault(tmp_path, capsys):
    environment = program(tmp_path, 'mkdir -p "$4" && head -c "$5" /dev/zero > "$4/model"')
    calls = ["convert a -o b 1000", "quantize b -o c 999", "export c -o d 1000"]
    page = LOOP + "\n".join(["```sh", *(f"diffquant {call} # 1 s" for call in calls), "```"])
    assert walk(page, tmp_path, environment) == 1
    assert "d has 1,000 bytes, and 16 bits take 1,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "shown", "printed", "same"),
    [
        ("diffquant quantize a -o b", "24.86%  layers.23.o_proj  4:g32", "26.27%  layers.23.o_proj  4:g32", True),
        ("diffquant quantize a -o b", "24.86%  layers.23.o_proj  4:g32", "34.86%  layers.23.o_proj  4:g32", False),
        ("diffquant quantize a -o b", "24.86%  layers.23.o_proj", "24.86%  layers.22.o_proj", False),
        (
            "diffquant quantize a -o b",
            "a:\n  9.8%  first\n  9.7%  next\nend",
            "a:\n  9.9%  next\n  9.8%  first\nend",
            True,
        ),
        (
            "diffquant quantize a -o b",
            "a:\n  9.8%  first\n  7.7%  next\nend",
            "a:\n  9.9%  next\n  9.8%  first\nend",
            False,
        ),
        ("diffquant quantize a -o b", "3 MB", "3 MB more", False),
        ("diffquant quantize a -o b", "b: 122.4 MB", "b: 122.5 MB", False),
        ("diffquant generate a", " Paris. It lies there.", " Paris. Rome is in Italy.", True),
        ("diffquant generate a", " Paris. It lies there.", " located in the heart. It lies there.", False),
        ("diffquant run a", " Paris. It lies there.", "", False),
    ],
)
def test_processors_may_differ_in_how_much_they_round_and_in_what_a_model_goes_on_to_write(
    command, shown, printed, same
):
    assert says_the_same(Step(1, command, shown.split("\n")), printed.split("\n")) is same
