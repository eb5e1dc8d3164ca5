"""The writer as a real process: it never blocks its parent, dies with it, and its own death is not silent."""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from support.ckpt import filled, save, state_at
from support.wait import eventually, stretched

from elastic.checkpoint.format.names import tmp_name
from elastic.checkpoint.saving import orders
from elastic.checkpoint.saving.client import MAX_COPIES, MAX_PACKET_BYTES, MAX_WAITING, Busy, WriterProcess
from elastic.checkpoint.saving.write import write_shard
from elastic.checkpoint.saving.writer import CheckpointWriter
from elastic.checkpoint.stored.find import newest_good
from elastic.checkpoint.stored.remote import RemoteError


@pytest.fixture
def writer() -> Iterator[WriterProcess]:
    writer = WriterProcess()
    yield writer
    writer.close()
    writer.close()


def write(directory: Path, step: int = 20) -> orders.Write:
    return orders.Write(directory=str(directory), job="job", step=step, generation=1)


def commit(directory: Path, step: int = 20, shards: int = 1, wait_s: float = 0.0) -> orders.Commit:
    return orders.Commit(
        directory=str(directory), job="job", step=step, generation=1, shards=shards, world_size=shards, wait_s=wait_s
    )


def results_of(writer: WriterProcess) -> list[orders.Result]:
    """Of every order under way."""
    results = writer.results()
    with selectors.DefaultSelector() as selector:
        selector.register(writer, selectors.EVENT_READ)
        while writer.under_way() and selector.select(20):
            results += writer.results()
    return results


def submit_many(writer: WriterProcess, many: list[orders.Commit]) -> None:
    for order in many:
        writer.submit(order)


def test_a_shard_is_written_and_committed(writer: WriterProcess, tmp_path: Path) -> None:
    with filled(state_at(20), 20) as arena:
        assert writer.submit(write(tmp_path), arena) == 1
        assert writer.submit(commit(tmp_path)) == 2
        poller = select.poll()
        poller.register(writer, select.POLLIN)
        assert poller.poll(20_000)
        results = results_of(writer)
    assert [(r.id, r.kind, r.step, r.error) for r in results] == [(1, "Write", 20, ""), (2, "Commit", 20, "")]
    assert results[1].path == str(tmp_path / "step-20")
    found = newest_good(str(tmp_path), "job")
    assert found is not None
    assert found.step == 20


def test_writer_process_imports_no_torch_and_lowers_its_priority(writer: WriterProcess, tmp_path: Path) -> None:
    with filled(state_at(20), 20) as arena:
        writer.submit(write(tmp_path), arena)
        assert results_of(writer)[0].ok
        process = psutil.Process(writer.pid)
        assert not any("torch" in entry.path for entry in process.memory_maps())
        assert process.nice() == 5


