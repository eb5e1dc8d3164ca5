"""What the API and the screen say of a given snapshot."""

from __future__ import annotations

import io
import json
import re
import threading
from dataclasses import replace

import msgspec
import pytest
from support import plain_render, plain_views
from support.snapshots import job, progress, row, snapshot

from elastic.contract.agent_files import AgentStatus
from elastic.contract.job.spec import JobSpec
from elastic.contract.records.job_records import JobState, Phase, SpecRecord, WorkerError
from elastic.contract.records.node_records import WorkerRow
from elastic.contract.records.reasons import Code, reason
from elasticd.api.metrics import metrics
from elasticd.api.views import views
from elasticd.api.views.instant import Identity, Now
from elasticd.base.answers import Json
from elasticd.base.masking import MASK
from elasticd.cluster import reconcile
from elasticd.cluster.assignment import Assignment
from elasticd.cluster.cluster import Job, Node
from elasticd.cluster.published_state import Contact, LocalAgent
from elasticd.ctl.show import render
from elasticd.ctl.show.screen import HOME_AND_CLEAR, Console

NOW = Now(monotonic_s=100.0, wall_s=1000.0)
IDENTITY = Identity("main", "a", "0.1", 7, 40.0, ("127.0.0.1:2379",), False, "")
ERROR = WorkerError(node="a", slot=0, rank=0, message="ValueError: x")


def status(*jobs: Job, **facts: object) -> Json:
    return plain_views.status(snapshot(*jobs, **facts), IDENTITY, NOW)


def local(**facts: object) -> dict[str, LocalAgent]:
    base = {
        "pid": 3,
        "incarnation": "i",
        "job": "train",
        "node": "a",
        "phase": "running",
        "reason": "",
        "leader": False,
    }
    base |= {"generation": 2, "etcd_ok": True, "written_wall_s": 999.0}
    return {"train": LocalAgent("train", 3, 2, msgspec.convert(base | facts, AgentStatus), None)}


def test_a_failing_checkpoint_is_shown_where_another_node_leads() -> None:
    led = job(progress=progress(checkpoint_error="step 40: disk full"))
    own = local(progress=msgspec.to_builtins(progress(41, checkpoint_interval="auto: 6 s")))
    seen = status(led, agents=own)["jobs"][0]
    assert (seen["step"], seen["health"], seen["checkpoint"]["error"]) == (41, "degraded", "step 40: disk full")


def test_a_running_job_in_short() -> None:
    seen = status(job())["jobs"][0]
    wanted = {
        "phase": "running", "health": "healthy", "generation": 2, "world_size": 3, "step": 40, "steps_per_s": 9.877,
        "loss": 0.25, "progress_age_s": 2.0, "members": 2, "nodes": "1:2", "restarts": 1, "waiting_for": "",
        "submitted_by": "ada", "checkpoint": None, "incidents": 1,
    }  # fmt: skip
    assert {key: seen[key] for key in wanted} == wanted
    assert (seen["last_incident"]["took_s"], seen["last_incident"]["age_s"]) == (0.144, 10.0)


def test_incident_is_open_until_an_agent_has_closed_it_or_none_of_an_ended_job_is_left() -> None:
    """Not from the end of the job on: before the leader has closed it, it does not say when it ended."""
    record = msgspec.structs.replace(job().incidents[0], open=True, ended_wall_s=None)
    ended = JobState(phase=Phase.FAILED, since_wall_s=995.0)
    running, closing = job(incidents=(record,)), job(incidents=(record,), state=ended)
    left = replace(closing, members={})
    seen = [plain_views.incident(snapshot(known), known, record, NOW) for known in (running, closing, left)]
    assert [(row["open"], row["ended_wall_s"]) for row in seen] == [(True, None), (True, None), (False, 995.0)]


def test_status_prefers_progress_of_the_local_agent_to_etcd() -> None:
    agents = local(progress=msgspec.to_builtins(progress(44, wall_s=999.5)))
    assert status(job(), agents=agents)["jobs"][0]["step"] == 44
    old = local(progress=msgspec.to_builtins(progress(99, generation=1)))
    assert status(job(), agents=old)["jobs"][0]["step"] == 40, "a higher step of an older generation is older"


