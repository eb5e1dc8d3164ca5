"""etcd's gRPC proxy, which docs/scale.md names for very large jobs: it ends a stream whose requests have ended."""

from __future__ import annotations

import queue
import subprocess
from pathlib import Path

from support.etcd_server import EtcdServer, etcd_binary, free_ports
from support.procs import Procs

from elastic.contract.agent_files import EtcdAccess
from elastic.etcd.client import Etcd, View


def test_one_stream_brings_all_changes_through_the_proxy(tmp_path: Path) -> None:
    binary, address = etcd_binary(), f"127.0.0.1:{free_ports(1)[0]}"
    assert binary is not None
    views: queue.SimpleQueue[View] = queue.SimpleQueue()
    with EtcdServer() as server, Procs() as procs:
        argv = [binary, "grpc-proxy", "start", "--endpoints", server.endpoint, "--listen-addr", address]
        procs.popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        etcd = Etcd(EtcdAccess(endpoints=(address,)), call_s=30.0)
        opened: list[str] = []
        try:
            etcd.revision("/a/")  # asks until the proxy is up
            events = etcd.events

            def counted(*span: object) -> object:
                opened.append("a stream")
                return events(*span)  # type: ignore[arg-type]

            etcd.events = counted  # type: ignore[method-assign]
            watch = etcd.watch("/a/", views.put)
            assert not views.get(timeout=30).kvs
            for count in range(1, 6):
                etcd.put(f"/a/{count}", b"x")
                while len((view := views.get(timeout=30)).kvs) < count:
                    assert view.connected
            watch.close()
        finally:
            etcd.close()
    assert opened == ["a stream"]
