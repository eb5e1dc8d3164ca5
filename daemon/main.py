"""The command `elasticd`: read the settings, assemble the parts, run until stopped."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import IO

import msgspec

import elastic
from elastic.contract.agent_files import EtcdAccess
from elastic.contract.timeouts import RELATIONS
from elastic.etcd.client import key_id
from elasticd.api.views.instant import Identity
from elasticd.base.command_answers import Config, Relation, Setting
from elasticd.base.errors import AlreadyRuns, CannotStart, DaemonError, InvalidConfig, Unsaved
from elasticd.base.masking import masked_setting
from elasticd.base.safe_text import block
from elasticd.base.sd_notify import Notify
from elasticd.base.settings import Settings
from elasticd.machine.first_process import become_init
from elasticd.machine.processes.shutdown import stop_all, unsaved

from .agents import job_folders
from .api.page import access
from .base import config, ownership
from .etcd import cluster_key, trust
from .machine import addresses, host
from .machine import first_process as lean
from .machine.processes import launch, shutdown

FLAGS = ("cluster", "node", "address", "state_dir", "socket", "slots", "log_level")
"""Settings with a flag of their own; all others are set by --set."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; see `errors`."""
    args = _parser().parse_args(argv)
    if not (args.stop or args.make_cluster_key or args.check):
        become_init()
    started_s = time.monotonic()
    try:
        loaded = config.load(args.config, os.environ, _flags(args))
        if args.stop:
            state_dir = Path(host.state_dir_of(loaded.settings))
            if not args.discard and (lost := unsaved(state_dir)):
                raise Unsaved(
                    f"{'; '.join(lost)}: these steps would be lost, so nothing was ended. Let it train to its end, or "
                    "end it all the same with: elasticd --stop --discard. A job keeps its steps with: elasticctl run "
                    "--checkpoints DIR"
                )
            report = stop_all(state_dir)
            print("\n".join(report) or "nothing runs")
            return 1 if any(shutdown.NOT in line for line in report) else 0
        gpus = host.gpus(loaded.settings.gpus)
        settings = host.complete(loaded.settings, gpus.indices)
        trust.check(settings.etcd, os.geteuid())
        if args.make_cluster_key:
            print(cluster_key.make(settings))
            return 0
        if key := cluster_key.find(settings):
            trust.check_secret("cluster key", str(key), os.geteuid(), settings.etcd.allow_readable_secrets)
        access.token(settings.page, os.geteuid(), settings.etcd.allow_readable_secrets)
        if settings.notify.command:
            ownership.trusted_program(settings.notify.command[0], "notify.command")
        if args.check:
            print(f"{args.config or 'defaults'}: good")
            return 0
        return _run(settings, loaded.sources, gpus, started_s, addresses.find(loaded.settings).why)
    except DaemonError as error:
        print(f"elasticd: {block(error)}", file=sys.stderr)
        return error.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elasticd", description="elasticd node daemon.")
    parser.add_argument("--config", type=Path, default=os.environ.get("ELASTICD_CONFIG"), help="TOML file of settings")
    parser.add_argument("--check", action="store_true", help="check the settings and end")
    parser.add_argument("--make-cluster-key", action="store_true", help="generate the cluster's key and end")
    parser.add_argument(
        "--stop",
        action="store_true",
        help="end the daemon, its agents and its embedded etcd; "
        "jobs that are not over go on from their checkpoints when elasticd is started again",
    )
    parser.add_argument(
        "--discard", action="store_true", help="with --stop: also the steps of jobs without checkpoints"
    )
    parser.add_argument("--version", action="version", version=f"elasticd {elastic.__version__}")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="e.g. timeouts.lease_ttl_s=4")
    parser.add_argument("--etcd", dest="etcd.endpoints", metavar="HOST:PORT,…", help="etcd's endpoints")
    for name in FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="…", help=config.explain()[name])
    return parser


def _flags(args: argparse.Namespace) -> dict[str, str]:
    given = {name: value for name in (*FLAGS, "etcd.endpoints") if (value := getattr(args, name)) is not None}
    for text in args.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidConfig(f"--set {text}: write NAME=VALUE, as in timeouts.lease_ttl_s=4")
        given[name.strip()] = value
    return given


