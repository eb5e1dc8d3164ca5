"""etcd's messages, and etcd3 0.12.0's gRPC stubs on top of them, on today's protobuf.

etcd3's own modules of messages build descriptors in a way that protobuf 4 removed, so a plain ``import etcd3`` fails.
The messages come from `descriptors` instead, in a pool of their own (the default one belongs to the process), and
etcd3's stubs are given them in place of those that they import.
"""

from __future__ import annotations

import binascii
import functools
import importlib.machinery
import importlib.util
import sys
import threading
import types
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from .descriptors import SERIALIZED

_PACKAGE = "etcd3.etcdrpc"
_lock = threading.Lock()


class Rpc(NamedTuple):
    """`messages`: the message classes of etcd's rpc.proto; `stubs`: etcd3's gRPC stubs."""

    messages: Any
    stubs: Any


def load() -> Rpc:
    """Return etcd's messages and stubs, importing protobuf and grpc on the first call. Raises ImportError."""
    with _lock:
        return _load()


@functools.cache
def _load() -> Rpc:
    messages, stubs = _messages(), types.ModuleType(f"{__package__}.etcd3_stubs")
    loader = importlib.machinery.SourceFileLoader(stubs.__name__, str(_folder() / "rpc_pb2_grpc.py"))
    package: Any = types.ModuleType(_PACKAGE)
    package.rpc_pb2 = messages
    theirs = sys.modules.get(_PACKAGE)  # of other code in this process, with a protobuf that can import it
    sys.modules[_PACKAGE] = package
    try:
        loader.exec_module(stubs)
    finally:
        del sys.modules[_PACKAGE]
        if theirs is not None:
            sys.modules[_PACKAGE] = theirs
    return Rpc(messages, stubs)


def _messages() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(zlib.decompress(binascii.a2b_base64(SERIALIZED))).file:
        pool.Add(file)
    messages = pool.FindFileByName("rpc.proto").message_types_by_name
    return types.SimpleNamespace(**{name: message_factory.GetMessageClass(each) for name, each in messages.items()})


def _folder() -> Path:
    spec = importlib.util.find_spec("etcd3")
    if spec is None:
        raise ImportError("etcd3 is not installed: pip install etcd3==0.12.0")
    for place in spec.submodule_search_locations or ():
        if (Path(place) / "etcdrpc" / "rpc_pb2_grpc.py").is_file():
            return Path(place) / "etcdrpc"
    raise ImportError(
        f"the module etcd3 at {spec.origin} is not the package etcd3 (python-etcd3) 0.12.0; "
        "etcd3-py has the same import name: pip uninstall etcd3-py && pip install --force-reinstall etcd3==0.12.0"
    )
