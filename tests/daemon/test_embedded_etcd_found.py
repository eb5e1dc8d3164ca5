"""The embedded etcd outlives its daemon; the next one finds it, or has it listen where the settings now say."""

from __future__ import annotations

import socket

import pytest
from support import procs
from support.daemons import Nodes
from support.etcd_server import free_ports
from support.wait import eventually

from elasticd.machine.processes import launch

pytestmark = pytest.mark.etcd


def test_embedded_etcd_is_adopted_by_its_lock_and_restarted_on_a_new_listen_address() -> None:
    with Nodes() as nodes:
        node = nodes.add("found")
        etcd = node.etcd_pid()
        eventually(lambda: node.get("/v1/nodes")["nodes"], 20.0, "the node is registered")
        node.post("/v1/nodes/found/cordon", {"reason": "kept"})
        node.kill()
        node.start()
        assert node.etcd_pid() == etcd
        node.kill()
        node._settings["etcd.embedded_listen"] = f"127.0.0.1:{free_ports(1)[0]}"
        node.start()
        assert node.etcd_pid() != etcd
        assert not procs.alive(etcd)
        (row,) = eventually(lambda: node.get("/v1/nodes")["nodes"], 20.0, "the node is registered again")
        assert row["reason"] == "kept", "its data are the same"


def test_an_elasticd_that_cannot_start_leaves_no_etcd_behind() -> None:
    with Nodes() as nodes, socket.create_server(("127.0.0.1", 0)) as taken:
        node = nodes.add("a", start=False, **{"http.listen": f"127.0.0.1:{taken.getsockname()[1]}"}).start(wait_s=0)
        assert node.process is not None
        assert node.process.wait(20) == 69
        assert launch.holder(node.state / "etcd" / "lock") is None
