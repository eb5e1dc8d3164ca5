"""The daemon's smaller pure parts: reading the cluster, job states, signals, GPUs, versions, logs, job files."""

from __future__ import annotations

import pathlib
import signal
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from elastic.contract.agent_files import AgentStatus
from elastic.contract.job.spec import JobSpec, Restarts
from elastic.contract.keys import ClusterKeys
from elastic.contract.origin import Origin
from elastic.contract.records.decoding import Member
from elastic.contract.records.generation_delta import GenerationReader, written
from elastic.contract.records.incident_account import IncidentAccount, Outcome, Sync
from elastic.contract.records.job_records import (
    BrokenRecord,
    Failure,
    GenerationNode,
    GenerationRecord,
    IncidentRecord,
    JobState,
    MemberRecord,
    Phase,
    SpecRecord,
    decode,
    encode,
)
from elastic.contract.records.node_records import CordonRecord, DrainRecord, NodeRecord
from elastic.contract.records.reasons import Code, reason
from elastic.recovery.facts.restart_budget import BAD_NODE_FAILURES, charge
from elasticd.agents import logs
from elasticd.agents.logs import Tail
from elasticd.base.folders import Folder
from elasticd.base.settings import EtcdSettings, Settings
from elasticd.cluster import reconcile
from elasticd.cluster.cluster import Cluster, ClusterReader, Job, Node
from elasticd.ctl.jobs import job_file
from elasticd.node.writer import taken

KEYS = ClusterKeys("main")
NODE = NodeRecord(
    node="a", hostname="h", address="10.0.0.1", slots=2, gpus=0, version="1", pid=1, started_wall_s=0.0
)  # fmt: skip
SPEC = SpecRecord(spec=JobSpec(name="j", script="/t.py"), submitted_wall_s=0.0, submitted_by="x")


@dataclass(frozen=True)
class KV:
    key: str
    value: bytes
    create_revision: int = 1
    mod_revision: int = 1


def read(*kvs: KV) -> Cluster:
    return ClusterReader(KEYS).read({kv.key: kv for kv in kvs}, 9)


# ── reading the cluster ─────────────────────────────────────────────────────────────────────────────────────


def test_records_are_put_together() -> None:
    job = KEYS.job("j")
    member = MemberRecord(node="a", incarnation="i", host="h", port=1, slots=2)
    seen = read(
        KV(KEYS.node("a"), encode(NODE), create_revision=5),
        KV(KEYS.cordon("a"), encode(CordonRecord(reason="why", since_wall_s=0.0))),
        KV(job.spec, encode(SPEC), create_revision=7, mod_revision=8),
        KV(job.state, encode(JobState(phase=Phase.RUNNING)), mod_revision=9),
        KV(job.member("a"), encode(member), create_revision=11),
    )
    assert seen.nodes["a"].create_revision == 5
    assert seen.nodes["a"].why_not == "cordoned: why"
    found = seen.jobs["j"]
    assert (found.submitted, found.spec_revision, found.state_revision) == (7, 8, 9)
    assert found.members["a"].create_revision == 11


def test_incidents_are_in_the_order_of_their_time() -> None:
    """Not of their keys, in which a failed checkpoint of step 10 comes before that of step 9."""
    job = KEYS.job("j")
    failed = [
        IncidentRecord(generation=2, kind="checkpoint", node="a", ranks=(), detail="", wall_s=float(step), step=step)
        for step in (9, 10, 100)
    ]
    seen = read(*(KV(job.beside_incident("save", 2, "a", i.step or 0), encode(i)) for i in failed))
    assert [i.step for i in seen.jobs["j"].incidents] == [9, 10, 100]


