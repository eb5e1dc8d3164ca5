"""The parts of a running daemon, assembled: etcd, loop, agents, API, metrics."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.contract.agent_files import EtcdAccess
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.reasons import Code, reason
from elastic.etcd.client import ClusterSigner, Etcd, EtcdError
from elastic.etcd.signing import ending
from elasticd.access.accounts import Accounts, account, group_id
from elasticd.access.audit import Audit
from elasticd.access.authority import Authority, Peer
from elasticd.agents.agents import Agents
from elasticd.agents.cleaner import FIRST_S, Cleaner
from elasticd.agents.etcd_grants import EtcdGrants
from elasticd.agents.run_as import RunAs, groups
from elasticd.api.doctor import Doctor
from elasticd.api.metrics.observations import Requests
from elasticd.api.request import Service
from elasticd.api.views.instant import Identity
from elasticd.base import entry_points
from elasticd.base.command_answers import Config
from elasticd.base.errors import CannotStart, Refused
from elasticd.base.log import Log
from elasticd.base.sd_notify import Notify
from elasticd.base.settings import HttpSettings, Settings
from elasticd.base.threads import Threads
from elasticd.cluster.published_state import PublishedState
from elasticd.machine.gpus import GpuCheck
from elasticd.machine.health import Health
from elasticd.machine.host import Gpus, StateFolder
from elasticd.machine.processes.launch import Launcher
from elasticd.node.asks import AnswerQueue, Asker
from elasticd.node.event_queue import EventQueue, Stop
from elasticd.node.loop import DaemonLoop
from elasticd.node.writer import ClusterWriter
from elasticd.plugins import NodeFacts, Notice

from .api import server as api
from .api.actions import Actions
from .etcd.members import Members
from .machine import doctor, host
from .node import asks, machine_shutdown

if TYPE_CHECKING:
    from elasticd.api.notify.notifier import Notifier

REMOVAL_S = 3600.0
"""How long after its start the daemon looks for the drain of an earlier shutdown, if etcd is away."""


@dataclass(eq=False)
class Daemon:
    """Constructed by `main`; `run` blocks until `stop`. `secret`: the cluster key; None: records are not signed."""

    settings: Settings
    access: EtcdAccess
    identity: Identity
    gpus: Gpus
    describe: Callable[[], Config]
    launcher: Launcher
    threads: Threads
    notify: Notify
    log: Log
    secret: bytes | None = None

    def __post_init__(self) -> None:
        self._actions: Actions | None = None
        self._leaving = False
        self.served = False
        """Whether it has got its sockets and ports."""
        self._stopped_in_order = False
        self._gpus = bool(self.gpus.indices)
        self._event_queue = EventQueue()
        self._published = PublishedState()
        self._requests = Requests()
        self._keys = ClusterKeys(self.settings.cluster)
        signer = ClusterSigner(self._keys.root, self.secret) if self.secret else None
        self._etcd = Etcd(self.access, call_s=self.settings.timeouts.etcd_call_s, signer=signer)
        self._etcd.on_call = self._requests.etcd_called
        self._writer = ClusterWriter(self._etcd, self._keys, self._event_queue, self.log)
        grants = EtcdGrants(Path(self.settings.state_dir), self.access, self.log)
        self._agents = Agents(
            Path(self.settings.state_dir), self.launcher, self.threads, self._event_queue.post, self.log, grants
        )
        self._cleaner = Cleaner(self.settings, self._keys, self._agents.retire, lambda: self._published.now, self.log)
        problem = self.gpus.problem or doctor.blocking(self.settings.interface, self.settings.state_dir) or ""
        gpus = GpuCheck(self.gpus.indices, self.log, self_test=self.settings.gpu_self_test, problem=problem)
        self._health = Health({"state_dir": StateFolder(self.settings.state_dir), "gpus": gpus}, self.log)
        accounts = Accounts(groups(self.settings.run_as))
        for name in groups(self.settings.run_as):
            if group_id(name) is None:
                self.log.warning("run_as.unknown_group", group=name, why="run_as.allow names it: none is allowed by it")
        self.threads.repeat("accounts", accounts.run_one)
        self._run_as = RunAs(self.settings.run_as, account(os.geteuid()), self.launcher.switches_user, accounts)
        self._loop = DaemonLoop(
            self.settings, self.access, self.gpus.indices, self._event_queue, self._writer, self._agents,
            self._published, self.notify, self.log, self._health, self._run_as, signer,
        )  # fmt: skip
        self._notifier = self._make_notifier()

    def run(self) -> int:
        """Serve and run the loop until stopped. Returns the exit code."""
        self._serve()
        self.served = True
        self.threads.repeat("writer", self._writer.run_one)
        self._health.start(self.threads)
        if not self.identity.embedded:
            self.threads.repeat("etcd-members", Members(self._etcd, self._writer.show_members, self.log).look)
        self._etcd.watch(self._keys.root, self._event_queue.show)
        self.threads.repeat("cleaner", self._cleaner.turn, FIRST_S)
        self.threads.start("take-work-again", self._take_work_again)
        if self._notifier:
            self.threads.repeat("notifications", self._notifier.turn)
        stop = self.threads.run("loop", self._loop.run)
        self._stopped_in_order = not stop.code
        (self.log.error if stop.code else self.log.info)("daemon.stopping", why=stop.why, code=stop.code)
        return stop.code

    def stop(self, why: str) -> None:
        """Called from a signal handler."""
        drains = self.settings.shutdown_drain_s and self._actions and host.as_system_service()
        if not drains or self._leaving:
            self._event_queue.post(Stop(why))
            return
        self._leaving = True
        if not self.threads.try_start("shutdown", lambda: self._leave_and_stop(why)):
            self._event_queue.post(Stop(why))

    def _leave_and_stop(self, why: str) -> None:
        if self._actions and machine_shutdown.is_stopping():
            machine_shutdown.leave(
                self.settings.node, self.settings.shutdown_drain_s, self._actions.drain, self._published.wait,
                self.notify.not_yet, self.log,
            )  # fmt: skip
        self._event_queue.post(Stop(why))

    def _take_work_again(self) -> None:
        """Remove the drain of an earlier shutdown of the machine."""
        node = self.settings.node
        snapshot = self._published.wait(lambda s: s.contact.connected, REMOVAL_S)
        if machine_shutdown.ours(snapshot, node) and not self._leaving:
            try:
                self._etcd.txn([], ending(self._keys, self._keys.drain(node)))
                self.log.info("shutdown.drain_removed")
            except EtcdError as error:
                self.log.warning("shutdown.drain_stays", why=str(error), fix=f"elasticctl uncordon {node}")

    def close(self) -> None:
        """Leave the cluster; agents and the embedded etcd continue to run."""
        # The servers end with the process: stopping them first would only cost the time of their polls.
        Path(self.settings.socket).unlink(missing_ok=True)
        self.threads.closed.set()
        self._loop.leave(in_order=self._stopped_in_order)
        self._etcd.close()

    def _serve(self) -> None:
        settings, identity = self.settings, self.identity
        if settings.http.listen:
            holder: list[Callable[[], bytes]] = []

            def exposition() -> bytes:
                if not holder:  # prometheus-client is imported at the first scrape: readiness does not need it
                    from elasticd.api.metrics import metrics

                    holder.append(metrics.exposition(lambda: self._published.now, self.identity, self._requests))
                return holder[0]()

            try:
                server = api.metrics_server(settings.http.listen, self._published, exposition, self.log)
            except CannotStart as error:
                # Another user's elasticd on this machine has the default port. A port that was asked for must be had.
                if settings.http.listen != HttpSettings().listen:
                    raise
                server = api.metrics_server("127.0.0.1:0", self._published, exposition, self.log)
                self.log.warning("http.other_port", why=str(error), url=server.url, fix="set http.listen")
            identity = dataclasses.replace(identity, metrics=server.url)
            self.identity = identity
            self.threads.start("metrics", server.serve)
        if settings.page.listen:
            self._serve_page(identity)
        authority = _authority(settings)
        actions = Actions(
            self._etcd, self._keys, self._published, authority, self._run_as.why_not_now, settings.per_user
        )
        self._actions = actions
        audit = Audit(self._etcd, self._keys, settings.node, self.log)
        self._watch_preemption(actions, audit)
        self._add_health_checks()
        self._cleaner.forget = partial(_forget_old, actions, audit, self.log)
        asker = Asker(self._etcd, settings.cluster, settings.node, self.secret)
        examiner = Doctor(settings, self._etcd, asker, self._gpus, self._health)
        self.threads.start("doctor-start", lambda: examiner.log_findings(self.log))
        service = Service(
            self._published, actions, identity, self._agents.logs, self.describe, self.log, authority, audit, asker,
            examiner, self._cleaner, self._requests, settings.allow_faults,
        )  # fmt: skip
        self._answer_other_nodes(service)
        self.threads.start("api", api.unix_server(settings.socket, settings.socket_group, service).serve)
        self.log.info("api.listening", socket=settings.socket, metrics=identity.metrics)

    def _serve_page(self, identity: Identity) -> None:
        from .api.page import access, server  # not imported by the many daemons without a page

        settings = self.settings
        token = access.TokenFile(settings.page, os.geteuid(), settings.etcd.allow_readable_secrets, self.log)
        source = server.PageSource(self._published, identity, self._agents.logs)
        served = server.page_server(settings.page, token, source, self.log)
        self.threads.start("page", served.serve)
        self.log.info("page.listening", url=served.url, token=bool(token()))

    def _make_notifier(self) -> Notifier | None:
        settings = self.settings
        if not (settings.notify.webhook or settings.notify.command):
            return None
        from elasticd.api.notify import notifier  # not imported by the many daemons without notifications

        return notifier.Notifier(
            settings.notify, settings.cluster, settings.node, notifier.channels(settings.notify), self._published,
            self.log, self.threads.closed,
        )  # fmt: skip

    def _watch_preemption(self, actions: Actions, audit: Audit) -> None:
        """The node is drained when its cloud announces that the machine will be taken away."""
        settings = self.settings
        if settings.preemption == "none":
            return
        from .machine import preemption

        announced = entry_points.made("preemption", settings.preemption, self.log, settings.preemption_url)
        own = _own_peer()

        def drain(notice: Notice) -> bool:
            try:
                actions.drain(settings.node, reason(Code.TAKEN_AWAY, notice.reason), notice.deadline_s)
            except Refused as error:  # etcd is unavailable, or this node not registered yet: the next look repeats it
                self.log.warning("preemption.not_drained", error=str(error))
                return False
            audit.done(own, "node.drain", node=settings.node, text=notice.reason)
            return True

        watch = preemption.PreemptionWatch(announced, drain, self.log)
        self.threads.repeat("preemption", watch.look, preemption.ASK_EVERY_S)

    def _add_health_checks(self) -> None:
        settings = self.settings
        facts = NodeFacts(
            node=settings.node, address=settings.address, interface=settings.interface, state_dir=settings.state_dir,
            gpus=self.gpus.indices,
        )  # fmt: skip
        for name in dict.fromkeys(settings.health_checks):
            log = self.log.bind(check=name)
            self._health.add(name, entry_points.made("health_checks", name, self.log, facts, log))

    def _answer_other_nodes(self, service: Service) -> None:
        settings, answer = self.settings, partial(api.answer_node, service)
        first_time = self._loop.stamps.first_time
        answers = AnswerQueue(self._etcd, settings.cluster, settings.node, answer, self.log, first_time, self.secret)
        answers.start()
        for number in range(asks.WORKERS):
            self.threads.repeat(f"asks-{number}", answers.run_one)


def _own_peer() -> Peer:
    own = account(os.geteuid())
    return Peer(own.uid, own.gid, own.user, pid=os.getpid())


def _forget_old(actions: Actions, audit: Audit, log: Log, jobs: Sequence[str]) -> None:
    """What `retention` does not keep in etcd. Each node's daemon tries it: a job that is gone is passed over."""
    try:
        forgotten = actions.forget_each(jobs, _own_peer())
    except Refused as error:  # etcd is unavailable: in an hour again
        log.warning("retention.not_forgotten", why=str(error))
    else:
        if forgotten:
            audit.done(_own_peer(), "job.forgotten", text=f"{len(forgotten)} jobs that are over, by retention")


def _authority(settings: Settings) -> Authority:
    """Raises CannotStart if there is no group `admin_group`."""
    gid = group_id(settings.admin_group) if settings.admin_group else None
    if settings.admin_group and gid is None:
        raise CannotStart(f"admin_group = {settings.admin_group!r}: there is no such group on this machine")
    return Authority(os.geteuid(), gid, settings.admin_group)
