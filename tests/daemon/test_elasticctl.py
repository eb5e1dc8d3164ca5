"""elasticctl against a real daemon: what it says, its exit codes, and what it imports."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest
from support import procs
from support.daemons import ELASTICCTL, FAKE_AGENT, Node, Nodes
from support.wait import eventually

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Nodes() as nodes:
        yield nodes.add("desk", slots=4)


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    return path


def test_status_imports_little(node: Node) -> None:
    """What it costs is nearly all imports: `benchmarks/footprint.py` measures it."""
    done = node.ctl("status", env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0, done.stderr
    assert re.search(r"cluster main +node desk +healthy", done.stdout)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    heavy = {"rich", "shutil", "dataclasses", "grpc", "http", "tomllib", "statistics", "subprocess", "logging"}
    assert "elasticd.ctl.show.render" in imported
    assert heavy & imported == set(), "imported without need"
    assert len(imported) < 170, f"{len(imported)} modules; 137 are enough on Python 3.11"


def test_submit_status_stop_forget(node: Node, script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "first.toml"
    file.write_text(f'script = "train.py"\npython = "{FAKE_AGENT}"\nworkers_per_node = 1\n')
    done = node.ctl("submit", str(file), "--set", "checkpoint.keep=7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "first is submitted; see: elasticctl status first\n"
    eventually(lambda: node.agent_pid("first"), 10)
    spec = node.job("first")["spec"]
    assert (spec["script"], spec["workdir"], spec["checkpoint"]["keep"]) == (str(script), str(tmp_path), 7)

    eventually(lambda: "5.0" in node.ctl("status").stdout or "0.5" in node.ctl("status").stdout, 10)
    screen = node.ctl("status").stdout
    assert re.search(r"cluster main +node desk +healthy", screen)
    assert re.search(r"desk +ready +1/4", screen)
    assert re.search(r"first +pending", screen)
    detail = node.ctl("status", "first").stdout
    assert f"runs  {script}" in detail
    assert re.search(r"0 +desk +0 +\d+ +running", detail)

    assert node.ctl("forget", "first").stderr == "elasticctl: job 'first' is not over: stop it first\n"
    assert node.ctl("stop", "first", "--reason", "seen enough").stdout == "first is stopping\n"
    procs.kill(node.agent_pid("first"), signal.SIGTERM)
    assert node.ctl("stop", "first", "--wait", "--timeout", "5").stdout == "first is stopped\n"
    assert node.ctl("forget", "first").returncode == 0
    gone = node.ctl("status", "first")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "there is no job 'first'" in gone.stderr


def test_run_follows_and_ends_with_the_jobs_result(node: Node, script: pathlib.Path) -> None:
    (node.state / "fake.json").write_text(json.dumps({"silent": True, "exit_after_s": 0.2, "exit_code": 9}))
    run = ["run", "-w", "1", "--set", f"python={FAKE_AGENT}", "--", "train.py", "--lr", "1"]
    done = node.ctl(*run, cwd=script.parent)
    assert node.ctl("forget", "train").returncode == 0
    again = node.ctl(*run, cwd=script.parent)
    (node.state / "fake.json").unlink()
    assert again.stdout.count("step 1\n") == done.stdout.count("step 1\n"), "lines of the job before, of the same name"
    assert done.returncode == 4, done
    assert "[slot 0] step 1" in done.stdout
    assert "train is submitted" in done.stderr
    assert "train has failed: no agent comes up on desk" in done.stderr
    assert node.get("/v1/jobs/train?secrets=1")["spec"]["args"] == ["--lr", "1"]
    status = node.ctl("status")
    assert (status.returncode, node.ctl("status", "train").returncode) == (0, 4), "the cluster is well"
    assert re.search(r"train failed \d+ s ago: no agent comes up on desk", status.stdout)
    taken = node.ctl("run", "--detach", "--name", "train", *run[1:], cwd=script.parent)
    assert (taken.returncode, "choose another name" in taken.stderr, "--replace" in taken.stderr) == (1, True, True)
    assert node.ctl("run", "--detach", *run[1:], cwd=script.parent).returncode == 0
    assert node.job("train-2")["phase"] == "pending"
    replaced = node.ctl("run", "--detach", "--replace", "-w", "64", "--", "train.py", cwd=script.parent)
    assert replaced.returncode == 0
    assert "train is submitted; it can never run here: it needs 64 workers on 1 node" in replaced.stderr
    assert node.job("train")["phase"] == "pending"
    node.ctl("stop", "train")
    eventually(lambda: node.job("train")["phase"] == "stopped", 10)
    assert node.ctl("forget", "train").returncode == 0
    agent = eventually(lambda: node.agent_pid("train-2"), 10)
    node.ctl("stop", "train-2")
    procs.kill(agent, signal.SIGTERM)  # else the stand-in keeps its slot until the daemon ends it


def test_elasticctl_prints_why_a_job_is_refused(node: Node, script: pathlib.Path) -> None:
    here = script.parent
    wrong = node.ctl("run", "--set", "nods=2", "--", "train.py", cwd=here)
    assert (wrong.returncode, wrong.stderr) == (2, "elasticctl: nods = 2: no such field; did you mean 'nodes'?\n")
    wrong = node.ctl("run", "--nodes", "3:1", "--", "train.py", cwd=here)
    assert "nodes = '3:1': needs 1 <= min <= max" in wrong.stderr
    wrong = node.ctl("run", "--", "absent.py", cwd=here)
    assert (wrong.returncode, "there is no such file" in wrong.stderr) == (2, True)
    assert node.ctl("run").returncode == 2
    assert node.ctl("run", "--json", "--nodes", "3:1", "--", "train.py", cwd=here).returncode == 2
    assert node.ctl("frobnicate").returncode == 2
    assert "there is no node 'mars'; there are: desk" in node.ctl("drain", "mars").stderr
    assert "there is no job 'x'" in node.ctl("logs", "x").stderr
    assert "elasticctl: there is no job 'x'" in node.ctl("scale", "x", "1:2").stderr


def test_a_job_that_no_node_can_take_says_why(node: Node, script: pathlib.Path) -> None:
    node.ctl("run", "--detach", "--name", "big", "-w", "64", "--", "train.py", cwd=script.parent)
    assert node.ctl("status").returncode == 0
    done = node.ctl("status", "big")
    assert done.returncode == 3
    assert re.search(
        r"big can never run here: it needs 64 workers on 1 node, the cluster has \d+ slots on 1 node; desk has",
        node.ctl("status").stdout,
    )
    assert node.ctl("scale", "big", "2:3").stdout == "big may have 2:3 nodes now\n"
    assert json.loads(node.ctl("status", "big", "--json").stdout)["nodes"] == "2:3"
    assert node.ctl("scale", "big", "1").stdout == "big may have 1 node now\n"
    node.ctl("stop", "big")
    eventually(lambda: node.job("big")["phase"] == "stopped", 5, "no process but the daemon could do it")
    later = "big may have 1:2 nodes when it is started again: it is over (stopped)\n"
    assert node.ctl("scale", "big", "1:2").stdout == later


def test_cordon_and_uncordon(node: Node) -> None:
    assert node.ctl("cordon", "desk", "--reason", "fan").stdout == "desk takes no new work\n"
    assert re.search(r"desk +cordoned .* fan", node.ctl("nodes").stdout)
    assert node.ctl("uncordon", "desk").stdout == "desk takes work again\n"
    assert json.loads(node.ctl("nodes", "--json").stdout)["nodes"][0]["state"] == "ready"


def test_json_has_its_schema_everywhere(node: Node) -> None:
    for command in (["status"], ["jobs"], ["nodes"], ["incidents"], ["config", "show"]):
        assert json.loads(node.ctl(*command, "--json").stdout)["schema"] == 1


def test_under_json_an_error_is_json_too(node: Node, tmp_path: pathlib.Path) -> None:
    def told(*args: str) -> tuple[int, int | None, str, str]:
        done = node.ctl(*args)
        error = json.loads(done.stdout)["error"]
        assert error["exit_code"] == done.returncode
        return done.returncode, error["status"], error["message"], done.stderr

    code, status, message, errors = told("status", "x", "--json")
    assert (code, status, message.partition(";")[0], errors) == (1, 404, "there is no job 'x'", "")
    assert told("drain", "--deadline", "nan", "desk", "--json")[:2] == (2, None)
    code, status, message, _ = told("jobs", "--json", "--frob")
    assert (code, status) == (2, None)
    assert re.fullmatch(r"No such option:? '?--frob'?\.?", message), "click's own words, which differ by its version"
    assert told("--socket", str(tmp_path / "none"), "jobs", "--json")[0] == 5
    plain = node.ctl("run", "--", "gone.py", "--json")
    assert (plain.returncode, plain.stdout) == (2, ""), "the script's own --json"


@pytest.mark.parametrize("view", [["config", "show", "--explain"], ["status", "--json"]])
def test_a_reader_that_has_seen_enough_is_no_failure(node: Node, view: list[str]) -> None:
    ctl = [*ELASTICCTL, "--socket", str(node.socket), *view]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(ctl, stdout=writing, stderr=subprocess.PIPE, timeout=20, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_config_show(node: Node) -> None:
    text = node.ctl("config", "show", "--explain").stdout
    assert re.search(r"timeouts.lease_ttl_s +3.0 +flag", text)
    assert "2 × timeouts.beat_s (0.2 s) < timeouts.abort_s (2 s)" in text
    assert "how long etcd keeps a node's" in text.lower()


def test_elasticctl_without_a_daemon_prints_what_to_do(node: Node, tmp_path: pathlib.Path) -> None:
    done = node.ctl("--socket", str(tmp_path / "none.sock"), "status")
    assert done.returncode == 5
    assert "no elasticd on this machine" in done.stderr
    assert "systemctl start elasticd" in done.stderr


def test_checkpoints_of_a_folder(node: Node, tmp_path: pathlib.Path) -> None:
    assert node.ctl("checkpoint", "list", str(tmp_path)).stdout == f"no checkpoints in {tmp_path}\n"
    wrong = tmp_path / "step-5"
    wrong.mkdir()
    (wrong / "manifest.json").write_text("{}")
    done = node.ctl("checkpoint", "verify", str(wrong))
    assert done.returncode == 1
    assert "DAMAGED (manifest-damaged)" in done.stdout
    assert (
        "is no folder here, and as a job: there is no job 'nothing'" in node.ctl("checkpoint", "list", "nothing").stderr
    )
