"""A file that another user may have written is read within a limit: `elastic.util.files` and what is built on it."""

from __future__ import annotations

import ast

from support.source import modules, tree

from .test_excepts import _called, _functions

READERS = ("elasticd", "elastic.contract", "elastic.util", "elastic.etcd", "elastic.checkpoint")
"""Packages that run in the daemon, or for an operator on a user's folder; elasticctl itself reads its caller's."""

_SETTING, _OWN, _KERNEL = "a file that a setting names", "this user's own file", "of the kernel, which limits it"
WITHOUT_A_LIMIT = {
    "elastic.checkpoint.memory.free_memory:_left_in_groups": _KERNEL,
    "elastic.checkpoint.memory.free_memory:available_nbytes": _KERNEL,
    "elastic.checkpoint.saving.client:WriterProcess.activity": _KERNEL,
    "elastic.checkpoint.saving.client:WriterProcess.results": "a pipe of one's own: 64 bytes",
    "elastic.checkpoint.stored.remote:fetch": "nothing is read: the file is synced",
    "elastic.etcd.expiry:expires_wall_s": _SETTING,
    "elastic.etcd.wire:_channel": _SETTING,
    "elastic.util.files:read_descriptor": "the limit itself",
    "elastic.util.kept_code:KeptCode._locked": "a job's file, read by its own agent and workers only",
    "elastic.util.kept_code:_read": "a script, read by its own agent and workers only",
    "elastic.util.processes:kernel_file": _KERNEL,
    "elasticd.base.config:_read": "the daemon's settings",
    "elasticd.base.entry_points:find": "the pyproject.toml of the source that it runs from",
    "elasticd.machine.doctor:versions": _KERNEL,
    "elasticd.etcd.certificates:_make": _OWN,
    "elasticd.etcd.certificates:_names_in": _OWN,
    "elasticd.etcd.cluster_key:load": _OWN,
    "elasticd.etcd.embedded:_listens": _KERNEL,
    "elasticd.agents.etcd_grants:EtcdGrants._write": _SETTING,
    "elasticd.machine.processes.guard:_end_children": _KERNEL,
    "elasticd.machine.processes.guard:_unlinks_shared_memory": _KERNEL,
    "elasticd.machine.host:uid_of": _KERNEL,
    "elasticd.machine.processes.launch:_lockers": _KERNEL,
    "elasticd.machine.processes.shutdown:_has": _KERNEL,
    "elasticd.main:_access": _SETTING,
    "elasticd.api.page.access:token": _SETTING,
    "elasticd.node.stamp_file:StampFile._read": _OWN,
    "elasticd.node.writer:_is_elasticd": _KERNEL,
}
"""module:function -> why no other user's file of any length is read there."""

_WHOLE = {"read_text", "read_bytes", "readlines", "readall"}


def unbounded(module: ast.Module) -> list[str]:
    """The function of each call that reads to the end of a file: of unknown length, so of any length."""
    found = []
    for name, node in _functions(module):
        if not isinstance(node, ast.Call):
            continue
        called, bare = _called(node), isinstance(node.func, ast.Name)
        loads = called == "load" and ast.unparse(node.func).partition(".")[0] in ("json", "tomllib")
        reads = called == "read" and not node.args and not node.keywords
        opens = called == "open" and bare and "w" not in (mode := _mode(node)) and "a" not in mode
        if called in _WHOLE or loads or (reads and not bare) or opens or ast.unparse(node.func) == "os.read":
            found.append(name)
    return found


def _mode(call: ast.Call) -> str:
    given = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "mode"), None)
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else "r"


def test_every_read_without_a_limit_is_of_a_file_that_no_other_user_writes() -> None:
    found = {
        f"{name}:{function}"
        for name, path in modules().items()
        if name.startswith(READERS) and not name.startswith("elasticd.ctl.")
        for function in unbounded(tree(path))
    }
    assert found == set(WITHOUT_A_LIMIT), "read it with elastic.util.files, or say here what limits it"


def test_the_rule_sees_each_way_to_read_a_whole_file() -> None:
    ways = (
        "open(p).read()", "p.read_text()", "p.read_bytes()", "json.load(f)", "os.read(fd, n)", "f.readlines()",
        "f.read()", "open(p, mode='rb')",
    )  # fmt: skip
    for way in ways:
        assert unbounded(ast.parse(f"def f(): {way}")), way
    for fine in ("read_file(p)", "open(p, 'wb')", "f.read(64)", "reader.read(kind)"):
        assert not unbounded(ast.parse(f"def f(): {fine}")), fine
