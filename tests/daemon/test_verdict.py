"""Verdicts on incidents: one case for each rule, from records as agents write them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.contract.records.job_records import Cause, IncidentRecord, Phase, WorkerError
from elastic.contract.records.reasons import Code, Reason, reason
from elastic.contract.texts import one_line
from elasticd.diagnosis import verdict
from elasticd.diagnosis.rules import RULES, Class
from elasticd.diagnosis.verdict import Verdict, VerdictContext, judge


def incident(kind: str = "exit", detail: str | Reason = "", **facts: object) -> IncidentRecord:
    base = {"generation": 2, "node": "n1", "ranks": (1,), "wall_s": 900.0, "timeline_s": {"stepping": 0.25}}
    base |= {"ended_wall_s": 900.25, "step": 40, "steps_lost": 0, "steps_lost_at_most": 0}
    base |= {"world_size_before": 4, "world_size_after": 4, "origin": "live", "kind": kind, "detail": detail}
    return msgspec.convert(base | facts, IncidentRecord)


def raised(
    message: str, traceback: str = "", *, misuse: bool = False, exception: str = "", **facts: object
) -> IncidentRecord:
    """The worker's script raised: torch's error file has the message."""
    error = {"node": "n1", "slot": 1, "rank": 1, "message": message, "traceback": traceback, "exit_code": 1}
    error |= {"misuse": misuse, "exception": exception}
    return incident("exit", one_line(message), error=error, **facts)


def died(number: str, *log: str) -> IncidentRecord:
    """The worker was ended by a signal: the end of its log is all it left."""
    return incident("exit", reason(Code.KILLED, signal=number), last_lines=log)


def handled(code: int, *log: str) -> IncidentRecord:
    """The worker's script has turned a SIGTERM into an exit code."""
    said = reason(Code.AFTER_SIGTERM, *log, status=code)
    error = {"node": "n1", "slot": 1, "rank": 1, "message": str(said), "signal": "SIGTERM", "exit_code": code}
    return incident("exit", said, error=error | {"traceback": "\n".join(log)})


def hung(stack: str, evidence: Reason | str = "", waiting: str = "") -> IncidentRecord:
    stacks = {"slot 1 (hung)": f"Thread 1 (active)\n    {stack}"}
    return incident("hang", evidence, stacks=stacks | ({"slot 0 (waits for it)": waiting} if waiting else {}))


def leaves(why: Reason | str) -> IncidentRecord:
    return incident("planned", reason(Code.LEAVES, why, node="n1"))


