"""A variable that names no interface of the host is refused before the group is formed, and not tried again."""

from __future__ import annotations

import pytest

from elastic.worker.comm.group import Group
from elastic.worker.comm.sockets import unknown_interface
from elastic.worker.link.misuse import MisuseRuntimeError

NAMES = ("lo", "eth0", "eth1.7")


@pytest.mark.parametrize(
    ("environment", "unknown"),
    [
        ({}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth0,lo"}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME=eth"),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth7"}, "GLOO_SOCKET_IFNAME=eth7"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "ib,eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME==eth"),
        ({"NCCL_SOCKET_IFNAME": "=eth0"}, ""),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, ""),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "NCCL_SOCKET_IFNAME=ib"),
    ],
)
def test_names_of_interfaces(environment: dict[str, str], unknown: str) -> None:
    assert unknown_interface(environment, NAMES) == unknown


def test_a_group_is_refused_at_once_with_the_variable_and_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    group = Group(backend="gloo", rank=0, world_size=2, store_host="127.0.0.1", store_port=9, generation=1)
    with pytest.raises(
        MisuseRuntimeError, match=r"^GLOO_SOCKET_IFNAME=nosuch: .* has no such interface; it has .*\blo\b"
    ):
        group.form()
