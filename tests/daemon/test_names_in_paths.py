"""No name in a request, and no link in a folder that workers write to, leads the daemon to a file of someone else."""

from __future__ import annotations

import os
import pathlib
import re

import pytest
import structlog

from elasticd.agents.agents import Agents
from elasticd.agents.logs import Tail
from elasticd.api.routes import log_routes, routes
from elasticd.base.errors import Refused
from elasticd.base.folders import Folder
from elasticd.base.threads import Threads
from elasticd.machine.processes.launch import Detached

WRONG = ("..%2f..%2fetc", "..", "%2e%2e", "a%00b", "a%2fb", "x" * 300, "UPPER", "%c3%a9", ".hidden", "%ff")
NAMED = [(verb, pattern.pattern) for verb, pattern, _ in routes.ROUTES if "(?P<" in pattern.pattern]


@pytest.mark.parametrize(("verb", "pattern"), NAMED)
@pytest.mark.parametrize("name", WRONG)
def test_request_with_an_invalid_job_or_node_name_is_refused(verb: str, pattern: str, name: str) -> None:
    path = re.sub(r"\(\?P<(job|node)>[^)]*\)", name, pattern)
    with pytest.raises(Refused, match=r"(job|node) = .*: use 1 to 63 of") as refused:
        routes.find(verb, path)
    assert refused.value.status == 400


def test_request_path_name_is_url_decoded() -> None:
    assert routes.find("GET", "/v1/jobs/a%2Db_c.d/logs") == (log_routes.get_logs, {"job": "a-b_c.d"})


def agents(state_dir: pathlib.Path) -> Agents:
    log = structlog.get_logger()
    return Agents(state_dir, Detached(), Threads(log), lambda gone: None, log)


@pytest.mark.parametrize("name", ["..", "../../etc", "a/b", ""])
def test_no_folder_of_an_agent_lies_elsewhere(tmp_path: pathlib.Path, name: str) -> None:
    for folder in (agents(tmp_path).dir, agents(tmp_path).logs):
        with pytest.raises(ValueError, match="use 1 to 63"):
            folder(name)


def test_a_folder_that_is_no_jobs_is_passed_over(tmp_path: pathlib.Path) -> None:
    (tmp_path / "jobs" / "lost+found").mkdir(parents=True)
    found = agents(tmp_path)
    found.find()
    assert not found.running


@pytest.fixture
def jobs(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of root's, and the folder of a job with one line."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "slot0.x.1.log").write_text("root:x\n")
    (tmp_path / "jobs" / "j" / "logs").mkdir(parents=True)
    (tmp_path / "jobs" / "j" / "logs" / "slot0.a.1.log").write_text("step 1\n")
    return tmp_path / "jobs"


def shown(jobs: pathlib.Path) -> list[str]:
    tail = Tail(Folder(jobs, ("j", "logs")))
    return [line.text for line in (*tail.last(99), *tail.more())]


def test_a_link_in_place_of_a_log_is_not_followed(jobs: pathlib.Path) -> None:
    secret = jobs.parent / "secret" / "slot0.x.1.log"
    (jobs / "j" / "logs" / "slot1.b.1.log").symlink_to(secret)
    assert shown(jobs) == ["step 1"]


@pytest.mark.parametrize("where", ["logs", ""])
def test_a_link_in_place_of_a_folder_is_not_followed(jobs: pathlib.Path, where: str) -> None:
    mine = jobs / "j" / where
    mine.rename(jobs.parent / "aside")
    mine.symlink_to(jobs.parent / "secret")
    (jobs.parent / "secret" / "logs").symlink_to(jobs.parent / "secret")
    assert shown(jobs) == []


def test_a_pipe_in_place_of_a_log_does_not_hold_up_the_request(jobs: pathlib.Path) -> None:
    os.mkfifo(jobs / "j" / "logs" / "slot1.b.1.log")
    assert shown(jobs) == ["step 1"]