ETCD = "etcdserver: mvcc: database space exceeded"
SHM = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers"
CASES: dict[str, list[IncidentRecord]] = {
    "unhealthy": [leaves(reason(Code.HEALTH_CHECK, "no mount", check="data"))],
    "gpu_drained": [leaves(reason(Code.GPU_FAULTY, "GPU 3: XID 79, fallen off the bus"))],
    "excluded": [leaves(reason(Code.EXCLUDED, reason(Code.FAILS_MORE), node="n1"))],
    "preempted": [
        leaves(reason(Code.AGENT_ENDED)),
        leaves(reason(Code.TAKEN_AWAY, "maintenance")),
        incident("drain", reason(Code.SHUTS_DOWN)),
        incident("drain", "spot instance is reclaimed in 120 s"),
    ],
    "scaled_down": [leaves(reason(Code.SURPLUS, nodes="1:2"))],
    "joined": [incident("planned", reason(Code.JOINS, node="n3"))],
    "left": [leaves("drained by ada")],
    "drained": [incident("drain", "drained by ada")],
    "boundary": [incident("boundary", reason(Code.AT_BOUNDARY))],
    "called_off": [incident("undrain", reason(Code.CALLED_OFF))],
    "planned": [incident("planned", reason(Code.REORDERED))],
    "diverged": [incident("drift", "drift on rank 1 at step 40: its state differs")],
    "bad_loss": [incident("bad loss", "bad loss on rank 1 at step 40: nan")],
    "shortage": [incident("shortage", "a worker cannot be started: [Errno 24] Too many open files")],
    "etcd_no_space": [raised(f"EtcdError: {ETCD}")],
    "etcd_refused": [
        raised("EtcdError: etcd 10.0.0.1:2379: authentication failed, invalid user ID or password"),
        raised("EtcdError: etcdserver: permission denied"),
    ],
    "etcd_unavailable": [raised("EtcdUnavailable: etcd 10.0.0.1:2379 does not answer: Deadline Exceeded")],
    "shm_full": [
        raised(SHM + " are out of shared memory."),
        raised("RuntimeError: unable to write to file </torch_77_1>: No space left on device (28)"),
        raised("OSError: [Errno 28] No space left on device: '/psm_a0b1c2d3'"),
        died("SIGABRT", "ERROR: Unexpected bus error encountered. This might be caused by insufficient shared memory"),
    ],
    "interface": [
        raised("MisuseRuntimeError: GLOO_SOCKET_IFNAME=eth7: n1 has no such interface; it has lo, eth0", misuse=True),
    ],
    "disk_full": [
        raised("OSError: [Errno 28] No space left on device: '/data/out.bin'"),
        incident("checkpoint", "checkpoint of step 40 failed: [Errno 28] No space left on device"),
        raised("OSError: [Errno 122] Disk quota exceeded"),
    ],
    "read_only": [raised("OSError: [Errno 30] Read-only file system: '/data/x'")],
    "stale_mount": [raised("OSError: [Errno 116] Stale file handle: '/nfs/x'")],
    "io_error": [raised("OSError: [Errno 5] Input/output error")],
    "permission": [raised("PermissionError: [Errno 13] Permission denied: '/data/x'")],
    "checkpoint_damaged": [
        raised("NoGoodCheckpoint: /ck has no good checkpoint of job 'j'", exception="NoGoodCheckpoint"),
        raised("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"),
    ],
    "no_state": [incident("no-state", "nothing to resume from")],
    "gpu_memory": [raised("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")],
    "gpu_lost": [raised("RuntimeError: CUDA error: unknown error"), died("SIGABRT", "Xid (PCI:0000:1a): 79, pid=1")],
    "gpu_memory_error": [raised("RuntimeError: CUDA error: uncorrectable ECC error encountered")],
    "gpu_fault": [raised("RuntimeError: NVML: XID 31 on GPU 2")],
    "driver": [raised("RuntimeError: The NVIDIA driver version is insufficient: CUDA driver version is insufficient")],
    "device_assert": [raised("RuntimeError: CUDA error: device-side assert triggered")],
    "cuda_error": [raised("RuntimeError: CUDA error: an illegal memory access was encountered")],
    "host_memory": [incident("exit", reason(Code.OOM_KILLED, signal="SIGKILL"))],
    "dataloader_killed": [raised("RuntimeError: DataLoader worker (pid 99) is killed by signal: Killed. ")],
    "allocation": [
        raised("MemoryError"),
        raised("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        died("SIGABRT", "terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"),
    ],
    "open_files": [raised("OSError: [Errno 24] Too many open files: '/data/7'")],
    "processes": [raised("RuntimeError: can't start new thread")],
    "store_altered": [incident("store", reason(Code.STORE_ALTERED, key="g2/0//cpu//1"))],
    "store_overfull": [incident("store", "its store grew by 300 MiB, 256 are allowed, and was closed")],
    "loopback": [incident("comm", reason(Code.NOT_FORMING, "connect failed, remote=[127.0.0.1]:52625", rank=1))],
    "name_resolution": [
        raised("gaierror: [Errno -2] Name or service not known"),
        incident("comm", reason(Code.STORE_UNKNOWN, node="n1", within_s=60.0)),
    ],
    "nccl_timeout": [died("SIGABRT", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)")],
    "nccl_remote": [incident("comm", "NCCL error: ncclRemoteError: A call failed possibly due to a network error")],
    "nccl_error": [incident("comm", "NCCL error in: init.cpp, ncclSystemError: System call failed")],
    "port_in_use": [raised("OSError: [Errno 98] Address already in use")],
    "tls": [raised("SSLError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")],
    "no_route": [incident("comm", "connect: No route to host")],
    "refused": [raised("ConnectionRefusedError: [Errno 111] Connection refused")],
    "late_rank": [
        incident("comm", reason(Code.RANKS_MISSING, arrived=3, total=4, within_s=60.0)),
        incident("comm", reason(Code.NO_STORE, endpoint="n1:7", within_s=60.0)),
        incident("comm", reason(Code.NOT_FORMING, "the group was cut", number=3, rank=0)),
    ],
    "reset": [incident("comm", "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]")],
    "net_timeout": [incident("comm", reason(Code.WAITED, slot=1, for_s=602, doing="exchanging", step=40))],
    "unreachable": [incident("unreachable", "n1 cannot be reached by n2, n3")],
    "lease_expired": [incident("lost", reason(Code.LEASE_EXPIRED, node="n1"))],
    "agent_replaced": [incident("lost", reason(Code.AGENT_RESTARTED, node="n1"))],
    "node_down": [incident("lost", reason(Code.PORT_REFUSES, node="n1"))],
    "node_lost": [incident("lost", "")],
    "stopped": [
        incident("hang", reason(Code.STOPPED, state="T", silent_s=3.1)),
        incident("respawn", reason(Code.LATE_ABORT, reason(Code.STOPPED))),
    ],
    "hang_io": [hung("read (libc-2.36.so)", reason(Code.NO_PROGRESS, reason(Code.IN_IO)))],
    "hang_interpreter": [incident("hang", reason(Code.NO_PROGRESS, reason(Code.DEAF, for_s=9)))],
    "hang_data": [hung("_try_get_data (torch/utils/data/dataloader.py:1251)")],
    "hang_collective": [hung("all_reduce (torch/distributed/distributed_c10d.py:2810)")],
    "hang_lock": [hung("wait (threading.py:355)")],
    "hang_sleep": [hung("_sleep (train.py:12)\n    sleep")],
    "hang": [hung("crunch (train.py:40)", waiting="all_reduce (distributed_c10d.py:1)"), incident("hang", "silent")],
    "late_abort": [incident("respawn", reason(Code.LATE_ABORT))],
    "failed_late": [incident("late exit", reason(Code.FAILED_LATE, "KeyError: 'name'", slot=1))],
    "killed_late": [
        incident("late exit", reason(Code.FAILED_LATE, reason(Code.KILLED, signal="SIGKILL"), slot=1)),
    ],
    "late_exit": [incident("late exit", reason(Code.LATE_EXIT, slot=1, limit_s=30))],
    "idle": [incident("idle", reason(Code.LEFT_GROUP))],
    "dataloader_worker": [raised("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly")],
    "missing_module": [raised("ModuleNotFoundError: No module named 'datasets'")],
    "wrong_version": [
        raised("ImportError: cannot import name 'Foo' from 'bar'"),
        raised("ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"),
        raised("AttributeError: module 'torch' has no attribute 'compiler'"),
    ],
    "syntax": [raised("SyntaxError: invalid syntax (train.py, line 3)"), raised("IndentationError: unexpected indent")],
    "no_file": [raised("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'")],
    "state_dict": [raised("RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight")],
    "unused_parameters": [raised("RuntimeError: Expected to have finished reduction in the prior iteration")],
    "assertion": [raised("AssertionError: loss went up")],
    "interrupted": [died("SIGINT"), raised("KeyboardInterrupt")],
    "early_end": [incident("exit", reason(Code.ENDED_EARLY))],
    "unbound": [raised("UnboundLocalError: cannot access local variable 'loss' where it has no value")],
    "python": [
        raised("KeyError: 'label'"),
        raised("Oops: mine", 'Traceback (most recent call last):\n  File "/t.py", line 3, in train\n    raise Oops'),
        incident("exit", reason(Code.EXITED, "ValueError: x", status=1), error={"node": "n1", "slot": 1, "rank": 1,
                 "exit_code": 1, "message": "exit code 1: ValueError: x", "traceback": "Traceback\nValueError: x"}),
    ],
    "misuse": [  # by its flag, whatever the words: those of the next line are another rule's
        incident("exit", "Error: no space left on device", error={"node": "n1", "slot": 1, "rank": 1, "exit_code": 1,
                 "message": "Error: no space left on device", "traceback": "", "misuse": True}),
    ],
    "never_started": [
        incident("exit", reason(code, "1")) for code in (Code.ZYGOTE_DIES, Code.NOT_STARTED, Code.ENDED_UNSTARTED)
    ],
    "unreadable": [incident("exit", reason(Code.UNREADABLE, "JSON is malformed: invalid character (byte 1)"))],
    "sigkill": [died("SIGKILL", "CUDA out of memory was caught once, long ago"), died("SIGKILL")],
    "sigterm": [
        died("SIGTERM"),
        handled(3, "bye"),
        handled(0),
    ],
    "sigsegv": [died("SIGSEGV", "Fatal Python error: Segmentation fault")],
    "sigbus": [died("SIGBUS", "step 40")],
    "unlike_sizes": [died("SIGABRT", "op.preamble.length <= op.nbytes. 352 vs 320. Received data size doesn't match")],
    "sigabrt": [died("SIGABRT", "free(): invalid pointer")],
    "sigill": [died("SIGILL")],
    "sigfpe": [died("SIGFPE")],
    "signal": [died("SIGUSR1")],
    "checkpoint_stray": [
        incident("checkpoint", reason(Code.STRAY_CHECKPOINT, folder="/ck", node="n3", saved=7, now=3)),
    ],
    "checkpoint_folder_apart": [
        incident("checkpoint", reason(Code.CHECKPOINT_FAILED,
                 reason(Code.FOLDER_APART, folder="/ck", nodes="n0 and n1"), step=40)),
    ],
    "checkpoint": [incident("checkpoint", "checkpoint of step 40 failed: something else")],
    "exit_code": [incident("exit", reason(Code.EXITED, "bye", status=3))],
    "collective": [incident("comm", "a call failed")],
    "unknown": [incident("odd", "a kind that a later version may have")],
}  # fmt: skip
FLAT = [(rule, record) for rule, records in CASES.items() for record in records]


def test_a_failure_after_training_needs_a_person_where_it_has_failed_the_job() -> None:
    late = incident("late exit", reason(Code.FAILED_LATE, "KeyError: 'name'", slot=1))
    assert not judge(late).person
    failed = judge(late, VerdictContext(phase=Phase.FAILED))
    assert failed.person
    assert failed.done == "training is complete; what its script does after it is not"


@pytest.mark.parametrize(("rule", "record"), FLAT, ids=[f"{rule}-{i}" for i, (rule, _) in enumerate(FLAT)])
def test_verdict_names_the_rule_of_each_case(rule: str, record: IncidentRecord) -> None:
    verdict = judge(record)
    assert verdict.rule == rule
    assert verdict.what
    assert verdict.fix
    assert verdict.person == (rule == "checkpoint_folder_apart"), "the job went on"


def test_every_rule_has_a_case_and_every_name_is_unique() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names)) >= 25
    assert set(CASES) == set(names)
    assert RULES[-1].name == "unknown"


