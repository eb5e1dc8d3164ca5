"""`elasticctl run` right after `elasticd &`: it waits until a daemon listens that has reached its etcd."""

from __future__ import annotations

from typing import Any

import pytest

from elasticd.ctl import client as client_module
from elasticd.ctl.client import Client, Failed, Unreachable
from elasticd.ctl.jobs import run_command

ABSENT = Unreachable("no socket", absent=True)
NOT_YET = {"etcd": {"connected": False, "age_s": None}}
READY = {"etcd": {"connected": True, "age_s": 0.1}}
LOST = {"etcd": {"connected": False, "age_s": 40.0}}


class Starting(Client):
    """A daemon with these answers, one for each request; the last is repeated."""

    def __init__(self, *answers: Any) -> None:
        super().__init__("/run/s")
        self.answers = list(answers)

    def get(self, path: str, *_: Any, **__: Any) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_command.time, "sleep", lambda _: None)


def test_a_daemon_that_is_starting_is_awaited_and_the_user_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command.ready_cluster(Starting(ABSENT, ABSENT, NOT_YET, NOT_YET, READY)) == READY
    assert capsys.readouterr().err == "no elasticd listens on /run/s yet: waiting for up to 10 s\n"


def test_one_that_works_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    for answer in (READY, LOST):  # an etcd that was lost: the command says so at once
        assert run_command.ready_cluster(Starting(answer)) == answer
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [Unreachable("you may not use /run/s"), Failed(503, "busy")])
def test_other_errors_are_told_at_once(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        run_command.ready_cluster(Starting(error, READY))


def test_the_wait_ends() -> None:
    with pytest.raises(Unreachable, match="no socket"):
        run_command.ready_cluster(Starting(ABSENT), wait_s=0.0)
    assert run_command.ready_cluster(Starting(NOT_YET), wait_s=0.0) == NOT_YET


def test_all_sockets_that_were_tried_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ELASTICCTL_SOCKET", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(client_module.os.path, "exists", lambda path: False)
    client = Client()
    monkeypatch.setattr(client, "get", Starting(ABSENT, READY).get)
    assert run_command.ready_cluster(client) == READY
    tried = f"/run/elasticd/elasticd.sock, /var/lib/elasticd/elasticd.sock or {tmp_path}/elasticd/elasticd.sock"
    assert capsys.readouterr().err == f"no elasticd listens on {tried} yet: waiting for up to 10 s\n"
    with pytest.raises(Unreachable, match=f"there is no socket {tried}"):
        Client().get("/v1/status")


def test_a_socket_that_appears_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("ELASTICCTL_SOCKET", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    client = Client()
    (tmp_path / "elasticd").mkdir()
    (tmp_path / "elasticd" / "elasticd.sock").touch()
    client.find_again()
    assert client.path.endswith("elasticd.sock")
    chosen = Client("/run/mine")
    chosen.find_again()
    assert chosen.path == "/run/mine"