def test_what_the_agent_of_an_earlier_job_of_the_name_says_is_not_told_of_the_new_one() -> None:
    """It has reached more generations and steps, and still ends its workers when the new job is there already."""
    said = progress(9000, generation=7)
    rows = [{"rank": 0, "node": "a", "slot": 0, "pid": 5, "phase": "done", "step": 9000, "incarnation": 1,
             "rss_mb": 1, "step_s": 0.1}]  # fmt: skip
    agents = local(submitted_wall_s=600.0, progress=msgspec.to_builtins(said), ranks=rows)
    record = job().spec
    assert record is not None
    new = replace(job(), spec=msgspec.structs.replace(record, submitted_wall_s=900.0), progress=None)
    seen = plain_views.job_detail(snapshot(new, agents=agents), new, NOW)
    assert (seen["step"], [row["step"] for row in seen["ranks"] if row["step"]]) == (None, [])
    same = replace(new, spec=msgspec.structs.replace(record, submitted_wall_s=600.0))
    assert plain_views.job_detail(snapshot(same, agents=agents), same, NOW)["step"] == 9000


def test_status_rank_rows_come_from_the_best_source() -> None:
    agents = local(ranks=[msgspec.to_builtins(r) for r in (row(0, "a", 0, 41), row(-1, "a", 2, 0))])
    ranks = plain_views.job_detail(snapshot(job(), agents=agents), job(), NOW)["ranks"]
    assert [(r["rank"], r["node"], r["slot"], r["step"]) for r in ranks] == [
        (0, "a", 0, 41),  # our own agent
        (1, "a", 1, None),  # only known to be there
        (2, "b", 0, 40),  # what the leader wrote
        (-1, "a", 2, 0),  # a worker that has no rank yet
    ]


def test_status_keeps_rank_rows_of_the_leader_if_the_local_agent_is_ahead() -> None:
    agents = local(
        progress=msgspec.to_builtins(progress(99, wall_s=999.9)), ranks=[msgspec.to_builtins(row(0, "a", 0, 99))]
    )
    ranks = plain_views.job_detail(snapshot(job(), agents=agents), job(), NOW)["ranks"]
    assert {(r["node"], r["slot"]): r["pid"] for r in ranks}["b", 0] == row(2, "b", 0).pid


def test_rows_of_a_node_that_is_silent_have_an_age_on_the_screen(screen: io.StringIO) -> None:
    led = [msgspec.to_builtins(row(2, "b", 0))]
    assert "as of" not in told_of(job(), screen)
    text = told_of(job(progress=progress(ranks=led, wall_s=NOW.wall_s - 45)), screen)
    assert "as of" in text
    assert "45 s ago" in text


def test_numbers_that_json_lacks_are_null() -> None:
    seen = status(job(progress=progress(loss=float("nan"))))
    assert seen["jobs"][0]["loss"] is None
    json.dumps(seen, allow_nan=False)


@pytest.mark.parametrize(
    ("changed", "health"),
    [
        ({}, "healthy"),
        ({"state": JobState(phase=Phase.WAITING)}, "degraded"),
        ({"state": JobState(phase=Phase.FAILED)}, "failed"),
        ({"state": JobState(phase=Phase.STOPPED)}, "healthy"),
        ({"progress": progress(checkpoint_error="disk full", checkpoint_step=20, checkpoint_wall_s=900.0)}, "degraded"),
        ({"progress": progress(waiting_for="slot 1 of b to start")}, "degraded"),
    ],
)
def test_health_of_a_job(changed: dict[str, object], health: str) -> None:
    assert status(job(**changed))["jobs"][0]["health"] == health


@pytest.mark.parametrize(
    ("changed", "wall_s", "health"),
    [
        ({}, 929.0, "healthy"),
        ({"state": JobState(phase=Phase.PENDING, since_wall_s=900.0)}, 929.0, "healthy"),
        ({}, 930.0, "degraded"),
        ({"progress": progress(1, waiting_for="slot 0 of a to start", stepped_in=1)}, 929.0, "degraded"),
        ({"incidents": (msgspec.structs.replace(job().incidents[0], open=True),)}, 929.0, "degraded"),
        ({"state": JobState(phase=Phase.RUNNING, since_wall_s=900.0, error=ERROR)}, 929.0, "degraded"),
    ],
)
def test_a_job_is_healthy_while_it_makes_its_first_start(
    changed: dict[str, object], wall_s: float, health: str
) -> None:
    """`elasticctl status JOB` exits with 3 for one that is degraded: a script that looked early saw a fault."""
    begun = {
        "state": JobState(phase=Phase.RUNNING, since_wall_s=900.0),
        "progress": progress(0, waiting_for="slot 0 of a to start"),
        "incidents": (),
    }
    starts = job(**begun | changed)
    seen = plain_views.job_row(snapshot(starts), starts, Now(monotonic_s=100.0, wall_s=wall_s))
    assert (seen["health"], seen["waiting_for"]) == (health, "slot 0 of a to start")