def test_errors_come_back_in_words(writer: WriterProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with filled(state_at(20), 20) as arena:
        writer.submit(write(tmp_path / "file" / "below"), arena)
        writer.submit(write(tmp_path, step=21), arena)
        first, second = results_of(writer)
    assert first.error.startswith("Not a directory: ")
    assert second.error == "the arena is complete with step 20 of generation 1"


def test_an_error_of_any_length_is_one_line_that_fits_into_a_packet() -> None:
    said = orders.describe(RemoteError("403: " + "<p>Forbidden\n" * 10_000))
    assert said.startswith("403: <p>Forbidden <p>")
    assert "\n" not in said
    result = orders.Result(id=1, kind="CopyUp", step=20, generation=1, error=said)
    assert len(orders.encode(result)) < MAX_PACKET_BYTES


def test_a_copy_that_finds_no_thread_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of threads or processes: the writer ended, and with it the orders that it had."""

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        path = save(str(tmp_path), 20)
        made = CheckpointWriter(theirs)
        ours.send(orders.encode(orders.CopyUp(id=3, path=path, url="memory://there", keep=1, keep_every_steps=0)))
        assert made.turn(60.0)
        result = orders.decode_result(ours.recv(MAX_PACKET_BYTES))
    assert (result.id, result.kind, result.step, result.generation) == (3, "CopyUp", 20, 1)
    assert result.error == "no thread for it: can't start new thread"
    assert not made._copying, "retention would spare it for ever"


def test_a_failed_shard_fails_its_commit_at_once(writer: WriterProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with filled(state_at(20), 20) as arena:
        writer.submit(write(tmp_path / "file"), arena)
        writer.submit(commit(tmp_path, shards=2, wait_s=600))
        first, second = results_of(writer)
    assert second.kind == "Commit"
    assert second.error == first.error != ""


def test_shards_of_an_earlier_run_on_a_disk_of_this_node_alone_complete_no_checkpoint(
    writer: WriterProcess, tmp_path: Path
) -> None:
    """Etcd and all agents were lost, and another node, which has not seen this disk, counts the generations anew."""
    with filled(state_at(1), 40, 6, 1, 2) as arena:
        write_shard(arena, str(tmp_path), "job")
    with filled(state_at(2), 40, 6, 0, 2) as arena:
        for _ in range(2):
            order = orders.Write(directory=str(tmp_path), job="job", step=40, generation=6, alone=True)
            writer.submit(order, arena)
        commit = orders.Commit(
            directory=str(tmp_path), job="job", step=40, generation=6, shards=2, world_size=2, wait_s=0.0
        )
        writer.submit(commit)
        *written, committed = results_of(writer)
    assert [result.error for result in written] == ["", ""], "what this run has written stays"
    assert committed.missing == (1,)


def test_a_failed_save_gives_its_room_back(writer: WriterProcess, tmp_path: Path) -> None:
    """Else, on a full disk, the shards of failed saves would keep it full for ever."""
    older, under_way, newer, others = (
        *(tmp_name(step, 1, "job") for step in (7, 10, 90)),
        tmp_name(7, 1, "another"),
    )
    for name in (older, newer, others):
        (tmp_path / name).mkdir()
    with filled(state_at(20), 20, 1, 0, 2) as arena:
        writer.submit(write(tmp_path), arena)
        writer.submit(commit(tmp_path, step=10, shards=2, wait_s=60))  # under way: its folder is not touched
        (tmp_path / under_way).mkdir()
        writer.submit(commit(tmp_path, shards=2, wait_s=0.1))
        results = eventually(writer.results, deadline_s=20)
        results += eventually(writer.results, deadline_s=20)
    assert [result.error for result in results] == ["", "step 20: 1 of 2 shards were not written: 1"]
    assert [result.missing for result in results] == [(), (1,)]
    eventually(lambda: set(os.listdir(tmp_path)) == {under_way, newer, others}, deadline_s=20)


def test_a_commit_that_waits_for_others_holds_nothing_up(writer: WriterProcess, tmp_path: Path) -> None:
    with filled(state_at(20), 20, 1, 0, 2) as mine, filled(state_at(20), 20, 1, 1, 2) as others:
        writer.submit(write(tmp_path), mine)
        writer.submit(commit(tmp_path, shards=2, wait_s=60))
        writer.submit(commit(tmp_path, step=30, shards=2, wait_s=0.2))
        eventually(lambda: len(writer.results()) > 0, deadline_s=20)
        lonely = WriterProcess()  # another node's
        lonely.submit(write(tmp_path), others)
        assert results_of(lonely)[0].ok
        lonely.close()
        results = {result.step: result for result in results_of(writer)}
    assert results[20].ok
    assert results[30].error == "step 30: 2 of 2 shards were not written: 0, 1"


def test_old_ones_that_cannot_be_removed_are_said_with_the_next_commit(writer: WriterProcess, tmp_path: Path) -> None:
    with filled(state_at(0), 0) as arena:
        for step in (10, 20, 30):
            arena.fill(list(state_at(step).values()))
            arena.seal(step, 1)
            writer.submit(write(tmp_path, step), arena)
            writer.submit(msgspec.structs.replace(commit(tmp_path, step), keep=1))
            result = results_of(writer)[-1]
            assert result.ok
            if step == 10:
                (tmp_path / "step-10" / "a folder").mkdir()  # not a file of ours: it is not removed
    (note,) = result.notes
    assert "step-10" in note


def test_writer_process_death_fails_pending_orders_and_the_next_order_restarts_it(
    writer: WriterProcess, tmp_path: Path
) -> None:
    with filled(state_at(20), 20) as arena:
        writer.start()
        fileno, pid = writer.fileno(), writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        writer.submit(write(tmp_path), arena)
        writer.submit(commit(tmp_path))
        os.kill(pid, signal.SIGKILL)
        results = results_of(writer)
        assert [r.error for r in results] == ["the writer process died (exit code -9)"] * 2
        assert newest_good(str(tmp_path), "job") is None
        writer.submit(write(tmp_path), arena)
        writer.submit(commit(tmp_path))
        assert all(result.ok for result in results_of(writer))
    assert writer.fileno() == fileno
    assert writer.pid not in (pid, None)


def test_a_death_while_idle_costs_nothing(writer: WriterProcess, tmp_path: Path) -> None:
    with filled(state_at(20), 20) as arena:
        writer.start()
        pid = writer.pid
        assert pid is not None
        writer.submit(orders.Forget())
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        writer.submit(write(tmp_path), arena)
        assert [result.error for result in results_of(writer)] == [""]
    assert writer.pid not in (pid, None)


def test_orders_are_bounded(writer: WriterProcess, tmp_path: Path) -> None:
    writer.start()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(Busy):
        submit_many(writer, [commit(tmp_path, wait_s=60)] * (MAX_WAITING + 1))
    assert time.monotonic() - started_s < stretched(5.0)
    assert len(writer.under_way()) <= MAX_WAITING
    writer.close(timeout_s=0.1)


def test_writer_process_limits_remote_copies_so_that_local_writes_have_room(
    writer: WriterProcess, tmp_path: Path
) -> None:
    writer.start()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    copy = orders.CopyUp(path=str(tmp_path / "step-1"), url="file:///nowhere")
    for _ in range(MAX_COPIES):
        writer.submit(copy)
    with pytest.raises(Busy, match=f"{MAX_COPIES} copies before this one are still under way"):
        writer.submit(copy)
    submit_many(writer, [commit(tmp_path, wait_s=60)] * (MAX_WAITING - MAX_COPIES))
    writer.close(timeout_s=0.1)


def test_writer_process_forget_unmaps_the_arena(writer: WriterProcess, tmp_path: Path) -> None:
    def mapped() -> bool:
        return any("elastic-arena" in entry.path for entry in psutil.Process(writer.pid).memory_maps())

    assert writer.submit(orders.Forget()) == 0  # with no process there is nothing to forget
    with filled(state_at(20), 20) as arena:
        writer.submit(write(tmp_path), arena)
        assert results_of(writer)[0].ok
        assert mapped()
        writer.submit(orders.Forget())
        eventually(lambda: not mapped(), deadline_s=20)
        writer.submit(write(tmp_path), arena)
        assert results_of(writer)[0].ok


@pytest.mark.parametrize("how", ["signal", "return"])
def test_writer_process_dies_with_its_parent(how: str, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from elastic.checkpoint.saving.client import WriterProcess\n"
        "writer = WriterProcess()\n"
        "writer.start()\n"
        "print(writer.pid, flush=True)\n"
        "if sys.argv[1] == 'signal': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, timeout=60, check=False)
    pid = int(parent.stdout)

    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(gone, deadline_s=20)


@pytest.mark.slow
def test_writer_process_killed_at_any_moment_leaves_the_newest_checkpoint_whole(
    writer: WriterProcess, tmp_path: Path
) -> None:
    """The real process and the real disk: what was answered as committed is there, and nothing is damaged."""
    committed, pids = 0, set[int]()
    with filled(state_at(0), 0) as arena:
        for step in range(1, 25):
            arena.fill(list(state_at(step).values()))
            arena.seal(step, 1)
            writer.submit(write(tmp_path, step), arena)
            writer.submit(commit(tmp_path, step))
            pid = writer.pid
            assert pid is not None
            pids.add(pid)
            if step % 2:
                # A little later each time: from before the first call until after the commit.
                select.select([], [], [], step * 0.0004)
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, and left for the client to find
            results = results_of(writer)
            committed = max([committed, *(r.step for r in results if r.ok and r.kind == "Commit")])
            found = newest_good(str(tmp_path), "job")
            assert (found.step if found else 0) in (committed, step)
            assert found is None or (found.step >= committed and not found.aside)
            assert step % 2 or committed == step, "a writer that died between two saves cost the second one"
    assert len(pids) == 13
