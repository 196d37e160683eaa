"""The GPU's table: verdicts, ratios, what is written when, and the parts of it that a CPU can run."""

import json
import time
from multiprocessing import get_context

import pytest
import torch
from torch.nn import Embedding
from torch.nn.modules.module import register_module_forward_hook

from diffquant.benchmarks import contest, linears
from diffquant.benchmarks.measuring import TURN_MS
from diffquant.benchmarks.workloads import Workload, find_model, make_differential_call
from research.bench.gpu import groups, ratios, stores
from research.bench.gpu.groups import Aim, Group


@pytest.fixture(autouse=True)
def _imports_are_shared(monkeypatch):
    """Processes begin with torch and this file imported, which is nearly all that each would do by itself."""
    shared = get_context("forkserver")
    shared.set_forkserver_preload([__name__])
    monkeypatch.setattr(ratios, "get_context", lambda _: shared)


def cells(**medians):
    return [{"path": name, "median": value, "values": [value]} for name, value in medians.items()]


def test_an_aim_is_reached_only_if_every_run_reaches_it():
    aim = Aim("fast", "slow", 2.0)
    assert ratios.verdict(aim, [cells(fast=1.0, slow=2.5), cells(fast=1.0, slow=2.0)])["state"] == "reached"
    assert ratios.verdict(aim, [cells(fast=1.0, slow=2.5), cells(fast=1.0, slow=1.9)])["state"] == "missed"
    absent = ratios.verdict(aim, [[{"path": "fast", "missing": "no kernel"}, *cells(slow=1.0)]])
    assert absent["state"] == "not measured"
    assert absent["reasons"] == ["fast: no kernel"]
    assert ratios.verdict(aim, [])["state"] == "not measured"


def test_ratios_are_of_turns_side_by_side():
    fast, slow = (
        {"path": name, "median": 2.0, "values": values} for name, values in (("a", [1, 2, 9]), ("b", [3, 2, 18]))
    )
    assert ratios.verdict(Aim("a", "b", 1.0), [[fast, slow]])["ratios"] == [2.0]


def test_an_aim_against_a_peer_that_not_every_machine_has_is_held_where_it_runs():
    aim = Aim("fast", "newer", 1.0, needs_other=False)
    absent = {"path": "newer", "missing": "cuDNN refuses it"}
    assert ratios.verdict(aim, [[*cells(fast=1.0), absent]])["state"] == "not there"
    assert ratios.verdict(aim, [cells(fast=2.0, newer=1.0)])["state"] == "missed"
    assert ratios.verdict(aim, [[absent]])["state"] == ratios.verdict(aim, [])["state"] == "not measured"


def fails():
    raise RuntimeError("illegal memory access")


def hangs():
    time.sleep(600)


def test_a_process_that_hangs_ends_with_a_reason_and_is_called_no_more():
    stuck, well = ratios.Apart(), ratios.Apart()
    waiting, done = stuck.start(hangs, ()), well.start(first, ())
    assert stuck.result(waiting, 0.5) is None
    assert stuck.problem == "no result in time"
    assert stuck.start(first, ()) is None
    assert well.result(done, 60) == cells(a=1.0)
    assert well.problem is None
    stuck.end()
    well.end()


def test_a_group_that_fails_is_reported_and_ends():
    found = ratios.run_group(Group("broken", (Aim("a", "b", 1.0),), fails, ()), ratios.Apart())
    assert found["problem"] == "RuntimeError: illegal memory access"
    assert found["aims"][0]["state"] == "not measured"
    assert "FAILED" in ratios.group_text(found)


CEILINGS = {"copy": {"bytes a second": 1e9}, "matmul": {"float16": 1e12}}


def test_each_path_stands_beside_its_named_peers_its_memory_and_the_ceilings():
    ours = {
        "path": "ours",
        "median": 2.0,
        "values": [2.0],
        "workload": "3B, 8 tokens, batch 1, float16",
        "operations": 10**9,
    }
    ours |= {"bytes": 1_500_000, "peak_bytes": 7_000_000, "error": 1e-3}
    absent = {"path": "flash-attn", "missing": "not installed"}
    group = Group("g", (), fails, (), ("cuDNN", "flash-attn"))
    runs = [[ours, *cells(cuDNN=3.0), absent]] * 2
    mine, cudnn, missing = ratios.group_text(ratios.entry(group, runs, None), CEILINGS).splitlines()[1:]
    assert mine.split("  ")[-6:] == [
        "ours", "1.50x cuDNN", "7 MB", "error 1.0e-03", "50% of a matrix product's speed", "75% of a copy's"
    ]  # fmt: skip
    assert cudnn.strip() == "3, 3  cuDNN"
    assert missing.strip() == "-  flash-attn: not installed"


def first():
    return cells(a=1.0)


def reads(path):
    """What the file says by the time this group runs; it is not there yet when all run once to warm up."""
    if not path.exists():
        return cells(warm=1.0)
    return cells(**{group["group"]: 1.0 for group in json.loads(path.read_text())["groups"]})