def test_what_agents_tell_of_an_incident_is_put_together_once_for_as_long_as_it_does_not_change() -> None:
    job, reader = KEYS.job("j"), ClusterReader(KEYS)
    begun = IncidentAccount(first=1, last=1, by="a", noticed_wall_s=5.0)
    over = IncidentAccount(first=1, last=2, by="b", noticed_wall_s=6.0, outcome=Outcome.STEPPING)
    report = BrokenRecord(generation=1, node="a", kind="exit", detail="killed", slots=(0,), ranks=(0,))
    kvs = [
        KV(job.account(1, "b", "b"), encode(over), create_revision=9),
        KV(job.account(1, "a", "a"), encode(begun), create_revision=8),
        KV(job.broken(1), encode(report), create_revision=7),
    ]
    first, second = (reader.read({kv.key: kv for kv in kvs}, revision) for revision in (10, 11))
    (incident,) = first.jobs["j"].incidents
    assert (incident.id, incident.kind, incident.open, incident.wall_s) == ("0000000002", "exit", False, 5.0)
    assert second.jobs["j"].incidents is first.jobs["j"].incidents
    third = reader.read({kv.key: kv for kv in kvs[1:]}, 12)
    assert [incident.open for incident in third.jobs["j"].incidents] == [True]


@pytest.mark.parametrize(
    "facts",
    [
        {"noticed_wall_s": 253_000_000_000.0, "timeline_s": {"stepping": 1e18}},
        {"last": 2**63 - 1, "outcome": Outcome.GIVEN_UP},
        {"last": 2**62, "planned": True, "syncs": (Sync(2**62, 0, 0, Origin.LIVE, ""),)},
        {"left_wall_s": -60_000_000_000.0, "noticed_wall_s": 253_000_000_000.0},
    ],
)
def test_an_account_with_any_numbers_harms_no_other(facts: dict[str, Any]) -> None:
    job = KEYS.job("j")
    hostile = IncidentAccount(**{"first": 1, "last": 2, "outcome": Outcome.STEPPING, "by": "a"} | facts)
    beside = IncidentRecord(generation=2, kind="checkpoint", node="a", ranks=(), detail="", wall_s=1.0)
    seen = read(
        KV(job.account(1, "a", "a"), encode(hostile)),
        KV(job.beside_incident("save", 2, "a", 7), encode(beside)),
    )
    incidents = seen.jobs["j"].incidents
    assert [incident.kind for incident in incidents if incident.kind == "checkpoint"] == ["checkpoint"]
    for incident in incidents:
        decode(IncidentRecord, encode(incident))


def test_a_drain_weighs_more_than_a_cordon() -> None:
    drain = DrainRecord(reason="disk", since_wall_s=0.0)
    assert Node(NODE, 1, CordonRecord(reason="x", since_wall_s=0.0), drain).why_not == "draining: disk"


def test_a_large_job_s_generation_is_read_with_its_base() -> None:
    job, reader = KEYS.job("j"), GenerationReader()
    nodes = tuple(GenerationNode(node=f"n{i}", incarnation="i", host="h", slots=(0,)) for i in range(100))
    head = {"store_host": "h", "store_port": 1, "leader": "n0", "why": "forming"}
    first = written(GenerationRecord(number=1, nodes=nodes, **head), None, None, False)
    assert first.base is not None
    before = reader.read(encode(first.generation), encode(first.base))
    after = GenerationRecord(number=2, nodes=nodes[1:], **head)
    delta = encode(written(after, before, reader.base, True).generation)
    spec, base = KV(job.spec, encode(SPEC)), KV(job.base, encode(first.base))
    assert read(spec, base, KV(job.generation, delta)).jobs["j"].generation == after
    without = read(spec, KV(job.generation, delta))
    assert without.jobs["j"].generation is None
    assert "not known here" in without.foreign[job.generation]


def test_an_unchanged_key_is_decoded_once() -> None:
    reader, kv = ClusterReader(KEYS), KV(KEYS.node("a"), encode(NODE))
    first = reader.read({kv.key: kv}, 1)
    second = reader.read({kv.key: kv}, 2)
    assert second.nodes["a"].record is first.nodes["a"].record


