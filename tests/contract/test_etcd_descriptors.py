"""Our definitions of etcd's messages are etcd3's, and the generated module holds them."""

from __future__ import annotations

import binascii
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet
from support import etcd_descriptors

from elastic.etcd.descriptors import SERIALIZED

PURE_PYTHON = os.environ | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
"""With it etcd3's generated modules can still be imported."""
THEIRS = """
import json
from etcd3.etcdrpc import auth_pb2, kv_pb2, rpc_pb2
print(json.dumps([each.DESCRIPTOR.serialized_pb.hex() for each in (kv_pb2, auth_pb2, rpc_pb2)]))
"""
NEWER = {"etcdserverpb.StatusResponse.errors"}
"""Since etcd 3.4; etcd3's definitions are older."""


def ours() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(zlib.decompress(binascii.a2b_base64(SERIALIZED)))


def in_pure_python(code: str) -> str:
    argv = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(argv, env=PURE_PYTHON, stdout=subprocess.PIPE, check=True, text=True, timeout=60).stdout


def definitions(file: FileDescriptorProto) -> dict[str, Any]:
    """Full name -> all that decides how it looks on the wire."""
    found = {}
    for message in file.message_type:
        found |= dict(of_message(message, file.package))
    for enum in file.enum_type:
        found |= dict(of_enum(enum, file.package))
    for service in file.service:
        for m in service.method:
            streams = m.client_streaming, m.server_streaming
            found[f"{file.package}.{service.name}/{m.name}"] = (m.input_type, m.output_type, *streams)
    return found


def of_message(message: DescriptorProto, within: str) -> Iterator[tuple[str, Any]]:
    name = f"{within}.{message.name}"
    yield name, "message"
    for f in message.field:
        oneof = message.oneof_decl[f.oneof_index].name if f.HasField("oneof_index") else ""
        packed = f.options.packed if f.options.HasField("packed") else None
        yield f"{name}.{f.name}", (f.number, f.type, f.type_name, f.label, oneof, packed, f.proto3_optional)
    for enum in message.enum_type:
        yield from of_enum(enum, name)
    for nested in message.nested_type:
        yield from of_message(nested, name)


def of_enum(enum: EnumDescriptorProto, within: str) -> Iterator[tuple[str, Any]]:
    for value in enum.value:
        yield f"{within}.{enum.name}.{value.name}", value.number


def test_each_definition_is_etcd3s() -> None:
    theirs = {}
    for raw in json.loads(in_pure_python(THEIRS)):
        theirs |= definitions(FileDescriptorProto.FromString(bytes.fromhex(raw)))
    defined = {name: each for file in ours().file for name, each in definitions(file).items()}
    assert {file.syntax for file in ours().file} == {"proto3"}
    assert len(defined) > 300
    assert defined.keys() - theirs.keys() == NEWER
    assert {name: each for name, each in defined.items() if name not in NEWER and each != theirs[name]} == {}


def test_the_generated_module_is_what_the_proto_files_give() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    assert ours() == FileDescriptorSet.FromString(etcd_descriptors.compiled()), "run `make golden`"


def test_the_generated_text_holds_what_it_was_made_from() -> None:
    assert etcd_descriptors.MODULE.read_text().count("\n") < 60
    made: dict[str, bytes] = {}
    exec(etcd_descriptors.text(b"\n\0\xff" * 99), made)
    assert zlib.decompress(binascii.a2b_base64(made["SERIALIZED"])) == b"\n\0\xff" * 99


def test_another_user_of_etcd3_in_the_process_keeps_its_own() -> None:
    code = """
import sys, etcd3
from elastic.etcd import etcd3_import
before = dict(sys.modules)
rpc = etcd3_import.load()
assert etcd3_import.load() is rpc
etcd3.etcdrpc.MemberAddRequest
assert {name for name in before if sys.modules[name] is not before[name]} == set()
print(rpc.messages.StatusRequest is etcd3.etcdrpc.StatusRequest, hasattr(rpc.messages, "MemberAddRequest"))
"""
    assert in_pure_python(code) == "False False\n"