def test_status_lists_problems() -> None:
    assert status()["problems"] == []
    gone = status(contact=Contact(False, 40.0, "connection refused"))
    assert gone["problems"] == ["etcd cannot be reached: this is the last that was seen of it"]
    assert (gone["health"], gone["etcd"]["age_s"]) == ("degraded", 60.0)
    assert "not registered" in status(registered=False)["problems"][0]
    assert status(registered=False, stays_out="x")["problems"] == ["this node stays out of the cluster: x"]
    assert status(job())["problems"] == [
        "b: elasticd does not answer there; its agents of train have not lost their leases"
    ]


def test_an_agent_that_says_nothing_is_a_problem() -> None:
    assert status(agents=local())["problems"] == []
    silent = status(agents=local(written_wall_s=960.0))["problems"]
    assert silent == ["the agent of train on this node has said nothing for 40 s"]


def test_never_seen_etcd() -> None:
    assert status(contact=Contact())["etcd"]["age_s"] is None


def test_a_plan_says_why_a_job_waits() -> None:
    seen = status(job(state=JobState(), progress=None), plan=Assignment(waiting={"train": "0 of at least 1 nodes"}))
    assert seen["jobs"][0]["waiting_for"] == "0 of at least 1 nodes"


def test_jobs_that_are_over_come_last() -> None:
    over = job(name="old", submitted=1, state=JobState(phase=Phase.SUCCEEDED))
    assert [j["job"] for j in status(over, job())["jobs"]] == ["train", "old"]


def test_the_health_check_is_about_the_loop_alone() -> None:
    assert views.healthz(snapshot(contact=Contact()), NOW)[0]
    assert not views.healthz(snapshot(turned_s=50.0), NOW)[0]


@pytest.mark.parametrize(
    ("stepped_wall_s", "written_wall_s", "step_s", "shown"),
    [
        (997.4, 998.0, 0.1, 9.877),
        (996.9, 998.0, 0.1, 0.0),  # three steps are less than a second
        (996.9, 998.0, 0.5, 9.877),
        (996.4, 998.0, 0.5, 0.0),
        (996.0, 996.0, 0.1, 9.877),  # the leader writes every two seconds
        (993.0, 993.0, 0.1, 0.0),  # and nothing is known since
        (993.0, 993.0, 5.0, 9.877),
        (0.0, 998.0, 0.1, 9.877),  # by an earlier agent, which does not tell
    ],
)
def test_the_rate_is_shown_for_as_long_as_steps_are_made(
    stepped_wall_s: float, written_wall_s: float, step_s: float, shown: float
) -> None:
    ranks = [msgspec.to_builtins(row(2, "b", 0, step_s=step_s))]
    told = progress(ranks=ranks, wall_s=written_wall_s, step_wall_s=stepped_wall_s)
    assert status(job(progress=told))["jobs"][0]["steps_per_s"] == shown
    over = job(progress=told, state=JobState(phase=Phase.SUCCEEDED), members={})
    assert status(over)["jobs"][0]["steps_per_s"] == 9.877, "that of its last steps"


def test_a_job_that_makes_no_step_is_not_healthy_unless_that_was_declared() -> None:
    still = {"since_wall_s": 940.0, "because": "it is computing in step 41", "rank": 2, "node": "b"}
    seen = status(job(progress=progress(still=still, step_wall_s=940.0)))
    assert seen["jobs"][0]["health"] == "degraded"
    assert seen["jobs"][0]["no_progress"] == still | {"for_s": 60.0, "declared": False}
    assert (seen["jobs"][0]["steps_per_s"], status(job())["jobs"][0]["steps_per_s"]) == (0.0, 9.877)
    assert status(job(progress=progress(still=still | {"declared": True})))["jobs"][0]["health"] == "healthy"
    assert status(job())["jobs"][0]["no_progress"] is None
    text = metrics.exposition(lambda: snapshot(job(progress=progress(still=still))), IDENTITY)().decode()
    told = next(line for line in text.splitlines() if line.startswith("elasticd_job_no_progress_seconds{"))
    assert float(told.rpartition(" ")[2]) > 0


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(render, "Console", lambda: Console(out, 140))
    return out