def test_a_changed_key_is_decoded_anew_also_at_the_same_revision() -> None:
    """An etcd that was wiped begins to count anew."""
    reader, key = ClusterReader(KEYS), KEYS.job("j").state
    before = KV(key, encode(JobState(phase=Phase.PENDING)), mod_revision=3)
    assert reader.read({key: before}, 3).jobs["j"].state.phase is Phase.PENDING
    after = KV(key, encode(JobState(phase=Phase.RUNNING)), mod_revision=3)
    assert reader.read({key: after}, 3).jobs["j"].state.phase is Phase.RUNNING


def test_a_record_of_another_protocol_is_named_and_left_alone() -> None:
    job = KEYS.job("j")
    foreign = msgspec.json.encode({"protocol": 99, "phase": "running"})
    seen = read(KV(job.spec, encode(SPEC)), KV(job.state, foreign), KV(KEYS.node("b"), foreign))
    assert "speaks protocol 99" in seen.foreign[job.state]
    assert "same elasticd version" in seen.foreign[KEYS.node("b")]
    assert seen.jobs["j"].spec is None, "nobody here may act on it"
    assert not seen.nodes


def test_rubbish_is_named_and_left_alone() -> None:
    not_text = encode(NODE).replace(b'"10.', b'"\xff')
    seen = read(
        KV(KEYS.node("b"), b"{"), KV(KEYS.job("j").spec, b'{"protocol": 7, "spec": 3}'), KV(KEYS.node("c"), not_text)
    )
    for node in ("b", "c"):
        assert "is not a NodeRecord" in seen.foreign[KEYS.node(node)]
    assert "is not a SpecRecord" in seen.foreign[KEYS.job("j").spec]


@pytest.mark.parametrize("name", ["Train", "", "..", "a b"])
def test_a_key_that_nothing_of_ours_can_have_is_named_and_left_alone(name: str) -> None:
    stray = KV(f"{KEYS.jobs}{name}/spec", encode(SPEC))
    seen = read(stray, KV(KEYS.job("j").spec, encode(SPEC)))
    assert list(seen.jobs) == ["j"]
    assert seen.foreign[stray.key].startswith(f"job = {name!r}: use 1 to 63 of")


# ── job states ──────────────────────────────────────────────────────────────────────────────────────────────


def job(phase: Phase, **facts: object) -> Job:
    return Job(name="j", spec=SPEC, state=JobState(phase=phase), **facts)  # type: ignore[arg-type]


def state(of: Job, failed: str = "", here: bool = False, nodes: tuple[str, ...] = ("a",)) -> JobState | None:
    there = {n: Node(msgspec.structs.replace(NODE, node=n), 1) for n in nodes}
    return reconcile.job_state(of, Cluster(nodes=there), "a", here, failed, 5.0)


def test_a_running_job_without_agents_and_without_room_for_one_waits() -> None:
    """Only its agents say so otherwise, and none is left."""
    there = {n: Node(msgspec.structs.replace(NODE, node=n), revision) for revision, n in enumerate(("a", "b"), 1)}

    def decided(of: Job, me: str = "a", no_room: str = "b is full", deserted_s: float = 30.0) -> JobState | None:
        return reconcile.job_state(of, Cluster(nodes=there), me, False, "", 5.0, 0.0, no_room, deserted_s)

    waits = decided(job(Phase.RUNNING))
    assert waits is not None
    assert (waits.phase, waits.reason) == (Phase.WAITING, reason(Code.DESERTED, "b is full"))
    member = Member(MemberRecord(node="b", incarnation="i", host="h", port=1, slots=1), 1)
    assert decided(job(Phase.RUNNING, members={"b": member})) is None
    assert decided(job(Phase.RUNNING), me="b") is None, "one daemon writes it"
    assert decided(job(Phase.RUNNING), no_room="") is None
    assert decided(job(Phase.RUNNING), deserted_s=29.0) is None
    assert decided(job(Phase.PENDING)) is None


