"""The write queue: an order that fails costs no other order, and never the agent."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import structlog
from support.wait import eventually

from elastic.agent.write_queue import WriteQueue
from elastic.etcd.client import EtcdDenied, EtcdUnavailable
from elastic.etcd.types import EtcdRefused


@pytest.fixture
def queue() -> Iterator[WriteQueue]:
    made = WriteQueue("test")
    made.start()
    yield made
    made.close(5.0)


@pytest.mark.parametrize(
    "fault",
    [
        EtcdUnavailable("away", maybe_done=False),
        EtcdDenied("etcdserver: permission denied"),
        PermissionError("no"),
        RuntimeError("?"),
        ValueError("?"),
        MemoryError(),
        OverflowError("?"),
    ],
)
def test_orders_that_raise_are_tried_again_or_dropped(queue: WriteQueue, fault: Exception) -> None:
    tried: list[str] = []

    def fails_twice() -> None:
        tried.append("persists")
        if tried.count("persists") < 3:
            raise fault

    def fails() -> None:
        tried.append("once")
        raise fault

    queue.ask("once", fails, persist=False)
    queue.ask("persists", fails_twice, persist=True)
    eventually(lambda: tried.count("persists") == 3, 5.0)
    queue.ask("after", lambda: tried.append("after"), persist=False)
    eventually(lambda: "after" in tried, 5.0)
    assert tried.count("once") == 1
    assert queue._thread.is_alive()


def test_an_order_that_etcd_will_never_do_is_given_up(queue: WriteQueue) -> None:
    tried: list[str] = []

    def too_large() -> None:
        tried.append("too large")
        raise EtcdRefused("etcdserver: request is too large")

    with structlog.testing.capture_logs() as said:
        queue.ask("too large", too_large, persist=True)
        eventually(lambda: not queue._orders, 5.0)
    assert tried == ["too large"]
    assert [(line["event"], line["order"]) for line in said] == [("etcd.order_given_up", "too large")]


def test_bug_in_an_order_reaches_the_threads_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends the agent: a queue without its thread would write nothing, silently."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    queue = WriteQueue("test")
    queue.start()
    queue.ask("bug", lambda: {}["no such key"], persist=True)
    eventually(lambda: seen == [KeyError], 5.0)
    queue.close(5.0)