def _run(
    settings: Settings, sources: Mapping[str, config.SettingSource], gpus: host.Gpus, started_s: float, address_why: str
) -> int:
    # Slow imports come after the start of the embedded etcd, to overlap with it.
    notify = Notify.from_environment()
    state_dir = Path(settings.state_dir)
    lock, settings = _own(state_dir), _under_its_name(settings, state_dir)
    lean.start()
    from .base import log as logs

    log = logs.start(settings.log_level, settings.node)
    log.info("daemon.settings", version=elastic.__version__, **_plain(settings, sources))
    from .base.threads import Threads, fail_stop_whatever_fails
    from .etcd.embedded import EmbeddedEtcd

    fail_stop_whatever_fails(log)
    threads, launcher = Threads(log), launch.launcher()
    embedded = None
    endpoints = settings.etcd.endpoints
    if not endpoints:
        cluster_key.ensure_embedded(settings)
        embedded = EmbeddedEtcd(settings, launcher, log)
        endpoints = (embedded.start(),)
        embedded.supervise(threads)
    from .service import Daemon

    secret = cluster_key.load(settings)
    identity = Identity(
        cluster=settings.cluster,
        node=settings.node,
        version=elastic.__version__,
        pid=os.getpid(),
        started_s=started_s,
        endpoints=endpoints,
        embedded=embedded is not None,
        metrics="",
        address=settings.address,
        interface=settings.interface,
        address_why=address_why,
        python=sys.executable,
        key_id=key_id(secret) if secret else "",
        plain_text=trust.in_plain_text(settings.etcd),
    )
    daemon = Daemon(
        settings, _access(settings, endpoints), identity, gpus, lambda: describe(settings, sources), launcher, threads,
        notify, log, secret,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: daemon.stop(signal.Signals(n).name))
    # A closed terminal, or a reload by the service manager: settings are read at start, so there is nothing to do. Not
    # SIG_IGN, which processes started from here would inherit.
    signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        return daemon.run()
    finally:
        notify.stopping()
        if embedded is not None:
            embedded.close(keep=daemon.served)
        daemon.close()
        lock.close()


def _under_its_name(settings: Settings, state_dir: Path) -> Settings:
    """Raises CannotStart."""
    from .base import log as logs

    try:
        name = job_folders.kept_name(state_dir, settings.node)
    except OSError as error:
        raise CannotStart(f"state_dir = {str(state_dir)!r}: {error.strerror}") from error
    if name != settings.node:
        fix = f"elasticctl drain {name} --wait, then restart elasticd"
        log = logs.start(settings.log_level, name)
        log.warning("node.name_kept", name=name, wanted=settings.node, why="agents run here under it", fix=fix)
    return msgspec.structs.replace(settings, node=name)


def _own(state_dir: Path) -> IO[bytes]:
    """Lock the state directory for as long as the file is open. Raises AlreadyRuns, CannotStart."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
        ownership.trusted(state_dir, "state_dir")
        # For this user only: read access suffices to lock a file, and so to keep elasticd from starting.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = open(os.open(state_dir / "lock", flags, 0o600), "a+b", buffering=0)  # noqa: SIM115 - see `_run`
        os.fchmod(lock.fileno(), 0o600)  # also one that was restored from a backup, or made by hand
    except OSError as error:
        raise CannotStart(f"state_dir = {str(state_dir)!r}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        pid = lock.read(32).decode(errors="replace").strip() or "?"
        raise AlreadyRuns(f"another elasticd (process {pid}) already works in {state_dir}") from None
    with contextlib.suppress(OSError):  # a full disk: the lock counts, not the number
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
    return lock


def _access(settings: Settings, endpoints: tuple[str, ...]) -> EtcdAccess:
    etcd = settings.etcd
    password = ""
    if etcd.password_file:
        password = Path(etcd.password_file).read_text().partition("\n")[0].strip()
    files = {name: getattr(etcd, name) for name in ("ca_file", "cert_file", "key_file")}
    return EtcdAccess(endpoints=endpoints, user=etcd.user, password=password, **files)


def _plain(settings: Settings, sources: Mapping[str, config.SettingSource]) -> dict[str, object]:
    given = ", ".join(
        f"{name} ({source})" for name, source in sources.items() if source is not config.SettingSource.DEFAULT
    )
    shown = msgspec.to_builtins(settings)
    shown["notify"] = {name: masked_setting(f"notify.{name}", value) for name, value in shown["notify"].items()}
    return {"settings": shown, "given": given}


def describe(settings: Settings, sources: Mapping[str, config.SettingSource]) -> Config:
    """Every setting with its value, its source and its meaning; and the hierarchy of timeouts."""
    docs = config.explain()

    def value(name: str) -> object:
        return masked_setting(name, msgspec.to_builtins(attrgetter(name)(settings)))

    times = settings.timeouts
    return Config(
        settings=[Setting(name, value(name), source, docs[name]) for name, source in sources.items()],
        hierarchy=[
            Relation(f"timeouts.{a}", getattr(times, a), factor, f"timeouts.{b}", getattr(times, b), why)
            for a, factor, b, why in RELATIONS
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