def test_a_node_short_of_something_is_excluded_only_where_another_is_left() -> None:
    def decided(*others: str, excluded: tuple[str, ...] = ()) -> JobState | None:
        there = {n: Node(msgspec.structs.replace(NODE, node=n), 1) for n in ("a", *others)}
        of = Job(name="j", spec=SPEC, state=JobState(phase=Phase.PENDING, excluded_nodes=excluded))
        return reconcile.job_state(of, Cluster(nodes=there), "a", False, "no space", 5.0, lacking=True)

    assert decided() is None
    assert decided("b", excluded=("b",)) is None
    goes_on = decided("b")
    assert goes_on is not None
    assert (goes_on.phase, goes_on.no_agent) == (Phase.PENDING, {"a": "no space"})


def test_how_long_something_lasts_begins_anew_after_it_has_ended() -> None:
    since = reconcile.Since()
    assert [since.lasts_s("j", True, now_s) for now_s in (10.0, 12.0)] == [0.0, 2.0]
    assert since.lasts_s("j", False, 13.0) == 0.0
    assert since.lasts_s("j", True, 14.0) == 0.0


def test_a_stopping_job_is_stopped_when_its_last_agent_is_gone() -> None:
    member = Member(MemberRecord(node="b", incarnation="i", host="h", port=1, slots=1), 1)
    assert state(job(Phase.STOPPING), here=True) is None
    assert state(job(Phase.STOPPING, members={"b": member})) is None
    stopped = state(job(Phase.STOPPING))
    assert stopped is not None
    assert (stopped.phase, stopped.since_wall_s) == (Phase.STOPPED, 5.0)


def test_job_fails_only_if_no_node_can_start_it_else_the_node_is_excluded() -> None:
    alone = state(job(Phase.PENDING), failed="no torch")
    assert alone is not None
    assert alone.phase is Phase.FAILED
    assert alone.reason == reason(Code.NO_AGENT, "no torch", node="a")
    others = state(job(Phase.PENDING), failed="no torch", nodes=("a", "b"))
    assert others is not None
    assert (others.phase, others.excluded_nodes, others.reason) == (Phase.PENDING, ("a",), "")
    assert state(job(Phase.RUNNING), failed="x") == msgspec.structs.replace(
        JobState(phase=Phase.RUNNING), excluded_nodes=("a",), no_agent={"a": "x"}
    )


def test_nothing_is_written_for_a_job_that_is_over_or_well() -> None:
    assert state(job(Phase.FAILED), failed="x") is None
    assert state(job(Phase.RUNNING)) is None
    assert state(job(Phase.PENDING), failed="x", here=True) is None


@pytest.mark.parametrize(
    ("phase", "own_s"), [(Phase.STOPPED, SPEC.spec.stop_grace_s), (Phase.SUCCEEDED, SPEC.spec.exit_timeout_s)]
)
def test_an_agent_that_outlives_its_job_is_told_once_and_then_killed(phase: Phase, own_s: float) -> None:
    """Of a job that has succeeded the scripts may still be at their end."""
    over = job(phase)
    grace_s = own_s + reconcile.END_AFTER_S
    assert reconcile.signal_for(over, grace_s - 1, False) is None
    assert reconcile.signal_for(over, grace_s + 1, False) is signal.SIGTERM
    assert reconcile.signal_for(over, grace_s + 1, True) is None
    assert reconcile.signal_for(over, 2 * grace_s + 1, True) is signal.SIGKILL