def test_the_screen(screen: io.StringIO) -> None:
    waits = job(state=JobState(phase=Phase.WAITING, reason="node b is gone"))
    plain_render.status(status(waits, contact=Contact(False, 40.0, "refused")))
    text = screen.getvalue()
    assert (
        "etcd (127.0.0.1:2379; records unsigned) not connected, last seen 60 s ago; all below is as of then: refused"
        in text
    )
    assert "b     no daemon" in text
    assert "node 144 ms, 0 steps lost, 10 s ago" in text
    assert "! train waiting: node b is gone" in text


def test_job_screen_shows_error_reason_and_script(screen: io.StringIO) -> None:
    error = WorkerError(node="a", slot=1, rank=1, message="boom", traceback="Traceback:\n  boom", exit_code=1, step=39)
    failed = job(state=JobState(phase=Phase.FAILED, reason="crash loop", error=error, excluded_nodes=("a",)))
    detail = plain_views.job_detail(snapshot(failed), failed, NOW, secrets=True) | {"etcd": status()["etcd"]}
    plain_render.job(detail)
    text = screen.getvalue()
    assert "runs  /t.py -x" in text
    assert "rank 1 on a failed first at step 39 (exit code 1)" in text
    assert "Traceback:\n  boom" in text
    plain_render.incident(detail["recent_incidents"][0])
    assert "     144 ms  stepping" in screen.getvalue()


def told_of(seen: Job, screen: io.StringIO) -> str:
    plain_render.job(plain_views.job_detail(snapshot(seen), seen, NOW) | {"etcd": status()["etcd"]})
    return screen.getvalue()


@pytest.mark.parametrize(
    ("lines", "shown"),
    [(("  File x", "ValueError: boom"), False), (("CUDA says: lost", "ValueError: boom"), True), ((), False)],
)
def test_the_end_of_a_log_is_shown_only_where_it_says_more_than_the_traceback(
    lines: tuple[str, ...], shown: bool, screen: io.StringIO
) -> None:
    error = {
        "node": "a", "slot": 0, "rank": 0, "step": 3, "exit_code": 1, "signal": "", "message": "boom",
        "traceback": "Traceback:\n  File x\nValueError: boom\n", "last_lines": list(lines),
    }  # fmt: skip
    plain_render.print_error(render.Console(), error)
    assert screen.getvalue().count("ValueError: boom") == 1 + shown
    assert ("CUDA says: lost" in screen.getvalue()) == shown


def test_job_screen_shows_a_rate_only_while_steps_are_made(screen: io.StringIO) -> None:
    assert "step  40, 9.88 a second\n" in told_of(job(), screen)
    screen.truncate(0)
    assert "step  40\n" in told_of(job(state=JobState(phase=Phase.FAILED, reason="crash loop")), screen)


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (Phase.RUNNING, "plain so far: it has not called elastic.run, and until it does it is started anew after each"),
        (Phase.SUCCEEDED, "plain: it has not called elastic.run\n"),
    ],
)
def test_a_script_is_called_plain_for_no_longer_than_it_is(phase: Phase, said: str, screen: io.StringIO) -> None:
    """Every script is plain until it calls elastic.run, which it does some seconds after its start."""
    assert said in told_of(job(state=JobState(phase=phase), progress=progress(0, managed=False)), screen)


@pytest.mark.parametrize(("managed", "said"), [(False, "-"), (True, "0")])
def test_the_steps_of_a_plain_script_are_not_known_and_not_none(managed: bool, said: str, screen: io.StringIO) -> None:
    known = job(progress=progress(0, managed=managed, ranks=[msgspec.to_builtins(row(0, "a", 0, step=0))]))
    told = told_of(known, screen)
    assert re.search(rf"^ +step  {said}(,|$)", told, re.MULTILINE)
    assert re.search(rf"computing +{said} ", told)


def test_an_open_incident_shows_no_number_that_is_not_known_yet(screen: io.StringIO) -> None:
    lasts = msgspec.structs.replace(job().incidents[0], open=True, world_size_after=0)
    assert " -  live  3 → - " in told_of(job(incidents=(lasts,)), screen)
    given_up = msgspec.structs.replace(lasts, open=False)
    assert " 3 → 0 " in told_of(job(incidents=(given_up,)), screen)


