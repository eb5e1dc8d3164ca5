"""Which ranks the hang detector reports, and when it checks again."""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.procs import Procs, kill, state
from support.wait import eventually

from elastic.agent.hangs import hang_detector
from elastic.agent.hangs.hang_detector import HangDetector
from elastic.agent.workers import stacks
from elastic.agent.workers.pool import Process
from elastic.agent.workers.stacks import NO_NATIVE, UNREAD
from elastic.contract.job.spec import Hang
from elastic.contract.records.decoding import Member
from elastic.contract.records.job_records import GenerationNode, GenerationRecord, MemberRecord
from elastic.contract.records.reasons import Code, codes, reason
from elastic.contract.records.standings import Standing
from elastic.contract.worker.beat import PAGE_BYTES, BeatPage, Doing
from elastic.recovery.facts.transitions import Stage
from elastic.recovery.hangs.hang_rules import Unhealthy
from elastic.recovery.machine.events import Event, GroupStuck, RanksStill, WorkerUnhealthy
from elastic.recovery.machine.model import Worker
from elastic.util import processes
from elastic.util.processes import is_ending

RULES = Hang(floor_s=1.0, ceiling_s=5.0)


class Scene:
    """One worker (a sleeping process) of two nodes' and the hang detector over it, on a clock of our own.

    The rank of the other node waits in the exchange of step 0, since the beginning."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.page = BeatPage(memoryview(mmap.mmap(-1, PAGE_BYTES)))
        self.page.clear(100.0)
        self.channel, other = socket.socketpair()
        other.close()
        self.process = Process(
            worker_id=1, slot=0, channel=self.channel, page=self.page, error_file="", log_file="", started_s=100.0,
            pid=process.pid,
        )  # fmt: skip
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        pool: Any = types.SimpleNamespace(processes={1: self.process})
        self.looked_s = 100.0
        self.hang_detector = HangDetector(pool, RULES, self._post)
        self.others: tuple[Standing, ...] = (
            Standing(rank=1, position=(1, 0, 9), doing="exchanging", silent_s=0.5, waits=True),
        )
        self.told: list[RanksStill] = []
        self.managed = True
        self.page.place(1, 0)

    def _post(self, event: Event) -> None:
        if isinstance(event, RanksStill):
            self.told.append(event)
        else:
            self.events.put(event)

    def look(self, now_s: float) -> None:
        """Look as the agent does, often, up to `now_s`."""
        while self.looked_s < now_s:
            self.looked_s = min(now_s, self.looked_s + 0.5)
            self._look(self.looked_s)

    def _look(self, now_s: float) -> None:
        worker = Worker(slot=0, worker_id=1, stage=Stage.RUNNING, since_s=0.0, deadline_s=0.0)
        place = [GenerationNode(node=node, incarnation="i", host="h", slots=(0,)) for node in ("here", "there")]
        generation = GenerationRecord(
            number=1, store_host="h", store_port=1, leader="here", why="", nodes=tuple(place)
        )  # fmt: skip
        record = MemberRecord(node="there", incarnation="i", host="h", port=1, slots=1, standings=self.others)
        agent: Any = types.SimpleNamespace(
            formed=types.SimpleNamespace(generation=generation),
            policy=types.SimpleNamespace(managed=self.managed, node="here", crowd=64, leader_candidates=8),
            etcd=types.SimpleNamespace(
                view=types.SimpleNamespace(has_all_members=True, members={"there": Member(record, 1)})
            ),
            local=types.SimpleNamespace(workers={0: worker}, standings=self.told[-1].standings if self.told else ()),
        )
        self.hang_detector.look(agent, now_s, {1: self.page.read()})

    def accused(self) -> WorkerUnhealthy | None:
        try:
            event = self.events.get_nowait()
        except queue.Empty:
            return None
        assert isinstance(event, WorkerUnhealthy)
        return event


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Procs() as procs:
        scene = Scene(procs.popen(["sleep", "60"]))
        yield scene
        scene.channel.close()


def test_the_wait_for_the_zygote_is_not_the_workers_silence(scene: Scene) -> None:
    scene.process.started_s = 130.0  # forked 30 s after it was ordered
    scene.look(134.0)
    assert not scene.hang_detector._being_examined
    scene.look(136.0)
    assert eventually(scene.accused, 10.0).evidence.values["for_s"] < 6.0


def test_hang_detector_drops_accusation_if_worker_progresses_during_stack_dump(scene: Scene) -> None:
    scene.look(104.9)
    scene.page.write(Doing.COMPUTING, 100.0)
    taken = threading.Event()
    hang_detector.stack, before = lambda pid, native: str(taken.wait(10.0)), hang_detector.stack
    try:
        scene.look(105.5)
        scene.page.write(Doing.COMPUTING, 105.4)  # it moves
        taken.set()
        eventually(lambda: not scene.hang_detector._being_examined, 5.0)
        assert scene.accused() is None
    finally:
        hang_detector.stack = before
    scene.look(111.0)
    assert eventually(scene.accused, 10.0)


def test_a_second_suspicion_at_the_same_line_of_train_is_given_more_time(scene: Scene) -> None:
    """Validation of 6 s that the script has not declared, on rank 0 alone: it was killed there each time, for ever."""
    scene.hang_detector.rules = Hang(floor_s=2.0, ceiling_s=60.0)
    scene.page.committed(1, 0.05, None, 100.0)

    def longer_s(worker_id: int, line: int, silent_s: float, *, certain: bool = False) -> float:
        worker = Worker(slot=0, worker_id=worker_id, stage=Stage.RUNNING)
        one = hang_detector.LastBeat(worker, scene.process, scene.page.read(), "S", None)
        dump = f"""Thread 7 (idle): "MainThread"
    predict (model.py:{worker_id})
    train (train.py:{line})
    _train_in (elastic/worker/run.py:290)
    run (elastic/worker/run.py:60)"""
        return scene.hang_detector._more_patience_s(one, Unhealthy("", certain=certain), dump, 100.0 + silent_s)

    assert longer_s(1, 21, 2.5) == 0.0, "it is hung"
    assert longer_s(1, 21, 3.0) == 0.0, "it still is"
    assert longer_s(2, 21, 2.5) == 8.0, "its successor there may only be slow"
    assert longer_s(2, 22, 2.5) == 0.0, "elsewhere"
    assert longer_s(3, 21, 2.5, certain=True) == 0.0, "no thread runs Python there"
    assert longer_s(4, 21, 31.0) == 32.0
    assert longer_s(4, 21, 33.0) == 0.0
    assert longer_s(5, 21, 33.0) == 60.0, "the ceiling"


def test_a_wait_beyond_the_groups_time_out_is_told_once(scene: Scene) -> None:
    scene.hang_detector.group_s = 60.0
    scene.others = ()
    scene.page.write(Doing.EXCHANGING, 100.0)
    scene.look(159.5)
    assert scene.accused() is None
    assert [said.doing for said in scene.told[-1].standings] == ["exchanging"]
    scene.look(165.0)
    told = scene.events.get_nowait()
    assert isinstance(told, GroupStuck)
    assert told.evidence.values["for_s"] == 60
    assert scene.events.empty()
    assert not scene.hang_detector._being_examined, "it is not to blame"


def test_a_pause_of_our_own_condemns_nobody(scene: Scene) -> None:
    scene.look(101.0)
    scene.looked_s = 130.0  # the whole node was frozen
    scene.look(130.8)
    assert not scene.hang_detector._being_examined


def test_hang_detector_spares_worker_waiting_in_a_collective_and_checks_again_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = 'Thread 1 (idle): "MainThread"\n'
    waits = f"{main}    all_reduce (torch/distributed/distributed_c10d.py:3252)\n    train (train.py:20)\n"
    told, looks = [waits], []
    monkeypatch.setattr(hang_detector, "stack", lambda pid, native: looks.append(native) or told[0])
    scene.look(105.5)
    eventually(lambda: looks and not scene.hang_detector._being_examined, 5.0)
    scene.look(109.5)
    assert len(looks) == 1  # its silence has not doubled yet
    assert scene.accused() is None
    told[0] = f"{main}    train (train.py:21)\n"
    scene.look(110.5)
    assert eventually(scene.accused, 10.0)


def test_hang_detector_accuses_worker_stopped_while_waiting_in_a_collective(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 'Thread 1 (idle): "MainThread"\n    barrier (torch/distributed/distributed_c10d.py:4980)\n'
    monkeypatch.setattr(hang_detector, "stack", lambda pid, native: waits)
    scene.look(105.5)
    eventually(lambda: scene.hang_detector._cleared_until_s and not scene.hang_detector._being_examined, 5.0)
    kill(scene.process.pid, signal.SIGSTOP)
    eventually(lambda: state(scene.process.pid) == "T", 5.0)
    scene.look(106.0)
    sick = eventually(scene.accused, 10.0)
    assert Code.STOPPED in codes(sick.evidence)


def test_hang_detector_accuses_plain_script_only_after_a_long_stop(scene: Scene) -> None:
    """It never beats, so its silence is as old as it is: one that is held for a moment, as by cpulimit, lives on."""
    scene.managed = False
    scene.look(1000.0)
    for now_s in (1001.0, 1003.0, 1005.0):
        kill(scene.process.pid, signal.SIGSTOP)
        eventually(lambda: state(scene.process.pid) == "T", 5.0)
        scene.look(now_s)
        kill(scene.process.pid, signal.SIGCONT)
        eventually(lambda: state(scene.process.pid) == "S", 5.0)
        scene.look(now_s + 1.0)
        assert not scene.hang_detector._being_examined
    kill(scene.process.pid, signal.SIGSTOP)
    eventually(lambda: state(scene.process.pid) == "T", 5.0)
    scene.look(1008.0)
    assert eventually(scene.accused, 10.0).evidence == reason(Code.STOPPED, reason(Code.SILENT, for_s=1.0))


def test_hang_detector_spares_worker_resumed_during_stack_dump(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()
    monkeypatch.setattr(hang_detector, "stack", lambda pid, native: str(taken.wait(10.0)))
    scene.managed = False
    scene.look(1000.0)
    kill(scene.process.pid, signal.SIGSTOP)
    eventually(lambda: state(scene.process.pid) == "T", 5.0)
    scene.look(1003.0)
    assert scene.hang_detector._being_examined
    kill(scene.process.pid, signal.SIGCONT)
    eventually(lambda: state(scene.process.pid) == "S", 5.0)
    taken.set()
    eventually(lambda: not scene.hang_detector._being_examined, 5.0)
    assert scene.accused() is None


def test_the_agent_lives_on_where_no_thread_can_be_started(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    start, least = threading.Thread.start, [0]

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(("elastic-stacks", "ThreadPool")[least[0] :]):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(hang_detector, "stack", lambda pid, native: "stack")
    scene.look(106.0)
    assert scene.accused() is None
    least[0] = 1  # the first one can, and those that it starts cannot
    scene.look(107.0)
    assert Code.NO_PROGRESS in codes(eventually(scene.accused, 10.0).evidence)


def test_hang_detector_accuses_hung_worker_when_no_stack_can_be_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(subprocess, "Popen", denied)
    scene.look(105.5)
    # With the event: of two workers that hang at once, each has its own.
    assert eventually(scene.accused, 10.0).stacks == {"slot 0 (hung)": "no stack could be read"}


IN_BACKWARD = 'Thread 1 (active): "MainThread"\n    _engine_run_backward (torch/autograd/graph.py:824)\n'


@pytest.mark.parametrize("dump", [UNREAD, IN_BACKWARD + NO_NATIVE])
def test_a_rank_that_waits_by_its_page_is_not_blamed_for_want_of_its_stack(
    dump: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third node has lost power within an exchange, which the rank there had completed and this one had not. Both
    wait; py-spy finds no time on a busy machine."""
    looks: list[int] = []
    monkeypatch.setattr(hang_detector, "stack", lambda pid, native: looks.append(pid) or dump)
    scene.hang_detector.rules = Hang(floor_s=1.0, ceiling_s=20.0)
    scene.page.committed(1, 0.05, None, 100.0)
    scene.page.write(Doing.EXCHANGING, 100.0)
    scene.others = (Standing(rank=1, position=(1, 2, 2), doing="exchanging", silent_s=0.5, waits=True),)
    for now_s in (101.5, 104.0, 108.0, 116.0):
        scene.look(now_s)
        eventually(lambda: not scene.hang_detector._being_examined, 5.0)
        assert scene.accused() is None
    assert 2 <= len(looks) <= 5, "each time that its silence has doubled: at 1, 2, 4, 8 and 16 s"

    def later() -> WorkerUnhealthy | None:
        scene.look(scene.looked_s + 5.0)
        return scene.accused()

    assert Code.NO_PROGRESS in codes(eventually(later, 10.0).evidence), "not for ever"
    assert scene.looked_s >= 120.0