@pytest.mark.parametrize(
    ("phase", "own_s"), [("running", SPEC.spec.stop_grace_s), ("finishing", SPEC.spec.exit_timeout_s)]
)
def test_the_agent_of_an_earlier_job_that_has_succeeded_has_its_time_to_end(phase: str, own_s: float) -> None:
    """The name was taken while the scripts of the earlier job were still at their end, as after `run --replace`."""
    said = AgentStatus(
        pid=4, incarnation="i", job="train", node="a", phase=phase, reason="", leader=True, generation=3,
        etcd_ok=True, written_wall_s=0.0, submitted_wall_s=0.5,
    )  # fmt: skip
    later = msgspec.structs.replace(SPEC, submitted_wall_s=1.0)
    taken_over = replace(job(Phase.PENDING), spec=later)
    grace_s = own_s + reconcile.END_AFTER_S
    assert reconcile.signal_for(taken_over, grace_s - 1, False, said) is None
    assert reconcile.signal_for(taken_over, grace_s + 1, False, said) is signal.SIGTERM
    assert reconcile.signal_for(taken_over, 2 * grace_s + 1, True, said) is signal.SIGKILL


@pytest.mark.parametrize(
    ("gpus", "slots", "taken", "picked"),
    [
        ((), 4, [], ()),
        ((0, 1, 2, 3), 2, [], (0, 1)),
        ((0, 1, 2, 3), 2, [(0, 1)], (2, 3)),
        ((0, 1), 4, [], (0, 1, 0, 1)),
        ((0, 1), 1, [(0,), (0,)], (1,)),
    ],
)
def test_gpus_are_shared_out(gpus: tuple[int, ...], slots: int, taken: list[tuple[int, ...]], picked: object) -> None:
    running = {str(number): indices for number, indices in enumerate(taken)}
    assert reconcile.gpus_for(gpus, slots, Cluster(), running) == picked


def test_gpu_that_only_a_gloo_job_sees_is_free_for_a_job_that_uses_gpus() -> None:
    """Counted as used, all GPUs would look alike, and two jobs would train on the first while another is idle."""
    specs = {
        name: JobSpec(name=name, script="t.py", backend=backend) for name, backend in (("a", "auto"), ("g", "gloo"))
    }
    jobs = {
        name: Job(name=name, spec=SpecRecord(spec=spec, submitted_wall_s=0.0, submitted_by="x"))
        for name, spec in specs.items()
    }
    running = {"a": (0,), "g": (1, 0, 1)}
    assert reconcile.gpus_for((0, 1), 1, Cluster(jobs=jobs), running) == (1,)
    assert reconcile.gpus_for((0, 1), 1, Cluster(jobs=jobs), {"g": (0,)}) == (1,)


def test_an_unsound_etcd_is_refused_where_something_is_to_be_lost() -> None:
    far = EtcdSettings(endpoints=("10.0.0.1:2379",))
    assert reconcile.refuses_unsound(Settings(etcd=far))
    assert not reconcile.refuses_unsound(Settings())
    assert not reconcile.refuses_unsound(Settings(etcd=EtcdSettings(endpoints=("localhost:2379",))))
    assert not reconcile.refuses_unsound(Settings(etcd=msgspec.structs.replace(far, allow_unsound_version=True)))


def test_a_name_that_another_host_has_is_taken() -> None:
    assert "another host (h, 10.0.0.1)" in taken(encode(NODE), msgspec.structs.replace(NODE, hostname="other"))
    assert taken(encode(NODE), msgspec.structs.replace(NODE, pid=2)) == "", "process 1 is no elasticd"
    assert taken(b"rubbish", NODE) == ""
    assert "protocol 9" in taken(b'{"protocol": 9}', NODE)


# ── logs ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tail_follows_files_that_grow_appear_and_are_cut(tmp_path: pathlib.Path) -> None:
    one, two = tmp_path / "slot0.ab.0001.log", tmp_path / "slot1.ab.0002.log"
    (tmp_path / "slot0.ab.0001.error.json").write_text("{}")
    one.write_text("a\nb\nc\nhalf")
    tail = Tail(Folder(tmp_path))
    assert [(line.slot, line.text) for line in tail.last(2)] == [(0, "b"), (0, "c")]
    with one.open("a") as file:
        file.write("-whole\n")
    two.write_text("x\n")
    assert [(line.slot, line.text) for line in tail.more()] == [(0, "half-whole"), (1, "x")]
    one.write_text("new\n")
    assert [line.text for line in tail.more()] == ["new"]
    with two.open("a") as file:
        file.write("last words")
    assert list(tail.more()) == []
    assert [line.text for line in tail.rest()] == ["last words"]
    assert list(tail.rest()) == []