def test_verdict_of_a_raising_script_shows_message_exit_and_place() -> None:
    traceback = 'Traceback (most recent call last):\n  File "/t.py", line 41, in train\n    x["label"]'
    verdict = judge(raised("KeyError: 'label'", traceback))
    assert (verdict.cls, verdict.what) == (
        Class.USER_CODE, "rank 1 on n1: an exception in the script (KeyError: 'label')",
    )  # fmt: skip
    assert [(e.source, e.line) for e in verdict.evidence] == [
        ("error of rank 1 on n1", "KeyError: 'label'"),
        ("exit of rank 1 on n1", "exit code 1"),
        ("traceback of rank 1 on n1", 'File "/t.py", line 41, in train'),
    ]


def test_place_in_a_traceback_is_the_scripts_own_last_line() -> None:
    library = [("/v/site-packages/torch/f.py", 7, "linear"), ("/e/elastic/worker/run.py", 1, "x")]
    frames = [("/job/t.py", 19, "train"), *library]
    traceback = "".join(f'  File "{path}", line {line}, in {where}\n' for path, line, where in frames)
    places = [e.line for e in judge(raised("TypeError: x", traceback)).evidence if e.source.startswith("traceback")]
    assert places == ['File "/job/t.py", line 19, in train']


def test_number_of_further_causes_is_not_part_of_the_cause() -> None:
    verdict = judge(raised("KeyError: 'a'", causes=()))
    counted = judge(msgspec.structs.replace(raised("KeyError: 'a'"), further=4))
    assert (counted.cause, counted.evidence) == (verdict.cause, verdict.evidence)


