"""What ``--rdzv-conf`` and the endpoint may say, and that the plugin costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elastic.contract.keys import check_name
from elastic.torchrun.handler import create_handler
from elastic.torchrun.settings import settings


def params(endpoint: str = "127.0.0.1:2379", run_id: str = "r", **conf: str) -> RendezvousParameters:
    return RendezvousParameters("elastic", endpoint, run_id, 1, 2, **conf)


def test_strings_become_numbers_and_names_reach_etcd(tmp_path: Path) -> None:
    (tmp_path / "password").touch(0o600)
    (tmp_path / "password").write_text("secret\n")
    made = settings(
        params(
            "a:2379, b:2379",
            timeout="900",
            join_timeout="12.5",
            last_call_timeout="3",
            cluster="lab",
            user="me",
            password_file=str(tmp_path / "password"),
        )
    )
    assert made.access.endpoints == ("a:2379", "b:2379")
    assert (made.access.user, made.access.password) == ("me", "secret")
    assert (made.join_s, made.conf.last_call_timeout, made.conf.cluster) == (12.5, 3.0, "lab")


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"last_call_timout": "3"}, "did you mean 'last_call_timeout'"),
        ({"nonsense": "3"}, "known: .*lease_ttl"),
        ({"timeout": "soon"}, "timeout = 'soon': a number above 0"),
        ({"timeout": "0"}, "timeout = '0': a number above 0"),
        ({"last_call_timeout": "-1"}, "last_call_timeout = '-1': a number from 0"),
        ({"lease_ttl": "1"}, "no less than 2"),
        ({"cluster": "Lab/1"}, "cluster"),
        ({"user": "me"}, "belong together"),
        ({"user": "me", "password_file": "/nowhere"}, "/nowhere"),
    ],
)
def test_wrong_settings_are_named(conf: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        create_handler(params(**conf))


def test_a_password_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "password").touch(0o600)
    (tmp_path / "password").chmod(0o644)
    with pytest.raises(ValueError, match="other users may read or change it: chmod 600"):
        create_handler(params(user="me", password_file=str(tmp_path / "password")))


@pytest.mark.parametrize("endpoint", ["", "host", "host:port", "http://host"])
def test_wrong_endpoints_are_named(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--rdzv-endpoint"):
        settings(params(endpoint))


@pytest.mark.parametrize("run_id", ["my-job", "My Job/7", "-", "x" * 200, "äöü"])
def test_any_run_id_becomes_a_name(run_id: str) -> None:
    job = settings(params(run_id=run_id)).job
    assert check_name("job", job) == job
    assert (job == run_id) == (run_id == "my-job")
    assert job != settings(params(run_id=run_id + "!")).job


def test_torchrun_entry_point_loads_the_handler() -> None:
    [entry] = [e for e in entry_points(group="torchrun.handlers") if e.name == "elastic"]
    assert entry.load()() is create_handler


def test_loading_the_plugin_loads_neither_grpc_nor_etcd() -> None:
    code = (
        "import sys, torch.distributed.elastic.rendezvous.api as api\n"
        "assert 'elastic' in api.rendezvous_handler_registry._registry\n"
        "print(sorted({'grpc', 'elastic.etcd.client', 'elastic.torchrun.rendezvous', 'structlog'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