def test_log_tail_of_one_slot_and_of_an_absent_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "slot0.ab.0001.log").write_text("zero\n")
    (tmp_path / "slot10.ab.0002.log").write_text("ten\n")
    (tmp_path / "standby.ab.0003.log").write_text("s\n")
    assert [line.text for line in Tail(Folder(tmp_path), 10).last(9)] == ["ten"]
    assert {line.slot for line in Tail(Folder(tmp_path)).last(9)} == {0, 10, None}
    assert Tail(Folder(tmp_path / "none")).last(9) == []


def test_a_long_log_is_read_from_its_end(tmp_path: pathlib.Path) -> None:
    (tmp_path / "slot0.ab.0001.log").write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert [line.text for line in Tail(Folder(tmp_path)).last(2)] == ["line 99998", "line 99999"]


def test_log_tail_finds_the_last_lines_of_a_long_log(tmp_path: pathlib.Path) -> None:
    (tmp_path / "slot0.ab.0001.log").write_text("".join(f"line {i}\n" for i in range(100_000)) + "half")
    tail = Tail(Folder(tmp_path))
    assert [line.text for line in tail.last(90_000)] == [f"line {i}" for i in range(10_000, 100_000)]
    assert not tail.cut
    assert [line.text for line in tail.rest()] == ["half"]
    assert len(tail.last(200_000)) == 100_000


def test_log_tail_beyond_its_read_limit_is_marked_as_cut(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "PAST_BYTES", 1000)
    monkeypatch.setattr(logs, "CHUNK_BYTES", 100)
    (tmp_path / "slot0.ab.0001.log").write_text("".join(f"line {i:04}\n" for i in range(1000)))
    tail = Tail(Folder(tmp_path))
    assert [line.text for line in tail.last(500)] == [f"line {i:04}" for i in range(901, 1000)]
    assert tail.cut
    enough = Tail(Folder(tmp_path))
    assert len(enough.last(50)) == 50
    assert not enough.cut


def test_a_line_without_end_is_passed_on_in_pieces(tmp_path: pathlib.Path) -> None:
    tail = Tail(Folder(tmp_path))
    (tmp_path / "slot0.ab.0001.log").write_text("x" * 3_000_000)
    pieces = [len(line.text) for line in (*tail.more(), *tail.rest())]
    assert sum(pieces) == 3_000_000
    assert max(pieces) <= logs.LINE_BYTES + logs.CHUNK_BYTES