DUMP = """Process 7: elastic worker of hang, slot 1: /t.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    {frame}
    train (t.py:23)
Thread 9 (idle): "elastic-monitor"
    wait (threading.py:355)
    all_reduce (torch/distributed/distributed_c10d.py:1)
"""


@pytest.mark.parametrize(
    ("frame", "rule"),
    [
        ("clock_nanosleep (libc.so.6)", "hang_sleep"),
        ("crunch (t.py:9)", "hang"),
        ("acquire (my_pool.py:3)", "hang_lock"),
        ("lock_PyThread_acquire_lock (libpython3.11.so.1.0)", "hang_lock"),
        ("all_reduce (torch/distributed/distributed_c10d.py:1)", "hang_collective"),
        ("_try_get_data (torch/utils/data/dataloader.py:1)", "hang_data"),
    ],
)
def test_of_a_hung_process_only_the_main_thread_counts(frame: str, rule: str) -> None:
    record = incident("hang", "no progress for 4 s", stacks={"slot 1 (hung)": DUMP.format(frame=frame)})
    verdict = judge(record)
    assert verdict.rule == rule
    assert ("stack of slot 1 (hung)", frame) in [(e.source, e.line) for e in verdict.evidence]


def test_log_of_a_worker_that_was_aborted_names_the_reason() -> None:
    lines = ["step 40", "terminate called after throwing an instance of 'std::bad_alloc'"]
    verdict = judge(died("SIGABRT", *lines))
    assert verdict.rule == "allocation"
    assert (verdict.evidence[0].source, verdict.evidence[0].line) == ("log of rank 1 on n1", lines[1])
    assert judge(died("SIGKILL", *lines)).rule == "sigkill"