def test_an_incident_in_short_says_that_the_lost_steps_are_not_known(screen: io.StringIO) -> None:
    unknown = msgspec.structs.replace(job().incidents[0], steps_lost=None, steps_lost_at_most=None)
    plain_render.jobs(status(job(incidents=(unknown,)))["jobs"])
    assert "node 144 ms, unknown steps lost, 10 s ago" in screen.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("lines", "last"), [(9, "line 8"), (10, "… and 2 more lines: "), (30, "… and 22 more lines: ")]
)
def test_watch_keeps_the_first_lines_in_sight(lines: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ctrl_c(*_: object) -> None:
        raise KeyboardInterrupt

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(threading.Event, "wait", ctrl_c)
    monkeypatch.setenv("LINES", "10")
    monkeypatch.setenv("COLUMNS", "80")
    render.watch(lambda: print(*(f"line {i}" for i in range(lines)), sep="\n"))
    head, *rest = terminal.getvalue().splitlines()
    assert head == f"{HOME_AND_CLEAR}line 0"
    assert len(rest) == 8
    assert rest[-1].startswith(last)


@pytest.mark.parametrize(
    ("age_s", "said"), [(None, "-"), (3.4, "3 s ago"), (119, "119 s ago"), (150, "2 min ago"), (90000, "25 h ago")]
)
def test_ages(age_s: float | None, said: str) -> None:
    assert render.ago(age_s) == said


def test_status_lists_etcd_alarms_with_their_remedy() -> None:
    assert status()["problems"] == []
    seen = status(contact=Contact(True, 99.5, "", "3.5.21", ("NOSPACE", "CORRUPT", "LATER")))
    assert seen["etcd"]["alarms"] == ["NOSPACE", "CORRUPT", "LATER"]
    space, corrupt, other = seen["problems"]
    assert "out of space" in space
    assert "etcdctl alarm disarm" in space
    assert "replace the member" in corrupt
    assert "LATER" in other
    assert seen["health"] == "degraded"


def test_health_of_the_cluster_is_apart_from_its_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    """One user's crash is no fault of the cluster; what the jobs do is counted beside."""
    failed, new = job(state=JobState(phase=Phase.FAILED), members={}), job(state=JobState(), progress=None, members={})
    jobs = [replace(failed, name=name) for name in "bc"] + [replace(new, name="d"), replace(new, name="e")]
    seen = status(*jobs, plan=Assignment(queue=("d",), waiting={"d": "0 of at least 3 nodes"}))
    assert seen["health"] == "healthy"
    rows = {row["job"]: row for row in seen["jobs"]}
    assert [rows[name]["health"] for name in "bd"] == ["failed", "healthy"]
    assert (rows["d"]["queue_position"], rows["e"]["queue_position"]) == (1, None)
    assert rows["d"]["why"] == "waiting for: its turn, number 1 of 1 in the queue: 0 of at least 3 nodes"
    plain_render.status(seen)
    counts = "jobs: 2 failed, 1 queued, 1 pending"
    assert capsys.readouterr().out.splitlines()[0] == f"cluster main  node a  healthy  {counts}"
    plain_render.status(status(job()))
    assert capsys.readouterr().out.splitlines()[0] == "cluster main  node a  degraded  jobs: 1 running"


def test_a_job_that_can_never_run_is_degraded_and_says_so() -> None:
    never = reason(Code.NEVER, needs="16 workers on 2 nodes", capacity="4 slots on 2 nodes")
    new = job(state=JobState(), progress=None, members={}, generation=None, incidents=())
    (row,) = status(new, plan=Assignment(never=frozenset({"train"}), waiting={"train": never}))["jobs"]
    assert (row["health"], row["why"], row["can_never_run"]) == ("degraded", str(never), True)


def test_status_shows_logged_values_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"norm": "nan", "max": "-inf"}
    seen = job(progress=progress(logged={"lr": 0.5}, logged_not_finite=odd))
    detail = plain_views.job_detail(snapshot(seen), seen, NOW)
    assert (detail["logged"], detail["logged_not_finite"]) == ({"lr": 0.5}, odd)
    plain_render.job(detail | {"etcd": status()["etcd"]})
    assert "logged  lr 0.5, norm nan, max -inf" in capsys.readouterr().out
    text = metrics.exposition(lambda: snapshot(seen), IDENTITY)().decode()
    assert 'elasticd_job_logged{job="train",name="lr"} 0.5' in text
    assert 'elasticd_job_logged{job="train",name="norm"} NaN' in text


