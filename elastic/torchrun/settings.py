"""The options of ``torchrun --rdzv-backend=elastic``, checked, as `TorchrunSettings`."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from elastic.contract.agent_files import EtcdAccess
from elastic.contract.job.field_words import explained
from elastic.contract.job.spec import refuse_unknown
from elastic.contract.keys import NAME, check_name

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

BACKEND = "elastic"


class Conf(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of ``--rdzv-conf name=value,…``."""

    cluster: str = "torchrun"
    """First part of the keys in etcd; runs with the same id in different clusters do not meet."""

    timeout: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Seconds to wait for enough nodes. torchrun always sets it (to 900, unless told)."""

    join_timeout: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """The same under torch's other name; above 0 it takes precedence over `timeout`."""

    last_call_timeout: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Seconds to wait for more nodes once the minimum is reached, and for more new nodes after the first."""

    read_timeout: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Time-out of the agents' store, in seconds."""

    lease_ttl: float = 5.0
    """Seconds after which the others go on without a node that died silently."""

    user: str = ""
    """User name for etcd."""

    password_file: str = ""
    """File with the password for etcd."""

    ca_file: str = ""
    """Certificate authority of etcd; with it, connections use TLS."""

    cert_file: str = ""
    """Client certificate for etcd."""

    key_file: str = ""
    """Key of `cert_file`."""


class TorchrunSettings(msgspec.Struct, frozen=True, kw_only=True):
    conf: Conf
    access: EtcdAccess
    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None

    @property
    def join_s(self) -> float:
        return self.conf.join_timeout or self.conf.timeout

    @property
    def job(self) -> str:
        """`run_id` as a valid name in a key: unchanged, or a readable part and a hash."""
        if NAME.fullmatch(self.run_id):
            return self.run_id
        readable = re.sub(r"[^a-z0-9]+", "-", self.run_id.lower())[:40].strip("-")
        return f"{readable or 'run'}-{hashlib.sha256(self.run_id.encode()).hexdigest()[:12]}"


def settings(params: RendezvousParameters) -> TorchrunSettings:
    """Check torchrun's options. Raises ValueError naming the setting."""
    conf = parse_conf(params.config)
    endpoints = tuple(part.strip() for part in params.endpoint.split(",") if part.strip())
    if not endpoints:
        raise ValueError("--rdzv-endpoint is empty: give etcd's host:port, several separated by commas")
    for endpoint in endpoints:
        if not re.fullmatch(r"(https?://)?[^/\s]+:\d+|unix:/\S+", endpoint):
            raise ValueError(f"--rdzv-endpoint: {endpoint!r} is not host:port")
    if not params.run_id:
        raise ValueError("--rdzv-id is empty")
    same = {name: getattr(conf, name) for name in ("user", "ca_file", "cert_file", "key_file")}
    access = EtcdAccess(endpoints=endpoints, password=_password(conf), **same)
    return TorchrunSettings(
        conf=conf,
        access=access,
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
    )


def parse_conf(raw: Mapping[str, Any]) -> Conf:
    """Numbers arrive as strings. Raises ValueError for an unknown name or an invalid value."""
    refuse_unknown(Conf, raw, "--rdzv-conf ")
    try:
        conf = msgspec.convert(dict(raw), Conf, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"--rdzv-conf {explained(error, Conf, raw)}") from None
    check_name("--rdzv-conf cluster", conf.cluster)
    if conf.lease_ttl < 2:
        raise ValueError(f"--rdzv-conf lease_ttl={conf.lease_ttl:g}: etcd grants no less than 2")
    if bool(conf.user) != bool(conf.password_file):
        raise ValueError("--rdzv-conf: user and password_file belong together")
    return conf


def _password(conf: Conf) -> str:
    for name in ("password_file", "key_file"):
        file_name = getattr(conf, name)
        if file_name and os.path.exists(file_name) and os.stat(file_name).st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ValueError(
                f"--rdzv-conf {name}={file_name}: other users may read or change it: chmod 600 {file_name}"
            )
    if not conf.password_file:
        return ""
    try:
        with open(conf.password_file) as file:
            return file.read().strip()
    except OSError as error:
        raise ValueError(f"--rdzv-conf password_file={conf.password_file}: {error.strerror}") from None