def test_words_in_the_log_of_a_worker_killed_by_sigkill_are_no_reason() -> None:
    assert judge(died("SIGKILL", "terminate called: std::bad_alloc was survived")).rule == "sigkill"


def test_loopback_address_means_nothing_where_all_nodes_have_one() -> None:
    record = incident("comm", "Connection closed by peer [127.0.0.1]:5234")
    assert judge(record).rule == "loopback"
    assert judge(record, VerdictContext(one_host=True)).rule == "reset"


def test_failed_collectives_are_folded_into_the_death_they_follow_from() -> None:
    causes = [
        Cause(generation=1, node="n1", kind="exit", ranks=(1,), detail=reason(Code.KILLED, signal="SIGSEGV")),
        Cause(generation=1, node="n2", kind="comm", detail="connection closed by peer"),
        Cause(generation=1, node="n3", kind="comm", detail="connection closed by peer"),
        Cause(generation=2, node="n2", kind="exit", ranks=(2,), detail=reason(Code.KILLED, signal="SIGKILL")),
    ]
    verdict = judge(incident("exit", reason(Code.KILLED, signal="SIGSEGV"), further=1, causes=causes))
    assert verdict.rule == "sigsegv"
    assert verdict.followed == [
        "comm on n2, n3: connection closed by peer",
        "exit as well during the recovery on n2, rank 2: killed by SIGKILL",
    ]
    assert "kept" not in verdict.done, "with a further failure it is not known which processes were kept"