def test_status_ignores_the_waiting_reason_of_a_node_that_left() -> None:
    left = job(progress=progress(waiting_for="left: drained: a new disk"), members={})
    plan = Assignment(waiting={"train": "0 of at least 1 nodes; a is draining: a new disk"})
    assert status(left, plan=plan)["jobs"][0]["waiting_for"] == "0 of at least 1 nodes; a is draining: a new disk"
    there = replace(left, members=job().members)
    assert status(there, plan=plan)["jobs"][0]["waiting_for"] == "left: drained: a new disk"


def test_slots_are_counted_as_the_plan_counts_them() -> None:
    starting = job(members={}, progress=None, state=JobState())
    rows = status(starting, plan=Assignment(places={"train": {"a": 2}}))["nodes"]
    assert [(r["node"], r["slots_used"], r["jobs"]) for r in rows] == [("a", 2, ["train"])]
    over = job(state=JobState(phase=Phase.SUCCEEDED))
    row = status(over)["nodes"][0]
    assert (row["node"], row["slots_used"], row["jobs"]) == ("a", 0, ["train"])


def test_a_record_that_cannot_be_read_is_a_problem() -> None:
    cluster = replace(snapshot().cluster, foreign={"/k/2": "JobState speaks protocol 4", "/k/1": "is not a JobState"})
    assert status(cluster=cluster)["problems"] == [
        "etcd holds what this elasticd cannot read: /k/1 and 1 more: is not a JobState"
    ]
    out = status(cluster=cluster, stays_out="x", registered=False)["problems"]
    assert out == ["this node stays out of the cluster: x"], "said once"


def test_pid_and_life_of_a_rank_elsewhere_come_from_its_nodes_record() -> None:
    seen = snapshot(job())
    record = msgspec.structs.replace(
        seen.cluster.nodes["a"].record, workers=(WorkerRow("train", 1, 4711, 3), WorkerRow("other", 0, 1, 1))
    )
    nodes = {"a": Node(record, 1)}
    ranks = plain_views.job_detail(replace(seen, cluster=replace(seen.cluster, nodes=nodes)), job(), NOW)["ranks"]
    assert [(r["rank"], r["pid"], r["incarnation"], r["step"]) for r in ranks] == [
        (0, None, None, None), (1, 4711, 3, None), (2, 12, 1, 40)
    ]  # fmt: skip


def test_a_nodes_record_names_the_workers_that_have_a_process() -> None:
    said = local(ranks=[msgspec.to_builtins(r) for r in (row(1, "a", 1), row(0, "a", 0), row(-1, "a", 2, pid=0))])
    rows = reconcile.worker_rows({"train": said["train"].status, "silent": None})
    assert rows == (WorkerRow("train", 0, 10, 1), WorkerRow("train", 1, 11, 1))


def test_job_detail_holds_secrets_only_if_requested() -> None:
    spec = JobSpec(name="train", script="/t.py", env={"HF_TOKEN": "hush", "LR": "1"}, args=("--api-key=hush",))
    known = job(spec=SpecRecord(spec=spec, submitted_wall_s=0.0, submitted_by="root", uid=1000, gid=1, user="alice"))
    shown = plain_views.job_detail(snapshot(known), known, Now(0.0, 0.0))
    assert "hush" not in json.dumps(shown)
    assert (shown["spec"]["env"]["LR"], shown["owner"], shown["uid"]) == (MASK, "alice", 1000)
    assert (
        plain_views.job_detail(snapshot(known), known, Now(0.0, 0.0), secrets=True)["spec"]["env"]["HF_TOKEN"] == "hush"
    )


def test_of_many_jobs_that_are_over_status_shows_the_newest_and_says_how_many_more() -> None:
    done = JobState(phase=Phase.SUCCEEDED)
    old = [job(name=f"old{n}", submitted=n, state=done, members={}) for n in range(views.OVER_SHOWN + 20)]
    seen, identity = snapshot(job(), *old), Identity("main", "a", "0.1", 7, 0.0, ("127.0.0.1:1",), False, "")
    status = plain_views.status(seen, identity, views.Now(100.0, 1000.0))
    assert (len(status["jobs"]), status["jobs_left_out"]) == (views.OVER_SHOWN + 1, 20)
    assert {row["job"] for row in status["jobs"]} == {"train", *(f"old{n}" for n in range(20, len(old)))}
    assert len(plain_views.status(seen, identity, views.Now(100.0, 1000.0), every=True)["jobs"]) == len(old) + 1
