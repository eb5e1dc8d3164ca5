"""What the adapter of etcd does when real servers are killed, stopped, wiped or refuse."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.etcd_server import EtcdCluster, EtcdServer, enable_auth
from support.wait import eventually, stretched

from elastic.etcd.client import (
    Etcd,
    EtcdAccess,
    EtcdDenied,
    EtcdError,
    EtcdFull,
    EtcdUnavailable,
    View,
    scrub_environment,
)

pytestmark = pytest.mark.etcd


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as one:
        yield one


@pytest.fixture
def etcd(server: EtcdServer) -> Iterator[Etcd]:
    client = Etcd(server.access, call_s=0.5)
    yield client
    client.close()


def test_calls_end_at_their_deadline_when_the_server_is_stopped(server: EtcdServer, etcd: Etcd) -> None:
    views: list[View] = []
    etcd.put("/t/a", b"1")
    etcd.watch("/t/", views.append)
    eventually(lambda: views, 3)
    server.pause()
    for call in (lambda: etcd.get("/t/a"), lambda: etcd.put("/t/a", b"2"), lambda: etcd.grant(5)):
        began_s = time.monotonic()
        with pytest.raises(EtcdUnavailable):
            call()
        assert time.monotonic() - began_s < stretched(0.9)
    eventually(lambda: not views[-1].connected, 2, "the failed calls made the watch look")
    server.cont()
    eventually(lambda: views[-1].connected, 3)
    etcd.put("/t/a", b"3")
    eventually(lambda: views[-1].kvs["/t/a"].value == b"3", 3)


def test_a_lease_is_lost_by_the_own_clock_when_the_server_is_stopped(server: EtcdServer, etcd: Etcd) -> None:
    lost: list[tuple[float, str]] = []
    kept = etcd.keep(3, 0.5, lambda reason: lost.append((time.monotonic(), reason)))
    time.sleep(0.7)  # one renewal
    server.pause()
    paused_s = time.monotonic()
    eventually(lambda: lost, 5)
    assert kept.lost
    assert 2.2 < lost[0][0] - paused_s < stretched(3.2), "counted from the last renewal sent, not from the first miss"
    began_s = time.monotonic()
    kept.close()
    assert time.monotonic() - began_s < stretched(0.1), "nothing left to revoke"
    server.cont()


def test_a_lease_survives_a_short_stop(server: EtcdServer, etcd: Etcd) -> None:
    lost: list[str] = []
    kept = etcd.keep(4, 0.5, lost.append)
    etcd.put("/t/a", b"1", kept.id)
    server.pause()
    time.sleep(1.5)
    server.cont()
    before_s = kept.renewed_s
    eventually(lambda: kept.renewed_s > before_s, 2, "renewed again")
    assert not lost
    assert etcd.get("/t/a")


def test_closing_is_prompt_although_the_server_is_stopped(server: EtcdServer, etcd: Etcd) -> None:
    views: list[View] = []
    etcd.watch("/t/", views.append)
    etcd.keep(5, 0.2, lambda reason: None)
    eventually(lambda: views, 3)
    server.pause()
    time.sleep(0.4)  # a renewal is under way
    began_s = time.monotonic()
    etcd.close()
    assert time.monotonic() - began_s < stretched(1.0)
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("etcd-")], 2, "threads are gone")


def _put(etcd: Etcd, key: str) -> None:
    """On a disk that is busy with gigabytes of others, etcd's fsync can take longer than this client's calls may."""

    def done() -> bool:
        with contextlib.suppress(EtcdUnavailable):
            etcd.put(key, b"1")
            return True
        return False

    eventually(done, 10)


def test_the_server_killed_again_and_again_under_a_watch(server: EtcdServer, etcd: Etcd) -> None:
    views: list[View] = []
    etcd.watch("/t/", views.append)
    written = 0

    def all_are_there() -> bool:
        assert len(etcd.get_prefix("/t/").kvs) == written, "what etcd had confirmed is there"
        assert len(views[-1].kvs) == written, "and seen"
        return True

    for _ in range(3):
        for _ in range(50):
            _put(etcd, f"/t/{written}")
            written += 1
        server.kill()
        server.start()
        eventually(lambda: etcd.revision("/t/"), 3)
        eventually(all_are_there, 5)
    counts = [len(view.kvs) for view in views]
    assert counts == sorted(counts), "no key ever went away"
    revisions = [view.revision for view in views]
    assert revisions == sorted(revisions)


@pytest.mark.slow
@pytest.mark.long
def test_members_killed_in_turn_lose_no_write_and_no_lease() -> None:
    with EtcdCluster(3) as cluster:
        writer, watcher = Etcd(cluster.access), Etcd(cluster.access)
        views: list[View] = []
        lost: list[str] = []
        acknowledged: list[int] = []
        stop = threading.Event()

        def write() -> None:
            i = 0
            while not stop.wait(0.005):
                try:
                    writer.put(f"/t/{i:06d}", b"1")
                    acknowledged.append(i)
                except EtcdUnavailable:
                    pass
                i += 1

        thread = threading.Thread(target=write)
        try:
            watcher.watch("/t/", views.append)
            watcher.keep(5, 1.0, lost.append)
            thread.start()
            for member in cluster.members:
                time.sleep(0.7)
                member.kill()
                count = len(acknowledged)
                eventually(lambda count=count: len(acknowledged) > count + 20, 8, "writes go on with two of three")
                member.start()
            stop.set()
            thread.join(60.0)
            want = {f"/t/{i:06d}" for i in acknowledged}
            eventually(lambda: want <= views[-1].kvs.keys(), 5, "every acknowledged write is seen")
            counts = [len(view.kvs) for view in views]
            assert counts == sorted(counts), "none was seen to go"
            assert not lost
        finally:
            stop.set()
            thread.join(60.0)
            writer.close()
            watcher.close()


@pytest.mark.slow
def test_a_stopped_member_is_left_for_another() -> None:
    with EtcdCluster(3) as cluster:
        etcd = Etcd(cluster.access)
        lost: list[str] = []
        views: list[View] = []
        try:
            etcd.put("/t/a", b"1")
            etcd.keep(5, 1.0, lost.append)
            etcd.watch("/t/", views.append)
            eventually(lambda: views, 3)
            cluster.members[etcd._next % 3].pause()
            eventually(lambda: _writes(etcd), 10, "another member takes the writes")
            eventually(lambda: "/t/b" in views[-1].kvs, 5, "and the watch")
            assert not lost
        finally:
            etcd.close()


def _writes(etcd: Etcd) -> bool:
    try:
        return bool(etcd.put("/t/b", b"2"))
    except EtcdUnavailable:
        return False


def test_no_quorum_is_an_error_in_time_and_not_a_hang() -> None:
    with EtcdCluster(3) as cluster:
        etcd = Etcd(cluster.access, call_s=1)
        views: list[View] = []
        try:
            etcd.put("/t/a", b"1")
            etcd.watch("/t/", views.append, refresh_s=60)
            eventually(lambda: views, 3)
            mine = etcd._next % 3
            for i in {0, 1, 2} - {mine}:
                cluster.members[i].kill()
            eventually(lambda: not views[-1].connected, 8, "the member left over says that it has no leader")
            began_s = time.monotonic()
            with pytest.raises(EtcdUnavailable):
                etcd.get("/t/a")
            assert time.monotonic() - began_s < stretched(1.5)
            assert [member.ok for member in etcd.members()].count(True) <= 1
        finally:
            etcd.close()


def test_a_password_is_needed_wrong_or_renewed(server: EtcdServer, etcd: Etcd) -> None:
    enable_auth(server, "root", "secret")
    with pytest.raises(EtcdDenied):
        etcd.get("/t/a")
    wrong = Etcd(EtcdAccess(endpoints=(server.endpoint,), user="root", password="wrong"))
    with pytest.raises(EtcdDenied, match="invalid user ID or password"):
        wrong.get("/t/a")
    wrong.close()
    right = Etcd(EtcdAccess(endpoints=(server.endpoint,), user="root", password="secret"))
    views: list[View] = []
    try:
        right.put("/t/a", b"1")
        right.watch("/t/", views.append)
        eventually(lambda: views, 3)
        server.kill()  # a restarted etcd knows no simple tokens of before
        server.start()
        eventually(lambda: _takes(right), 5, "logged in again")
        eventually(lambda: views[-1].connected and views[-1].kvs["/t/a"].value == b"2", 5)
    finally:
        right.close()


def _takes(etcd: Etcd) -> bool:
    try:
        return bool(etcd.put("/t/a", b"2"))
    except EtcdUnavailable:
        return False


def test_a_full_etcd_is_named_as_such() -> None:
    with EtcdServer(args=["--quota-backend-bytes=65536"]) as server:
        etcd = Etcd(server.access)
        try:
            with pytest.raises(EtcdFull, match="compact"):
                eventually(lambda: not etcd.put("/t/a", b"x" * 65536), 10, "it is full")
            assert etcd.alarms() == ("NOSPACE",)
        finally:
            etcd.close()


def test_refused_is_retryable_and_certainly_not_done() -> None:
    etcd = Etcd(EtcdAccess(endpoints=("127.0.0.1:1",)), call_s=0.4)
    with pytest.raises(EtcdUnavailable) as caught:
        etcd.put("/t/a", b"1")
    assert not caught.value.maybe_done
    etcd.close()


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    etcd = Etcd(EtcdAccess(endpoints=("127.0.0.1:1",), ca_file=str(tmp_path / "ca.pem")))
    with pytest.raises(EtcdDenied, match=r"ca\.pem"):
        etcd.get("/t/a")


def no_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """No thread can be started whose name has `name` in it, as at a limit of threads; the names of those refused."""
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if name in thread.name:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused


def test_a_watch_outlives_a_lack_of_threads(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[View] = []
    with monkeypatch.context() as starved:
        refused = no_threads(starved, "-read")
        watch = etcd.watch("/t/", views.append)
        eventually(lambda: len(refused) > 1, 5, "it tries again")
        assert not watch.closed
    etcd.put("/t/a", b"1")
    eventually(lambda: "/t/a" in views[-1].kvs, 5)


def test_a_login_outlives_a_lack_of_threads(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    enable_auth(server, "root", "secret")
    etcd = Etcd(EtcdAccess(endpoints=(server.endpoint,), user="root", password="secret"))
    try:
        with monkeypatch.context() as starved:
            no_threads(starved, "etcd-open")
            with pytest.raises(EtcdUnavailable, match="can't start new thread"):
                etcd.put("/t/a", b"1")
        assert etcd.put("/t/a", b"1")
    finally:
        etcd.close()


def test_a_lease_or_a_watch_without_a_thread_is_an_error_in_time(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as starved:
        no_threads(starved, "etcd-")
        with pytest.raises(EtcdUnavailable, match="can't start new thread"):
            etcd.keep(5.0, 1.0, lambda why: None)
        with pytest.raises(EtcdUnavailable, match="can't start new thread"):
            etcd.watch("/t/", lambda view: None)
    assert etcd.keep(5.0, 1.0, lambda why: None).id
    assert len(etcd._leases) == 1


def test_importing_loads_neither_grpc_nor_etcd3() -> None:
    heavy = "{'grpc', 'etcd3', 'google.protobuf', 'tenacity'}"
    code = f"import sys, elastic.etcd.client; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_other_etcd3_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "etcd3").mkdir()
    (tmp_path / "etcd3" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from elastic.etcd import etcd3_import as i; i.load()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip uninstall etcd3-py" in ran.stderr


def test_children_do_not_inherit_our_grpc_settings() -> None:
    env = {"PATH": "/bin", "GRPC_VERBOSITY": "NONE", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    assert scrub_environment(env) == {"PATH": "/bin"}


def test_no_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="endpoints"):
        Etcd(EtcdAccess(endpoints=()))
    assert issubclass(EtcdUnavailable, EtcdError)