@pytest.mark.parametrize(
    ("facts", "done"),
    [
        ({}, "rank 1 replaced; the other 3 ranks kept their process; state from a living rank; world 4 as before"),
        ({"world_size_after": 3},
         "rank 1 gone; the other 3 ranks kept their process; state from a living rank; world 4 → 3"),
        ({"ranks": (), "kind": "comm"}, "all 4 ranks kept their process; state from a living rank; world 4 as before"),
        ({"ranks": (), "kind": "planned", "detail": "b leaves", "world_size_after": 2},
         "each rank that stays kept its process; state from a living rank; world 4 → 2"),
        ({"ranks": (), "kind": "planned", "detail": "b leaves, c joins"},
         "each rank that stays kept its process; state from a living rank; world 4 as before"),
        ({"step": None}, "all workers were started again (the script does not call elastic.run); world 4 as before"),
        ({"open": True}, "the recovery is under way"),
        ({"kind": "checkpoint"}, "training was not interrupted"),
        ({"origin": "nothing"}, "the job was given up"),
        ({"origin": "snapshot", "ranks": (0, 1, 2, 3)},
         "ranks 0 to 3 replaced; state from the newest snapshot in memory; world 4 as before"),
        ({"origin": "setup", "ranks": (0, 1, 2, 3)},
         "ranks 0 to 3 replaced; training began again at step 0; world 4 as before"),
        ({"origin": "checkpoint", "restored_from": "checkpoint step 40 at /c/step-40", "ranks": (0, 1, 2, 3)},
         "ranks 0 to 3 replaced; state from the newest checkpoint; world 4 as before"),
    ],
)  # fmt: skip
def test_verdict_says_what_was_done(facts: dict[str, object], done: str) -> None:
    context = VerdictContext(phase=Phase.FAILED if "origin" in facts else Phase.RUNNING)
    killed = {"kind": "exit", "detail": reason(Code.KILLED, signal="SIGKILL")}
    assert judge(incident(**killed | facts), context).done == done  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.SUCCEEDED])
def test_a_recovery_in_which_the_next_failure_came_is_no_end_of_the_job(phase: Phase) -> None:
    assert judge(incident(origin="nothing"), VerdictContext(phase=phase)).done == "no step came of this recovery"


def test_cost_counts_ranks_times_seconds_and_leaves_the_unknown_unknown() -> None:
    cost = judge(incident(), VerdictContext(gpus=True)).cost
    assert (cost.steps, cost.rank_s, cost.gpu_s) == (0, 1.0, 1.0)
    assert judge(incident()).cost.gpu_s is None
    unknown = judge(incident(steps_lost=None, steps_lost_at_most=None, timeline_s={})).cost
    assert (unknown.steps, unknown.steps_at_most, unknown.rank_s) == (None, None, None)
    assert judge(incident(open=True), VerdictContext(age_s=10.0)).cost.rank_s == 40.0
    assert judge(incident("checkpoint", "x")).cost.rank_s == 0.0
    late = {"still_s": 6.0}  # it was noticed only then
    assert judge(incident(**late)).cost.rank_s == 1.0 + 4 * 6.0
    assert judge(incident(open=True, **late), VerdictContext(age_s=10.0)).cost.rank_s == 4 * 16.0


def test_person_is_needed_only_where_the_job_failed_or_does_not_recover() -> None:
    given_up = incident(detail="KeyError: 1", origin="nothing")
    assert judge(given_up, VerdictContext(phase=Phase.FAILED)).person
    assert not judge(given_up, VerdictContext(phase=Phase.STOPPED)).person, "a person stopped it"
    recovered = incident(detail="KeyError: 1")
    assert not judge(recovered, VerdictContext(phase=Phase.FAILED)).person, "the job failed by a later one"
    (apart,) = CASES["checkpoint_folder_apart"]
    assert [judge(apart, VerdictContext(phase=phase)).person for phase in (Phase.RUNNING, Phase.STOPPED)] == [
        True,
        False,
    ]
    waiting = incident(open=True)
    assert not judge(waiting, VerdictContext(age_s=299.0)).person
    assert judge(waiting, VerdictContext(age_s=301.0)).person


@pytest.mark.parametrize(
    ("seen", "held", "person"),
    [
        (
            VerdictContext(age_s=70.0, etcd_error="connection refused"),
            "etcd was unavailable: connection refused",
            False,
        ),
        (VerdictContext(age_s=70.0, etcd_error="etcdserver: authentication failed"), "etcd refused the login", True),
        (VerdictContext(age_s=70.0, etcd_alarms=("NOSPACE",)), "etcd is out of space", True),
        (VerdictContext(age_s=70.0, waits_for="slot 0 of n1 to start"), "slot 0 of n1 to start", False),
    ],
)
def test_open_incident_says_what_holds_the_recovery_up(seen: VerdictContext, held: str, person: bool) -> None:
    verdict = judge(incident(detail=reason(Code.KILLED, signal="SIGKILL"), open=True), seen)
    assert verdict.held_by.startswith(held)
    assert (verdict.rule, verdict.person) == ("sigkill", person)
    closed = judge(incident(detail=reason(Code.KILLED, signal="SIGKILL")), seen)
    assert (closed.held_by, closed.person) == ("", False)