def test_a_stack_without_its_native_frames_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"--nonblocking": IN_BACKWARD, "--native": ""}
    monkeypatch.setattr(stacks, "_dump", lambda tool, option, pid, limit_s: said[option])
    assert stacks.stack(1, native=True) == f"{IN_BACKWARD}\n{NO_NATIVE}"
    assert stacks.is_in_part(stacks.stack(1, native=True))
    assert not stacks.is_in_part(stacks.stack(1, native=False))
    said["--native"] = native = f"{IN_BACKWARD}    c10d::Work::wait\n"
    assert stacks.stack(1, native=True) == native
    said.update({"--nonblocking": "", "--native": ""})
    assert stacks.is_in_part(stacks.stack(1, native=True))


def test_a_worker_that_cannot_be_looked_at_for_lack_of_processes_has_until_the_ceiling(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that forks up to the limit of processes is silent meanwhile, and raises then: that is no hang."""
    monkeypatch.setattr(scene.hang_detector, "rules", msgspec.structs.replace(RULES, ceiling_s=20.0))
    scene.page.committed(1, 0.01, None, 100.0)
    scene.others = (msgspec.structs.replace(scene.others[0], position=(1, 1, 9)),)
    tried = []

    def full(*_: object, **__: object) -> None:
        tried.append(1)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", full)
    for now_s in (106.0, 107.5, 109.0):
        looks = len(tried)
        scene.look(now_s)
        eventually(lambda n=looks: len(tried) > n and not scene.hang_detector._being_examined, 10.0, "it is looked at")
        assert scene.accused() is None

    def at_the_ceiling() -> WorkerUnhealthy | None:
        scene.look(max(120.0, scene.looked_s + 0.5))
        return scene.accused()

    told = eventually(at_the_ceiling, 10.0).stacks["slot 0 (hung)"]
    assert "no stack could be read, as this node lacks" in told
    assert os.strerror(errno.EAGAIN) in told


def test_hang_detector_reports_position_at_half_patience_or_when_another_rank_is_stopped(scene: Scene) -> None:
    scene.page.committed(1, 0.8, None, 100.0)  # ten of these steps are 8 s
    scene.page.write(Doing.EXCHANGING, 100.0)
    scene.others = ()
    scene.look(103.5)
    assert scene.accused() is None
    assert not scene.told
    scene.others = (Standing(rank=1, position=(1, 1, 0), doing="computing", silent_s=1.0, stopped=True),)
    scene.look(104.0)
    assert scene.accused() is None
    assert [(said.rank, said.waits) for said in scene.told[-1].standings] == [(0, True)]


def test_hang_detector_repeats_position_of_a_waiting_rank_only_after_progress(scene: Scene) -> None:
    scene.others = ()
    scene.page.write(Doing.EXCHANGING, 100.0)
    scene.look(104.0)
    assert scene.accused() is None
    scene.look(120.0)
    assert scene.accused() is None
    assert len(scene.told) == 1
    scene.page.committed(1, 0.05, None, 120.0)
    scene.page.write(Doing.EXCHANGING, 120.0)
    scene.look(122.0)
    assert scene.accused() is None
    assert [said.standings[0].position for said in scene.told] == [(1, 0, 2), (1, 1, 2)]


def test_a_killed_worker_that_the_kernel_has_not_ended_yet_is_left_to_its_exit(scene: Scene) -> None:
    """A process of gigabytes on a busy machine: its memory is freed for seconds before its exit can be seen. Only that
    tells the signal, an out-of-memory kill and the last step."""
    os.kill(scene.process.pid, signal.SIGKILL)  # a zombie, as nothing waits for it
    eventually(lambda: is_ending(scene.process.pid), 10.0)
    scene.look(106.0)
    scene.look(106.1 + hang_detector.ENDING_S / 2)
    assert not scene.hang_detector._being_examined, "and no thread that dumps its stack"
    assert scene.accused() is None


def test_a_killed_worker_that_the_kernel_never_ends_is_a_hang(scene: Scene) -> None:
    os.kill(scene.process.pid, signal.SIGKILL)
    eventually(lambda: is_ending(scene.process.pid), 10.0)
    scene.look(106.0)
    scene.look(107.0 + hang_detector.ENDING_S)
    found = eventually(scene.accused, 10.0)
    assert found.kind == "hang"
    assert found.evidence.because[-1] == reason(Code.ENDS_SLOWLY, for_s=60)


def test_a_worker_killed_while_its_stack_is_dumped_is_left_to_its_exit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: object) -> dict[str, str]:
        os.kill(scene.process.pid, signal.SIGKILL)
        eventually(lambda: is_ending(scene.process.pid), 10.0)
        return {"slot 0 (hung)": "no stack could be read"}

    monkeypatch.setattr(hang_detector, "_stacks", killed)
    scene.look(106.0)
    eventually(lambda: not scene.hang_detector._being_examined, 10.0)
    assert scene.accused() is None


def test_a_look_that_fails_is_repeated(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(threading, "excepthook", lambda _: None)
        failing.setattr(hang_detector, "_stacks", lambda _: 1 / 0)
        scene.look(105.5)
        eventually(lambda: not scene.hang_detector._being_examined, 10.0)
    assert scene.accused() is None
    scene.look(106.0)
    assert eventually(scene.accused, 10.0).kind == "hang"


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_a_process_of_which_nothing_can_be_read_does_not_end(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def fails(_: str) -> bytes:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(processes, "kernel_file", fails)
    assert not is_ending(os.getpid())


@pytest.mark.parametrize(("flags", "ends"), [(0x400040, False), (0x400440, True), (0x40010C, True)])
def test_a_process_that_dumps_its_core_or_exits_ends(monkeypatch: pytest.MonkeyPatch, flags: int, ends: bool) -> None:
    files = {"stat": b"7 (a) b) R 1 7 7 0 -1 %d 0 0\n" % flags, "status": b"Name:\ta) b\nSigQ:\t0/9\n"}
    monkeypatch.setattr(processes, "kernel_file", lambda path: files[path.rpartition("/")[2]])
    assert is_ending(7) is ends


def test_a_process_that_runs_or_is_stopped_does_not_end(scene: Scene) -> None:
    assert not is_ending(scene.process.pid)
    os.kill(scene.process.pid, signal.SIGSTOP)
    eventually(lambda: state(scene.process.pid) == "T", 10.0)
    os.kill(scene.process.pid, signal.SIGTERM)  # pending, and it may be handled
    assert not is_ending(scene.process.pid)


def test_a_process_whose_name_is_no_utf_8_is_looked_at_as_any_other() -> None:
    """The kernel cuts a name after 15 bytes, perhaps within a character."""
    names_itself = (
        "open('/proc/self/comm', 'wb').write('worker d\u00e9tach\u00e9'.encode()[:15]); print(flush=True); input()"
    )
    with Procs() as procs:
        process = procs.popen([sys.executable, "-c", names_itself], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UnicodeDecodeError):
            pathlib.Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        assert not is_ending(process.pid)
        process.communicate(b"\n", timeout=10.0)
