"""The embedded etcd outlives its daemon; the next one finds it, whatever has become of the file that says where."""

from __future__ import annotations

import pytest
from support.daemons import Nodes

pytestmark = pytest.mark.etcd


@pytest.mark.parametrize("damage", [b"", b"127.0.0.1:\xff", None], ids=["empty", "rubbish", "gone"])
def test_where_it_listens_is_known_without_the_file(damage: bytes | None) -> None:
    with Nodes() as nodes:
        node = nodes.add("found")
        etcd, file = node.etcd_pid(), node.state / "etcd" / "listen"
        before = file.read_text()
        node.kill()
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage)
        node.start()
        assert node.etcd_pid() == etcd
        assert file.read_text() == before