WORDS = st.sampled_from(["", "killed by SIGKILL", "CUDA error: ", "etcd", "Error: x", "\n", "exit code 0", "GPU 1: "])
KINDS = st.sampled_from(["exit", "hang", "comm", "lost", "drain", "planned", "checkpoint", "no-state", "drift", "?"])


@given(kind=KINDS, text=st.lists(WORDS | st.text(max_size=20), max_size=4).map("".join), step=st.none() | st.integers(),
       ranks=st.lists(st.integers(0, 9), max_size=4), error=st.booleans(), phase=st.sampled_from(Phase))  # fmt: skip
def test_every_incident_has_a_verdict_and_none_that_recovered_asks_for_a_person(
    kind: str, text: str, step: int | None, ranks: list[int], error: bool, phase: Phase
) -> None:
    told = WorkerError(node="n1", slot=0, rank=-1, message=text, traceback=text) if error else None
    causes = [Cause(generation=1, node="n1", kind=kind, ranks=tuple(ranks), detail=text)]
    record = msgspec.structs.replace(
        incident(kind, text), error=told, step=step, causes=tuple(causes), ranks=tuple(ranks)
    )
    verdict = judge(record, VerdictContext(phase=phase, age_s=1e6))
    assert isinstance(verdict, Verdict)
    assert not verdict.person
    assert verdict.what.strip()


def test_text_without_end_is_searched_in_part() -> None:
    """A job's user can write any record of the own job, and the rules' patterns take the square of a line's length: the
    loop of each daemon of the cluster would stand still. A text is searched up to what an agent writes."""
    begin, end = "begin", "CUDA out of memory"
    found = judge(raised(f"{begin}{'etcd' * 300_000}{end}"))
    assert found.rule == "gpu_memory"
    assert all(len(e.line) <= verdict.TEXT_CHARS + 1 for e in found.evidence)
    stack = "Thread " + '"MainThread"' * 100_000 + "\nx\n" + "\n" * 300_000
    assert judge(incident("hang", "no progress", stacks={"slot 1 (hung)": stack})).cls


def test_main_thread_of_a_dump_is_found_behind_other_threads() -> None:
    frames = "".join(f"    frame{i} (train.py:{i})\n" for i in range(20))
    dump = f'Thread 1 "other"\n    x (y.py:1)\nThread 2 "MainThread"\nThread 3 (idle): "MainThread"\n{frames}\nThread 4'
    assert verdict.main_thread(dump).splitlines() == [f"    frame{i} (train.py:{i})" for i in range(12)]


def test_an_exception_after_a_sigterm_is_the_cause_and_the_signal_is_among_the_evidence() -> None:
    """The script may have handled the signal long before."""
    error = {"node": "n1", "slot": 1, "rank": 1, "signal": "SIGTERM", "exit_code": 1, "message": "KeyError: 'a'"}
    found = judge(incident("exit", "KeyError: 'a'", error=error))
    assert found.rule == "python"
    assert ("exit of rank 1 on n1", "exit code 1 after SIGTERM") in [(e.source, e.line) for e in found.evidence]
    assert judge(handled(1, "KeyError: 'a'", "x")).rule == "python"


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_a_traceback_at_the_end_of_the_log_is_not_why_a_process_was_killed(number: str) -> None:
    """The script has handled it, or a thread's: the signal came from outside."""
    of_a_thread = 'File "/job/train.py", line 3, in work'
    found = judge(died(number, "Traceback (most recent call last):", of_a_thread, "KeyError: 'a'"))
    assert found.rule == judge(died(number)).rule
    assert "exception" not in found.cause
