"""What writes a checkpoint, piece by piece: results in order, files of the announced size, room on the disk."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

from diffquant.checkpoints import atomic_folder, staging
from diffquant.checkpoints.atomic_folder import RECORD, partial_folder, stage_output
from diffquant.checkpoints.row_stream import map_in_order, open_workers, row_blocks
from diffquant.checkpoints.writer import OutputTensor, ShardFile
from diffquant.errors import DiffQuantError
from tests.support.tables import in_one_test


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_results_come_in_the_order_of_their_tasks_whichever_ends_first():
    second_is_done = threading.Event()

    def work(number):
        if number == 0:
            assert second_is_done.wait(10)
        if number == 1:
            second_is_done.set()
        return number

    with ThreadPoolExecutor(2) as pool:
        assert list(map_in_order(pool, work, ((number,) for number in range(200)))) == list(range(200))


def test_after_an_error_no_task_is_left_running():
    running = []

    def work(number):
        if number == 0:
            raise ValueError("the first fails")
        running.append(number)
        time.sleep(0.05)
        running.remove(number)

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="the first fails"):
            list(map_in_order(pool, work, ((number,) for number in range(50))))
        assert not running


def test_workers_have_one_torch_thread_each_and_give_the_number_back():
    before = torch.get_num_threads()
    with open_workers() as pool:
        assert {pool.submit(torch.get_num_threads).result() for _ in range(4)} == {1}
    assert torch.get_num_threads() == before


def test_blocks_cover_every_row_once():
    blocks = list(row_blocks(1001, 1 << 14))
    assert [row for first, last in blocks for row in range(first, last)] == list(range(1001))
    assert {last - first for first, last in blocks[:-1]} == {16}
    # A row wider than a block is a block, and rows without elements are taken, too.
    assert list(row_blocks(2, 1 << 20)) == [(0, 1), (1, 2)]
    assert list(row_blocks(3, 0)) == [(0, 3)]


TENSORS = (
    OutputTensor("bytes", torch.uint8, (3,)),
    OutputTensor("wide", torch.float64, (2, 5)),
    OutputTensor("number", torch.int16, ()),
    OutputTensor("none", torch.float32, (0, 4)),
    OutputTensor("half", torch.bfloat16, (7, 3)),
)


def test_rows_written_in_any_order_are_what_safetensors_reads(tmp_path):
    before = open_files()
    values = {t.name: torch.arange(torch.Size(t.shape).numel()).reshape(t.shape).to(t.dtype) for t in TENSORS}
    with closing(ShardFile(tmp_path / "a.safetensors", TENSORS)) as file:
        for name in ("number", "bytes", "none"):
            file.write(name, values[name])
        for row in (4, 0, 6, 1, 5, 3, 2):
            file.write("half", values["half"][row : row + 1], row)
        file.write("wide", values["wide"][1:], 1)
        file.write("wide", values["wide"][:1])
        with pytest.raises(TypeError, match=r"half was announced as torch.bfloat16 and is written as torch.float32"):
            file.write("half", values["half"].float())
    assert open_files() == before
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == values.keys()
    assert all(torch.equal(read[name], values[name]) and read[name].dtype == values[name].dtype for name in values)


def test_a_file_has_its_size_before_its_content(tmp_path):
    with closing(ShardFile(tmp_path / "a.safetensors", TENSORS)):
        pass
    assert {name: tensor.count_nonzero() for name, tensor in load_file(tmp_path / "a.safetensors").items()} == {
        tensor.name: 0 for tensor in TENSORS
    }


def test_a_file_that_cannot_be_made_is_closed(tmp_path, monkeypatch):
    def full(descriptor, length):
        raise OSError("no room")

    before = open_files()
    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="no room"):
        ShardFile(tmp_path / "a.safetensors", TENSORS)
    assert open_files() == before


@in_one_test("too_much", [0, 1])
def test_what_an_interrupted_run_wrote_needs_no_room_again(tmp_path, monkeypatch, too_much):
    partial = partial_folder(tmp_path / "out")
    partial.mkdir()
    (tmp_path / ".out.diffquant-journal").touch()
    with (partial / "shard").open("wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    written = (partial / "shard").stat().st_blocks * 512
    # 16 MiB are kept for what describes the weights.
    monkeypatch.setattr(atomic_folder, "_free_bytes", lambda destination: 19 << 20)
    nbytes = (3 << 20) + written + too_much
    if too_much:
        refused = f"needs {nbytes:,} bytes for .* and {16 << 20:,} for .* only {(19 << 20) + written:,} are free"
        with pytest.raises(DiffQuantError, match=refused), stage_output(tmp_path / "out", {}, nbytes, overwrite=False):
            pass
    else:
        with stage_output(tmp_path / "out", {}, nbytes, overwrite=False) as staging:
            (staging.folder / "config.json").write_text("{}")
        assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "diffquant.json"]


def test_all_of_an_output_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    synced, destination = [], tmp_path / "deeper" / "out"
    monkeypatch.setattr(staging, "sync_to_disk", lambda path: synced.append((path, destination.exists())))
    with stage_output(destination, {}, 0, overwrite=False) as stage:
        (stage.folder / "config.json").write_text("{}")
        stage.record_finished("config.json", {})
        synced.clear()
        partial = stage.folder
    assert {path for path, _ in synced} == {partial, partial / "config.json", partial / RECORD}
    assert not any(in_place for _, in_place in synced)
    assert (destination / "config.json").exists()