def test_the_hole_of_a_trimmed_log_is_passed_over(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "slot0.ab.0001.log"
    with path.open("wb") as file:
        file.write(b"begin\n")
        file.seek(8 * 1024**3)  # sparse: takes no space
        file.write(b"newest\n")
    gap = "[... the middle of this log is gone: log_limit_mb ...]"
    assert [line.text for line in Tail(Folder(tmp_path)).more()] == ["begin", "", gap, "newest"]
    assert [line.text for line in Tail(Folder(tmp_path)).last(1)] == ["newest"]


# ── job files ───────────────────────────────────────────────────────────────────────────────────────────────


def test_paths_are_made_absolute_from_here(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch(mode=0o755)
    raw = {"script": "train.py", "python": "venv/bin/python", "checkpoint": {"dir": "ckpt"}}
    job_file.resolve(raw, tmp_path)
    assert raw == {
        "script": str(tmp_path / "train.py"),
        "python": str(tmp_path / "venv/bin/python"),
        "checkpoint": {"dir": str(tmp_path / "ckpt")},
        "workdir": str(tmp_path),
    }


def test_a_script_may_stand_in_the_workdir(tmp_path: pathlib.Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    raw = {"script": "train.py", "workdir": "src", "python": "python3"}
    job_file.resolve(raw, tmp_path)
    assert (raw["script"], raw["python"]) == (str(tmp_path / "src" / "train.py"), "python3")
    with pytest.raises(job_file.InvalidJob, match=r"script = 'gone.py': there is no such file"):
        job_file.resolve({"script": "gone.py"}, tmp_path)


def test_a_job_from_a_command(tmp_path: pathlib.Path) -> None:
    raw = job_file.from_command(["My Train.py", "--lr", "1"], module=False)
    assert raw == {"script": "My Train.py", "args": ["--lr", "1"], "name": "my-train"}
    assert job_file.from_command(["pkg.train"], module=True)["name"] == "pkg.train"
    job_file.override(raw, ["checkpoint.keep=5", "env.A=b", "preload=['numpy']"])
    assert raw["checkpoint"] == {"keep": 5}
    assert (raw["env"], raw["preload"]) == ({"A": "b"}, ["numpy"])
    with pytest.raises(job_file.InvalidJob, match="write FIELD=VALUE"):
        job_file.override(raw, ["keep"])


def test_free_names() -> None:
    assert job_file.free_name("t", []) == "t"
    assert job_file.free_name("t", ["t", "t-2", "x"]) == "t-3"


def test_a_job_file_takes_its_own_name(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "GPT small.toml"
    path.write_text('script = "t.py"')
    assert job_file.from_file(path) == {"script": "t.py", "name": "gpt-small"}
    path.write_text("script = ")
    with pytest.raises(job_file.InvalidJob, match="is not TOML"):
        job_file.from_file(path)


def test_node_excluded_by_its_daemon_is_retried_after_a_while() -> None:
    failures = tuple(Failure(wall_s=1.0, generation=1, node=n, fingerprint="f") for n in ("a", "b"))
    aside = JobState(
        phase=Phase.WAITING,
        excluded_nodes=("a", "b"),
        failures=failures,
        no_agent={"a": "so", "b": "no torch"},
        reason="no agent comes up on a: as the leader says",
    )
    of = Job(name="j", spec=SPEC, state=aside)
    cluster = Cluster(nodes={"a": Node(NODE, 1)})

    def after(aside_s: float) -> JobState | None:
        return reconcile.job_state(of, cluster, "a", False, "still", 5.0, aside_s)

    assert after(reconcile.SET_ASIDE_S - 1) is None
    again = after(reconcile.SET_ASIDE_S)
    assert again is not None
    assert (again.excluded_nodes, again.failures, again.no_agent) == (("b",), failures[1:], {"b": "no torch"})
    assert again.reason == aside.reason, "the leader's"
    assert reconcile.job_state(of, cluster, "c", False, "", 5.0, reconcile.SET_ASIDE_S) is None


def test_node_excluded_for_worker_failures_is_retried_after_a_while() -> None:
    """And one more failure there is not enough to set it aside once more."""
    state, rules = JobState(phase=Phase.RUNNING, excluded_nodes=("b",), no_agent={"b": "no torch"}), Restarts()

    def failed(step: int) -> JobState:
        record = BrokenRecord(generation=step, node="a", kind="exit", detail="SIGKILL", step=step)
        return charge(state, record, rules, float(step), 1).state

    for step in range(1, BAD_NODE_FAILURES + 1):
        state = failed(step)
    assert state.excluded_nodes == ("a", "b")
    cluster, of = Cluster(nodes={"a": Node(NODE, 1)}), Job(name="j", spec=SPEC, state=state)
    assert reconcile.job_state(of, cluster, "a", False, "", 5.0, reconcile.SET_ASIDE_S - 1) is None
    again = reconcile.job_state(of, cluster, "a", False, "", 5.0, reconcile.SET_ASIDE_S)
    assert again is not None
    assert again.excluded_nodes == ("b",)
    state = again
    assert failed(9).excluded_nodes == ("b",)
