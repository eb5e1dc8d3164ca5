"""ViewReader of a job that gathers."""

from __future__ import annotations

from elastic.agent.etcd.view_reader import PAUSE_S, ViewThrottle
from elastic.etcd.client import KV, View
from elastic.recovery.machine.model import LARGE_JOB_NODES

GENERATION = "/job/generation"


def _view(count: int, revision: int = 1, formed: bool = False) -> View:
    keys = [f"/job/members/{i}" for i in range(count)] + ([GENERATION] if formed else [])
    return View({key: KV(key, b"", 1, 1, 0) for key in keys}, revision, connected=True, as_of_s=0.0)


def test_few_members_are_looked_at_each_time() -> None:
    gathering = ViewThrottle(GENERATION)
    for revision in range(5):
        view = _view(LARGE_JOB_NODES, revision)
        assert gathering.pick(view, formed=False, now_s=1.0) is view
    assert gathering.pick(None, formed=False, now_s=1.0) is None


def test_view_throttle_limits_views_of_a_forming_large_job_and_keeps_the_newest() -> None:
    gathering, count = ViewThrottle(GENERATION), 1000
    views = [_view(count, revision) for revision in range(4)]
    assert gathering.pick(views[0], formed=False, now_s=10.0) is views[0]
    assert gathering.due_s == float("inf")
    assert gathering.pick(views[1], formed=False, now_s=10.1) is None
    assert gathering.pick(views[2], formed=False, now_s=10.2) is None
    assert gathering.pick(None, formed=False, now_s=10.3) is None
    due_s = 10.0 + PAUSE_S * count
    assert gathering.due_s == due_s
    assert gathering.pick(None, formed=False, now_s=due_s) is views[2]
    assert gathering.pick(None, formed=False, now_s=due_s) is None, "once"
    assert gathering.pick(views[3], formed=False, now_s=due_s + 0.1) is None


def test_a_generation_is_never_held_back() -> None:
    gathering = ViewThrottle(GENERATION)
    assert gathering.pick(_view(1000), formed=False, now_s=10.0)
    first = _view(1000, formed=True)
    assert gathering.pick(first, formed=False, now_s=10.0) is first, "it stands in etcd"
    lost = _view(1000)
    assert gathering.pick(lost, formed=True, now_s=10.0) is lost, "the agent has one, and etcd has none"
