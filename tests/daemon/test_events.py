"""elasticctl events against real daemons: a request, a node that comes and is killed, followed as it happens."""

from __future__ import annotations

import json
import subprocess

import pytest
from support.daemons import ELASTICCTL, Nodes
from support.etcd_server import EtcdServer
from support.procs import Procs

pytestmark = pytest.mark.etcd


def test_events_are_followed_from_a_request_to_the_loss_of_a_node() -> None:
    with EtcdServer() as etcd, Nodes() as nodes, Procs() as procs:
        first = nodes.add("first", etcd__endpoints=etcd.endpoint)
        argv = [*ELASTICCTL, "--socket", str(first.socket), "events", "-f", "--json"]
        reader = procs.popen(argv, stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        second = nodes.add("second", etcd__endpoints=etcd.endpoint)
        assert first.ctl("cordon", "second", "--reason", "new disk").returncode == 0
        second.kill()
        seen = []
        for line in reader.stdout:  # ends with the reader, at the latest when the test's time is up
            seen.append(json.loads(line))
            if seen[-1]["kind"] == "node.gone":
                break
        kinds = [(event["kind"], event["node"]) for event in seen if event["node"] == "second"]
        assert kinds == [("node.came", "second"), ("node.cordoned", "second"), ("node.gone", "second")]
        asked = next(event for event in seen if event["kind"] == "node.cordoned")
        assert asked["user"]
        assert asked["uid"] is not None
        assert "new disk" in asked["text"]
        said = first.ctl("events", "--node", "second", "--since", "10m")
        assert [line.split()[2] for line in said.stdout.splitlines()] == [kind for kind, _ in kinds]
        none = first.ctl("events", "--node", "second", "--last", "1", "--since", "0s")
        assert (none.returncode, none.stdout) == (0, "no events\n")
        for words in (("--job", "none"), ("--job", "none", "-f"), ("--node", "third", "--since", "1h")):
            wrong = first.ctl("events", *words)
            assert (wrong.returncode, wrong.stdout) == (1, ""), words
            assert f"there is no {words[0][2:]} {words[1]!r}; there are: " in wrong.stderr
        assert first.ctl("events", "--job", "No Name").returncode == 2
