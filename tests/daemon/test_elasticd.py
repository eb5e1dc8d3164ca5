"""The daemon as a process: quick, small, and its agents and its etcd outlive it."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from support import procs
from support.api import ApiError
from support.daemons import Node, Nodes, rss_mb
from support.etcd_server import EtcdServer
from support.wait import eventually, holds, stretched

from elastic.contract.records.job_records import PROTOCOL
from elastic.etcd.client import Etcd
from elasticd.base.settings import HttpSettings

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes() as made:
        yield made


@pytest.fixture(scope="module")
def node(nodes: Nodes) -> Node:
    return nodes.add("solo", slots=4)


def test_ready_soon_small_and_without_torch(nodes: Nodes) -> None:
    first = nodes.add("quick")
    assert first.kill(signal.SIGTERM) == 0
    first.start()  # modules and etcd's data are warm now
    assert first.ready_s < stretched(3.0), "1 s on an idle machine"
    assert rss_mb(first.pid) < 60
    mapped = pathlib.Path(f"/proc/{first.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "numpy" not in mapped


def test_a_submitted_job_gets_an_agent_and_is_shown(node: Node) -> None:
    node.submit("shown", workers_per_node=1)
    eventually(lambda: node.agent_pid("shown"), 10)
    row = eventually(lambda: next(r for r in node.get("/v1/jobs")["jobs"] if r["job"] == "shown" and r["step"]), 5)
    assert row["phase"] == "pending"
    assert row["loss"] == 0.5
    detail = node.job("shown")
    assert detail["spec"]["script"] == "/t.py"
    assert [r["phase"] for r in detail["ranks"]] == ["running"]


def test_the_agent_outlives_the_daemon_and_is_found_again(nodes: Nodes) -> None:
    node = nodes.add("phoenix")
    node.submit("train")
    agent, etcd = eventually(lambda: node.agent_pid("train"), 10), node.etcd_pid()
    assert node.kill(signal.SIGKILL) == -9
    assert procs.alive(agent)
    assert procs.alive(etcd)
    node.start()
    assert node.agent_pid("train") == agent
    assert node.etcd_pid() == etcd
    assert node.kill(signal.SIGTERM) == 0
    assert procs.alive(agent)
    node.start()
    holds(lambda: node.agent_pid("train") == agent, 1.2)
    procs.kill(agent)
    eventually(lambda: node.agent_pid("train") != agent, 10, "an agent that was found is watched too")


def test_a_dead_agent_is_started_again(node: Node) -> None:
    node.submit("lively", workers_per_node=1)
    before = eventually(lambda: node.agent_pid("lively"), 10)
    procs.kill(before)
    after = eventually(lambda: node.agent_pid("lively") not in (0, before) and node.agent_pid("lively"), 10)
    assert procs.alive(after)


def test_job_whose_agent_never_starts_fails_with_the_agent_output(node: Node) -> None:
    node.submit("stillborn", {"silent": True, "exit_after_s": 0, "exit_code": 3}, workers_per_node=1)
    detail = eventually(lambda: (d := node.job("stillborn"))["phase"] == "failed" and d, 15)
    assert "ended with exit code 3" in detail["reason"]
    assert "fake agent: as planned" in detail["reason"]
    assert detail["health"] == "failed"
    (node.state / "fake.json").unlink()


def test_a_job_with_a_python_that_is_not_there_fails(node: Node) -> None:
    node.submit("nopython", python="/nowhere/python", workers_per_node=1)
    detail = eventually(lambda: (d := node.job("nopython"))["phase"] == "failed" and d, 15)
    assert "/nowhere/python: No such file" in detail["reason"]


def test_stop_ends_a_job_even_if_its_agent_is_deaf(node: Node) -> None:
    from elasticd.cluster import reconcile

    assert reconcile.END_AFTER_S == 10, "the test below would take that long: it is tested in test_reconcile"
    node.submit("short", workers_per_node=1)
    pid = eventually(lambda: node.agent_pid("short"), 10)
    assert node.post("/v1/jobs/short/stop", {"reason": "enough"})["phase"] == "stopping"
    procs.kill(pid, signal.SIGTERM)  # the stand-in does not look at etcd
    detail = eventually(lambda: (d := node.job("short"))["phase"] == "stopped" and d, 5)
    assert detail["reason"] == "enough"
    assert not procs.alive(pid)
    with pytest.raises(ApiError, match="choose another name, remove its records"):
        node.submit("short", workers_per_node=1)


def test_drain_and_checkpoint_reach_the_agent_as_orders(nodes: Nodes, tmp_path: pathlib.Path) -> None:
    node = nodes.add("drained")
    node.submit("train", {"deaf": True}, checkpoint={"dir": str(tmp_path)})
    eventually(lambda: node.agent_pid("train"), 10)
    orders = node.state / "jobs" / "train" / "agent" / "orders.json"
    node.post("/v1/jobs/train/checkpoint")
    eventually(lambda: json.loads(orders.read_text())["checkpoint"] == 1, 5)
    eventually(lambda: node.job("train")["agent"]["reason"] == "hups=1", 5)
    node.post("/v1/nodes/drained/drain", {"reason": "new disk", "deadline_s": 30})
    eventually(lambda: json.loads(orders.read_text())["draining"] == "new disk", 5)
    assert json.loads(orders.read_text())["drain_deadline_s"] == 30
    row = node.get("/v1/nodes")["nodes"][0]
    assert (row["state"], row["reason"]) == ("draining", "new disk")
    procs.kill(node.agent_pid("train"), signal.SIGKILL)
    eventually(lambda: not (node.job("train")["agent"] or {}).get("pid"), 5)
    holds(lambda: not (node.job("train")["agent"] or {}).get("pid"), 1.0, "no agent comes back on a draining node")
    assert "draining" in node.job("train")["waiting_for"]
    (node.state / "fake.json").unlink()
    node.post("/v1/nodes/drained/uncordon")
    eventually(lambda: node.agent_pid("train"), 5)
    assert json.loads(orders.read_text())["draining"] is None


def test_an_embedded_etcd_that_dies_is_started_again(nodes: Nodes) -> None:
    node = nodes.add("etcdless")
    before = node.etcd_pid()
    procs.kill(before)
    after = eventually(lambda: (pid := node.etcd_pid()) != before and pid, 10)
    eventually(node.ready, 20)
    assert procs.alive(after)
    assert any(e["event"] == "etcd.died" and e["exit_code"] == -9 for e in node.events())


def test_daemon_serves_the_last_snapshot_while_etcd_is_down(nodes: Nodes) -> None:
    with EtcdServer() as server:
        node = nodes.add("cut", etcd__endpoints=server.endpoint)
        node.submit("train")
        agent = eventually(lambda: node.agent_pid("train"), 10)
        server.pause()
        data = eventually(lambda: not (d := node.get("/v1/status"))["etcd"]["connected"] and d, 15)
        assert data["etcd"]["age_s"] >= 0
        assert [j["job"] for j in data["jobs"]] == ["train"]
        assert data["health"] == "degraded"
        with pytest.raises(ApiError, match="etcd cannot be reached") as refused:
            node.submit("later")
        assert refused.value.status == 503
        assert procs.alive(agent)
        server.cont()
        eventually(node.ready, 20)
        assert node.agent_pid("train") == agent


def test_a_wiped_etcd_stops_no_agent(nodes: Nodes) -> None:
    with EtcdServer() as server:
        node = nodes.add("wiped", etcd__endpoints=server.endpoint)
        node.submit("train")
        agent = eventually(lambda: node.agent_pid("train"), 10)
        server.wipe()
        eventually(lambda: "train" not in [j["job"] for j in node.get("/v1/jobs")["jobs"]], 20)
        eventually(node.ready, 20, "it registers itself again")
        holds(lambda: procs.alive(agent), 1.0)


def test_metrics_and_health(node: Node) -> None:
    where = node.get("/v1/status")["metrics"]
    with urllib.request.urlopen(f"{where}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert "elasticd_etcd_up 1.0" in text
    assert f'elasticd_node_state{{node="{node.name}",state="ready"}} 1.0' in text
    assert re.search(
        r'elasticd_api_request_duration_seconds_count{code="200",method="GET",route="/v1/status"} \d', text
    )
    assert re.search(r'elasticd_etcd_request_duration_seconds_count{method="[\w.]+",result="ok"} \d', text)
    assert re.search(r"process_resident_memory_bytes \d", text)
    with urllib.request.urlopen(f"{where}/healthz", timeout=30) as answer:
        assert json.load(answer)["alive"] is True
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{where}/other", timeout=30)


def test_logs_can_be_read_and_followed_to_the_end(node: Node) -> None:
    node.submit("chatty", {"exit_after_s": 1.0, "exit_code": 0}, workers_per_node=1)
    pid = eventually(lambda: node.agent_pid("chatty"), 10)
    node.post("/v1/jobs/chatty/stop")
    done = node.ctl("logs", "-f", "chatty")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[slot 0] step 1", "[slot 0] step 2"]
    assert not procs.alive(pid)
    (node.state / "fake.json").unlink()
    last = node.ctl("logs", "-n", "1", "chatty", "--json").stdout.splitlines()
    assert json.loads(last[0])["line"] == lines[-1].removeprefix("[slot 0] ")
    assert json.loads(last[1]) == {"end": True, "phase": "stopped", "elsewhere": {}}


def test_a_second_daemon_in_the_same_folder_is_refused(nodes: Nodes, node: Node) -> None:
    twin = nodes.add("twin", start=False, state_dir=str(node.state))
    twin.start(wait_s=0)
    assert twin.process is not None
    assert twin.process.wait(60) == 75
    assert "another elasticd" in twin.log.read_text()


def test_a_default_port_that_is_taken_is_a_warning_and_another_one_is_used(nodes: Nodes, node: Node) -> None:
    """A second user of the machine could not start elasticd at all."""
    listen = HttpSettings().listen
    host, _, port = listen.rpartition(":")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # by another process: taken in any case
            stack.enter_context(socket.create_server((host, int(port))))
        endpoint = node.get("/v1/status")["etcd"]["endpoints"][0]
        second = nodes.add("neighbour", http__listen=listen, etcd__endpoints=endpoint)
        (warning,) = [e for e in second.events() if e["event"] == "http.other_port"]
        assert listen in warning["why"]
        assert second.get("/v1/status")["metrics"].startswith(warning["url"])
        assert not warning["url"].endswith(f":{port}")
        second.kill(signal.SIGTERM)


def test_a_second_daemon_of_the_same_name_stays_out(nodes: Nodes, node: Node) -> None:
    endpoint = node.get("/v1/status")["etcd"]["endpoints"][0]
    twin = nodes.add("namesake", start=False, node="solo", etcd__endpoints=endpoint)
    twin.start(wait_s=0)
    eventually(lambda: any("is already called 'solo'" in str(e.get("what")) for e in twin.events()), 10)
    assert {row["node"]: row for row in node.get("/v1/nodes")["nodes"]}["solo"]["up_since_wall_s"]
    assert "not registered" in twin.get("/v1/status")["problems"][0]
    twin.kill(signal.SIGTERM)


def test_the_socket_is_for_its_group_only(node: Node) -> None:
    assert node.socket.stat().st_mode & 0o777 == 0o660


def test_stop_everything(nodes: Nodes) -> None:
    node = nodes.add("ended")
    node.submit("train")
    pids = [eventually(lambda: node.agent_pid("train"), 10), node.etcd_pid(), node.pid]
    from elasticd.machine.processes.shutdown import stop_all

    ended = stop_all(node.state)
    assert [line.split(" (")[0] for line in ended] == ["elasticd", "agent of train", "etcd"]
    assert not [pid for pid in pids if procs.alive(pid)]


def test_systemd_is_told(nodes: Nodes, tmp_path: pathlib.Path) -> None:
    path, said = str(tmp_path / "notify"), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(path)
        channel.settimeout(20)

        def listen() -> None:
            while "STOPPING=1" not in said:
                said.append(channel.recv(4096).decode())

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        node = nodes.add("told", start=False)
        node.start(env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "900000", "WATCHDOG_PID": ""})
        eventually(lambda: {"READY=1", "WATCHDOG=1"} <= set(said), 10)
        node.kill(signal.SIGTERM)
        listener.join(20)
    assert said[-1] == "STOPPING=1"
    assert "STATUS=0 agents here" in said
    assert any(s.startswith("EXTEND_TIMEOUT_USEC=") for s in said[: said.index("READY=1")])


def test_a_node_that_finds_another_protocol_stays_out(nodes: Nodes) -> None:
    with EtcdServer() as server:
        etcd = Etcd(server.access, call_s=20.0)
        etcd.put("/elastic/main/nodes/newer", b'{"protocol": %d, "node": "newer"}' % (PROTOCOL + 1))
        node = nodes.add("older", start=False, etcd__endpoints=server.endpoint)
        node.start(wait_s=0)
        problems = eventually(lambda: [p for p in _problems(node) if "stays out" in p], 20)
        assert f"NodeRecord speaks protocol {PROTOCOL + 1}, this elasticd speaks {PROTOCOL}" in problems[0]
        assert etcd.get("/elastic/main/nodes/older") is None
        etcd.delete("/elastic/main/nodes/newer")
        eventually(node.ready, 10)
        etcd.put("/elastic/main/nodes/newer", b'{"protocol": %d, "node": "newer"}' % (PROTOCOL + 1))
        holds(lambda: etcd.get("/elastic/main/nodes/older"), 1.5, "a member is not driven out by a newcomer")
        etcd.close()
        node.kill(signal.SIGTERM)


def test_jobs_that_an_earlier_version_has_left_keep_no_node_out_and_can_be_forgotten(nodes: Nodes) -> None:
    """As after an upgrade: the nodes are new, the records of the jobs that are over are not."""
    with EtcdServer() as server:
        etcd = Etcd(server.access, call_s=20.0)
        for key in ("head/spec", "head/state", "head/generation", "ranks/n1"):
            etcd.put(f"/elastic/main/jobs/old/{key}", b'{"protocol": %d}' % (PROTOCOL - 1))
        node = nodes.add("upgraded", start=False, etcd__endpoints=server.endpoint)
        node.start(wait_s=0)
        eventually(lambda: etcd.get("/elastic/main/nodes/upgraded"), 20, "the node is registered")
        assert any("forget jobs of an earlier one" in problem for problem in _problems(node))
        etcd.put("/elastic/main/jobs/old/members/n1", b'{"protocol": %d}' % (PROTOCOL - 1))
        refused = node.ctl("forget", "old")
        assert (refused.returncode != 0, "agents of another elasticd version" in refused.stderr) == (True, True)
        etcd.delete("/elastic/main/jobs/old/members/n1")
        assert node.ctl("forget", "old").returncode == 0
        eventually(node.ready, 10, "nothing is left of it")
        assert not etcd.get_prefix("/elastic/main/jobs/old/").kvs
        etcd.close()
        node.kill(signal.SIGTERM)


def _problems(node: Node) -> list[str]:
    try:
        problems: list[str] = node.get("/v1/status")["problems"]
    except OSError:
        return []
    return problems


def test_two_nodes_share_a_job(nodes: Nodes, node: Node) -> None:
    endpoint = node.get("/v1/status")["etcd"]["endpoints"][0]
    second = nodes.add("second", etcd__endpoints=endpoint)
    node.submit("wide", nodes="2:2", workers_per_node=1)
    eventually(lambda: node.agent_pid("wide"), 10)
    eventually(lambda: second.agent_pid("wide"), 10)
    assert {row["node"] for row in second.get("/v1/nodes")["nodes"]} >= {"solo", "second"}
    second.kill(signal.SIGTERM)
    states = lambda: {row["node"]: row["state"] for row in node.get("/v1/nodes")["nodes"]}  # noqa: E731
    eventually(lambda: states()["second"] == "off", 5, "it signed off")


def test_damaged_files_cost_no_agent(nodes: Nodes) -> None:
    node = nodes.add("damaged")
    node.submit("train")
    agent = eventually(lambda: node.agent_pid("train"), 10)
    node.kill()
    folder = node.state / "jobs" / "train" / "agent"
    for name in ("config.json", "orders.json"):
        (folder / name).write_text('{"cluster": "ma')
    (node.state / "jobs" / "rubbish").mkdir()
    node.start()
    eventually(lambda: node.agent_pid("train") == agent, 10)
    assert json.loads((folder / "config.json").read_text())["job"] == "train"


def test_a_thread_that_fails_ends_the_process() -> None:
    code = (
        "import structlog, time\n"
        "from elasticd.base.threads import Threads\n"
        "Threads(structlog.get_logger()).start('limb', lambda: 1 / 0)\n"
        "time.sleep(20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stdout + done.stderr
