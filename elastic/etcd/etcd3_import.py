"""Import etcd3 0.12.0's messages and stubs on today's protobuf.

The package's generated modules build descriptors in a way that protobuf 4 removed, so a plain ``import etcd3`` fails.
The serialized descriptors in them are still valid: they are read from the installed files and added to a private pool
(the default one belongs to the process), and modules of the same names are built from them before anything imports the
originals. ``rpc_pb2_grpc``, the stubs, then loads unchanged.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = "etcd3.etcdrpc"
_LITERAL = re.compile(r"""serialized_pb=_b\(('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\)""")
_lock = threading.Lock()


class Rpc(NamedTuple):
    """`messages`: etcd3's message classes (and enum values); `stubs`: its gRPC stubs."""

    messages: Any
    stubs: Any


def load() -> Rpc:
    """Return etcd3's messages and stubs, importing them (and grpc) on the first call. Raises ImportError."""
    with _lock:
        if f"{_PACKAGE}.rpc_pb2_grpc" not in sys.modules:
            _build(_folder())
        # Not an import statement: that would run etcd3/__init__ and its whole client, which is unused here.
        stubs = importlib.import_module(f"{_PACKAGE}.rpc_pb2_grpc")
        return Rpc(sys.modules[f"{_PACKAGE}.rpc_pb2"], stubs)


def _folder() -> Path:
    spec = importlib.util.find_spec("etcd3")
    if spec is None:
        raise ImportError("etcd3 is not installed: pip install etcd3==0.12.0")
    for place in spec.submodule_search_locations or ():
        if (Path(place) / "etcdrpc" / "kv_pb2.py").is_file():
            return Path(place) / "etcdrpc"
    raise ImportError(
        f"the module etcd3 at {spec.origin} is not the package etcd3 (python-etcd3) 0.12.0; "
        "etcd3-py has the same import name: pip uninstall etcd3-py && pip install --force-reinstall etcd3==0.12.0"
    )


def _build(folder: Path) -> None:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    built = {}
    for name in ("kv", "auth", "rpc"):  # rpc needs the other two
        raw = _serialized(folder / f"{name}_pb2.py")
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))
        descriptor = pool.FindFileByName(f"{name}.proto")
        module = types.ModuleType(f"{_PACKAGE}.{name}_pb2")
        vars(module)["DESCRIPTOR"] = descriptor
        for message in descriptor.message_types_by_name.values():
            setattr(module, message.name, message_factory.GetMessageClass(message))
        for enum in descriptor.enum_types_by_name.values():
            vars(module).update({value.name: value.number for value in enum.values})
        built[name] = module
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    for name, module in built.items():
        setattr(package, f"{name}_pb2", module)
        sys.modules[f"{_PACKAGE}.{name}_pb2"] = module
    # The names that etcd3.etcdrpc/__init__ would export, for other code in this process that imports all of etcd3.
    vars(package).update({name: value for name, value in vars(built["rpc"]).items() if name[0].isupper()})
    sys.modules[_PACKAGE] = package
    stubs = importlib.import_module(f"{_PACKAGE}.rpc_pb2_grpc")
    vars(package).update({name: value for name, value in vars(stubs).items() if name.endswith("Stub")})


def _serialized(path: Path) -> bytes:
    found = _LITERAL.search(path.read_text())
    if found is None:
        raise ImportError(f"{path}: no serialized descriptor in it; elasticd needs etcd3==0.12.0")
    return str(ast.literal_eval(found[1])).encode("latin1")