def test_what_was_measured_is_written_before_the_next_group_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(ratios, "measure_roofline", fails)
    file = tmp_path / "gpu.json"
    planned = [Group("first", (), first, ()), Group("second", (), reads, (file,))]
    result = ratios.measure_all(planned, file, seconds=600)
    assert result["groups"][1]["runs"] == [cells(first=1.0)] * 2
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))
    assert "problem" in result["ceilings"]


def once(path):
    """Cells of the warm-up and of a run, after which it fails."""
    with path.open("a") as file:
        file.write(".")
    if len(path.read_text()) > 3:
        raise RuntimeError("measured again")
    return cells(a=1.0)


@pytest.mark.parametrize(("commit", "problem"), [("a" * 40, None), ("b" * 40, "RuntimeError: measured again")])
def test_a_run_goes_on_from_its_file_at_the_same_commit(tmp_path, monkeypatch, commit, problem):
    monkeypatch.setattr(ratios, "measure_roofline", fails)
    file, planned = tmp_path / "gpu.json", [Group("first", (), once, (tmp_path / "runs",))]
    for where in ("a" * 40, commit):
        monkeypatch.setattr(ratios, "describe_environment", lambda where=where: {"commit": where})
        (found,) = ratios.measure_all(planned, file, seconds=600)["groups"]
    assert found["problem"] == problem


def turn():
    return cells(turn=TURN_MS["cuda"])


def test_all_groups_warm_up_by_short_turns_and_are_measured_by_long_ones():
    process = ratios.Apart()
    assert process.result(process.start(turn, (), turn_ms=0.0), 60) == cells(turn=0.0)
    assert process.result(process.start(turn, ()), 60) == cells(turn=200.0)
    process.end()


def fails_at_first(path):
    if path.exists():
        return cells(a=1.0)
    path.touch()
    raise MemoryError("beside the others")


def test_a_group_that_lacked_memory_beside_the_others_is_measured_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(ratios, "measure_roofline", fails)
    planned = [Group("large", (), fails_at_first, (tmp_path / "tried",))]
    (measured,) = ratios.measure_all(planned, None, seconds=600)["groups"]
    assert (measured["problem"], measured["runs"]) == (None, [cells(a=1.0)] * 2)


def test_no_group_begins_when_the_time_is_over(monkeypatch, capsys):
    monkeypatch.setattr(ratios, "measure_roofline", fails)
    result = ratios.measure_all([Group("late", (Aim("a", "b", 1.0),), first, ())], None, seconds=0)
    assert result["groups"][0]["runs"] == []
    assert result["groups"][0]["aims"][0]["state"] == "not measured"
    assert "late  (0 s)  FAILED: the time was over" in capsys.readouterr().out


def test_every_aim_and_every_reference_is_a_peer_that_runs():
    states = {"4-bit state", "16-bit state"}
    for group in groups.groups():
        named = {name for aim in group.aims for name in (aim.path, aim.other)} | set(group.references)
        if group.measure in (groups.attention_cells, groups.eight_bit_cells):
            known = contest.SECTIONS[group.arguments[0] if group.measure is groups.attention_cells else "attention"]
            assert named <= set(group.arguments[-1]) <= set(known)
        elif group.measure is groups.generation_cells:
            assert named <= {groups.GENERATING.format(b, groups.ONE_BY_ONE) for b in (16, 8, 4)}
        else:
            assert named <= {*linears.PATHS, *states, stores.CONTIGUOUS}


@pytest.fixture
def millisecond_a_pass(monkeypatch):
    """A clock that goes on by a millisecond with each pass through a model, however busy the machine is."""
    passes = []
    hook = register_module_forward_hook(lambda module, *_: passes.append(1) if isinstance(module, Embedding) else None)
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-3 * len(passes))
    yield
    hook.remove()


@pytest.mark.usefixtures("millisecond_a_pass")
def test_generation_is_timed_end_to_end_without_the_prompt():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 50}
    found = groups.generation_cells(sizes, 5, 3, "cpu", "float32")
    assert [cell["path"] for cell in found] == [
        groups.GENERATING.format(bits, how) for bits in (16, 8, 4) for how in (groups.GRAPHED, groups.ONE_BY_ONE)
    ]
    assert all(cell["values"] == pytest.approx([1, 1, 1]) and cell["median"] == pytest.approx(1) for cell in found)
    text = ratios.group_text(ratios.entry(Group("g", (), fails, ()), [found], None))
    assert f"{1e3 / found[0]['median']:.1f} tokens a second" in text


def test_the_codes_that_are_timed_are_those_that_eight_bit_attention_makes():
    pytest.importorskip("triton")
    call = make_differential_call(Workload(find_model("diffllama-1b"), 70, 70, 1, "float16"), "cpu")
    q, _, k, _, v, _ = groups.eight_bit_codes(call)
    assert (q.dtype, k.dtype, v.dtype) == (torch.int8, torch.int8, torch.float8_e4m3fn)
    assert k.shape[3] == v.shape[3] == 128
