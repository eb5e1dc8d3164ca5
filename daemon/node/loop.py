"""The daemon's main loop: each turn compares the agents that should run here with those that do, and acts on the
difference.

Level-triggered: a turn uses only the newest view of etcd and the agents' state, not the events that led to them. A lost
event costs at most the second until the next turn.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import elastic
from elastic.contract.agent_files import AgentConfig, AgentOrders, EtcdAccess
from elastic.contract.job.spec import Limits
from elastic.contract.keys import ClusterKeys
from elastic.contract.records.job_records import Phase
from elastic.contract.records.node_records import AgentRow, KnownNode, NodeRecord, WorkerRow
from elastic.contract.records.reasons import Reason, Text
from elastic.etcd.client import ClusterSigner, Lease, View
from elastic.etcd.stamps import Stamps
from elasticd.agents.agents import Agents, Gone
from elasticd.agents.run_as import NotAllowed, RunAs
from elasticd.base.config import port_range
from elasticd.base.log import Log
from elasticd.base.sd_notify import Notify
from elasticd.base.settings import Settings
from elasticd.cluster import reconcile
from elasticd.cluster.assignment import Assignment, plan
from elasticd.cluster.cluster import Cluster, ClusterReader, Job
from elasticd.cluster.published_state import Contact, LocalAgent, PublishedState, Snapshot
from elasticd.diagnosis.timeline import Timeline
from elasticd.machine.health import Health
from elasticd.machine.processes import launch

from .chores import Chores
from .event_queue import Event, EventQueue, NodeLeaseLost, NodeRegistered, Stop, Updated, Written
from .older_records import SIGN_S, OlderRecords
from .stamp_file import SAVE_S, StampFile
from .writer import KEY_MISSING, ClusterWriter

TICK_S = 1.0
"""Longest time between two turns."""
WORKERS_S = 5.0
"""Minimum interval between changes to the workers in this node's record."""
CONTACT_S = 5.0
"""Minimum interval between log lines that give different reasons why etcd cannot be reached."""
RETRY_S = 1.0
"""Pause before another attempt to register, to write a change, or to write over what a job's user has written."""


@dataclass(eq=False)
class DaemonLoop:
    """`signer`: None: records are not signed."""

    settings: Settings
    access: EtcdAccess
    gpus: tuple[int, ...]
    event_queue: EventQueue
    writer: ClusterWriter
    agents: Agents
    published: PublishedState
    notify: Notify
    log: Log
    health: Health
    run_as: RunAs
    signer: ClusterSigner | None = None

    def __post_init__(self) -> None:
        self._refuses: dict[str, Text | None] = {}
        """Job that does not run here yet -> why it will not; '' it will, None: not known yet."""
        self._refuses_anonymous = os.geteuid() == 0 and not self.settings.etcd.insecure
        self._chores = Chores(self.settings, self.writer)
        self._keys = ClusterKeys(self.settings.cluster)
        self._reader = ClusterReader(self._keys, self.published.told_to_stop)
        self.stamps = self.signer.stamps if self.signer else Stamps(self._keys)
        self._stamp_file = None
        if self.signer:  # it goes on where the daemon before it on this node has ended
            self._stamp_file = StampFile(Path(self.settings.state_dir), self.stamps, self.log)
            self.signer.follow(self._keys.node(self.settings.node), SAVE_S)
        self._older = OlderRecords(self._keys, self.stamps, self.settings.node, self.writer)
        self._timeline = Timeline(self._keys, self.settings.node)
        self._started_wall_s = time.time()
        self._cluster = Cluster()
        self._contact = Contact()
        self._plan = Assignment()
        self._lease: Lease | None = None
        self._registered: NodeRecord | None = None
        """Our record as stored in etcd."""
        self._retry_s = 0.0
        self._workers_due_s = 0.0
        self._worker_rows: tuple[WorkerRow, ...] = ()
        self._agent_rows: tuple[AgentRow, ...] = ()
        self._ready = False
        self._aside, self._deserted, self._drained, self._overdue = (reconcile.Since() for _ in range(4))
        self._silent, self._sign_due_s, self._overrule_s = reconcile.Silent(), 0.0, 0.0
        self._said: dict[str, str] = {}
        self._contact_said = ("", 0.0)
        """Why etcd could not be reached, as last logged, and the time before which no other reason is logged."""
        self._turn = 0

    def run(self) -> Stop:
        self.agents.find()
        tick_s = min(TICK_S, self.notify.watchdog_s / 3 or TICK_S)
        while True:
            now_s = time.monotonic()
            due_s = self.agents.next_start_s() - now_s
            events, view = self.event_queue.take(min(tick_s, due_s) if due_s > 0 else tick_s)
            for event in events:
                if isinstance(event, Stop):
                    return event
                self._hear(event)
            if view is not None:
                self._look(view)
            self._work(time.monotonic())
            self.notify.turned()

    def leave(self, *, in_order: bool) -> None:
        """Remove our node record: this node accepts no new work. Agents stay. `in_order`: the inventory says that this
        elasticd was stopped."""
        if self._lease is not None:
            if in_order and self._registered is not None and self._contact.connected:
                self.writer.left(KnownNode.of(self._registered, time.time(), left=True))
            self._lease.close()
        if self._stamp_file is not None:
            self._stamp_file.save(all_of_it=True)

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, event: Event) -> None:
        match event:
            case Gone():
                self.agents.gone(event)
            case NodeRegistered(lease, record):
                self._lease, self._registered = lease, record
                self._sign_due_s = time.monotonic() + SIGN_S
                self.log.info("node.registered", lease=f"{lease.id:x}", address=record.address, slots=record.slots)
            case Updated(lease_id, record):
                if self._lease is not None and self._lease.id == lease_id:
                    self._registered = record
                    self._sign_due_s = time.monotonic() + SIGN_S
            case NodeLeaseLost(lease_id, why):
                if self._lease is not None and self._lease.id == lease_id:
                    self._lease = self._registered = None
                    self.log.warning("node.lease_lost", why=why)
            case Written(name, error):
                self.writer.written(event)
                if error:
                    self._retry_s = time.monotonic() + RETRY_S
                    self._say(f"write {name}", error)
            case Stop():
                raise AssertionError("the loop ends at a Stop")

    def _look(self, view: View) -> None:
        if view.revision or view.connected:  # an empty view before the first contact carries no information
            view = self._older.look(view, time.monotonic())
            self._cluster = self._reader.read(view.kvs, view.revision, view.refused, self.signer is not None)
            self._timeline.look(self._cluster, time.time())
        self._say_contact(view)
        self._timeline.contact(view.connected, view.error, time.time())
        for name in list(self.agents.trouble):
            job = self._cluster.jobs.get(name)
            if job is None or job.over:
                self.agents.forget(name)
        self._contact = Contact(view.connected, view.as_of_s, view.error)
        unusable = {f"record {key}": why for key, why in self._cluster.foreign.items()}
        unusable |= {f"record {key}": f"refused: {why}" for key, why in self._cluster.refused.items()}
        self._said = {a: what for a, what in self._said.items() if not a.startswith("record ") or a in unusable}
        for about, why in unusable.items():
            self._say(about, why)

    def _say_contact(self, seen: View | Contact) -> None:
        """Log that contact with etcd is gained or lost, including a first failure after the start."""
        now_s, revision = time.monotonic(), self._cluster.revision
        if seen.connected:
            if not self._contact.connected:
                self.log.info("etcd.contact", connected=True, error="", revision=revision)
                self._contact_said = ("", 0.0)
            return
        (contact, until_s), error = self._contact_said, seen.error or "unknown"
        if not contact or (error != contact and now_s >= until_s):
            self.log.warning("etcd.contact", connected=False, error=error, revision=revision)
            self._contact_said = error, now_s + CONTACT_S

    def _say(self, about: str, what: str) -> None:
        """Log a problem when it is new or has changed, not each time it occurs."""
        if self._said.get(about) != what:
            self._said[about] = what
            self.log.warning("daemon.trouble", about=about, what=what)

    # ── a turn ──────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, now_s: float) -> None:
        self._turn += 1
        if self._stamp_file is not None:
            self._stamp_file.save()
        self.agents.refresh()
        stays_out = self._stays_out()
        node = self.settings.node
        running = {job: agent.config.slots for job, agent in self.agents.running.items()}
        silent = self._silent.look(self._plan.places, self._cluster, running, node, now_s)
        self._plan = plan(self._cluster, running, node, time.time(), silent)
        self._refuses = {
            job.name: self.run_as.why_not(job.spec)
            for job in self._cluster.by_age()
            if job.spec and not job.over and job.name not in running
        }
        if self._contact_said[0]:
            self._say_contact(self._contact)  # a view comes once for each reason, perhaps too early to be logged
        self._chores.look_at_certificates(now_s)
        if self._contact.connected:
            self._older.repair(self._cluster, now_s)
            self._chores.do(self._cluster, self._registered, now_s, time.time())
            self._timeline.members(self.writer.members, time.time())
            self._timeline.send(self.writer.put_events)
            if old := self._timeline.too_old(self._cluster):
                self.writer.delete("old events", old)
            if not stays_out:
                self._keep_registered(now_s)
                if self._trusted():
                    self._start_agents(now_s)
            if not self.writer.ignores_signatures:
                self._write_states()
        self._order_agents()
        self._end_overdue(now_s)
        self._publish(stays_out)
        self._tell_systemd()

    def _stays_out(self) -> str:
        """Why this node does not register: daemons or agents of another protocol are alive. Once registered, a node
        ignores such records; records of a job without agents do not keep a node out."""
        if self.writer.ignores_signatures:
            return KEY_MISSING
        if self._lease is not None:
            return ""
        alive = (key for key in self._cluster.foreign if self._keys.is_leased(key))
        key = next(alive, None)
        return f"{key}: {self._cluster.foreign[key]}" if key else ""

    def _trusted(self) -> bool:
        """Whether jobs in etcd may be run here: as root, only after a check that etcd refuses anonymous writes."""
        if self.writer.anonymous is None:
            self.writer.check_anonymous(refuse=self._refuses_anonymous)
        return not (self._refuses_anonymous and self.writer.anonymous is not False)

    def _keep_registered(self, now_s: float) -> None:
        record = self._record()
        times = self.settings.timeouts
        there = self._cluster.nodes.get(self.settings.node)
        if self._lease is None:
            if now_s >= self._retry_s:
                self.writer.register(record, times.lease_ttl_s, times.lease_renew_s)
        elif record != self._registered or now_s >= self._sign_due_s:
            if now_s >= self._retry_s:
                self.writer.update(record, self._lease.id)
        elif (there is None or there.record != record) and self._turn % 5 == 0:
            self.writer.update(record, self._lease.id)  # deleted, or another one was written; the lease is still alive

    def _record(self) -> NodeRecord:
        settings = self.settings
        drain = self._cluster.drains.get(settings.node)
        assert isinstance(settings.slots, int)
        return NodeRecord(
            node=settings.node,
            hostname=os.uname().nodename,
            address=settings.address,
            slots=settings.slots,
            gpus=len(self.gpus),
            version=elastic.__version__,
            pid=os.getpid(),
            started_wall_s=self._started_wall_s,
            draining=drain.reason if drain else self._faulty(),
            healthy=not (ill := self.health.reason),
            reason=ill or None,
            workers=self._workers(),
            agents=self._agent_rows,
            jobs=tuple(sorted(self.agents.running)),
            older=reconcile.older_agents({j: a.status for j, a in self.agents.running.items()}, elastic.__version__),
            refuses={job: why for job, why in self._refuses.items() if why},
        )

    def _workers(self) -> tuple[WorkerRow, ...]:
        """Updated rarely: each change is a write to etcd that every daemon of the cluster receives."""
        now_s = time.monotonic()
        if now_s >= self._workers_due_s:
            before = self._worker_rows, self._agent_rows
            running = self.agents.running
            self._worker_rows = reconcile.worker_rows({j: a.status for j, a in running.items()})
            clock_s = time.time() - now_s
            self._agent_rows = reconcile.agent_rows({j: (a.status, a.since_s + clock_s) for j, a in running.items()})
            if (self._worker_rows, self._agent_rows) != before:
                self._workers_due_s = now_s + WORKERS_S
        return self._worker_rows

    def _start_agents(self, now_s: float) -> None:
        me = self._cluster.nodes.get(self.settings.node)
        for job, slots in self._plan.of(self.settings.node).items():
            spec = self._cluster.jobs[job].spec
            leaves = job in self._plan.leaving(self.settings.node) or bool(me and me.drain)
            if spec is None or leaves or self._refuses.get(job) != "" or not self.agents.may_start(job, now_s):
                continue
            try:
                user = self.run_as.account(spec)
            except NotAllowed as refused:  # only just: the next turn says so
                self._say(f"job {job}", f"not started: {refused}")
                continue
            config = AgentConfig(
                cluster=self.settings.cluster,
                node=self.settings.node,
                job=job,
                address=self.settings.address,
                slots=slots,
                gpus=reconcile.gpus_for(
                    self.gpus, slots, self._cluster, {j: a.config.gpus for j, a in self.agents.running.items()}
                ),
                interface=self.settings.interface,
                ports=port_range(self.settings.ports),
                etcd=self.access,
                job_key=self.signer.job_key(job, spec.submission) if self.signer else None,
                timeouts=self.settings.timeouts,
                agent_dir=str(self.agents.dir(job)),
                logs_dir=str(self.agents.dir(job).with_name("logs")),
                submission=spec.submission,
            )
            if spec.spec.limits != Limits() and not self.run_as.switches:
                self._say(f"limits of {job}", "they do not hold on this node: elasticd is no service of systemd here")
            self.agents.start(config, spec.spec.python, user, launch.of_agent(spec.spec, user))

    def _write_states(self) -> None:
        if overrules := (now_s := time.monotonic()) >= self._overrule_s:
            self._overrule_s = now_s + RETRY_S
        for job in (job for job in self._cluster.by_age() if overrules or not job.stop_is_due):
            trouble = self.agents.trouble.get(job.name)
            failed = trouble.why if trouble and trouble.failures >= reconcile.FAILED_STARTS else ""
            here = job.name in self.agents.running
            no_room = self._plan.waiting.get(job.name, "")
            deserted_s = self._deserted.lasts_s(job.name, bool(no_room) and not job.members, time.monotonic())
            state = reconcile.job_state(
                job, self._cluster, self.settings.node, here, failed, time.time(), self._set_aside_s(job), no_room,
                deserted_s, lacking=trouble is not None and trouble.short,
            )  # fmt: skip
            if state is not None:
                change = {"phase": state.phase, "reason": state.reason, "excluded_nodes": state.excluded_nodes}
                self.log.info("job.state", job=job.name, **change)
                self.writer.put_state(job, state)

    def _set_aside_s(self, job: Job) -> float:
        """How long this node has been excluded for `job`, as seen by this daemon; 0: it is not."""
        excluded = self.settings.node in job.state.excluded_nodes
        if not excluded and job.name in self._aside:
            self.agents.forget(job.name)  # failures before the exclusion no longer count
        return self._aside.lasts_s(job.name, excluded, time.monotonic())

    def _order_agents(self) -> None:
        drain = self._cluster.drains.get(self.settings.node)
        leaving = self._plan.leaving(self.settings.node)
        for name in list(self.agents.running):
            job = self._cluster.jobs.get(name)
            # Wiped from etcd, or not seen yet: keep its orders. Over: the agent ends by itself.
            if job is None or job.spec is None or job.over:
                continue
            orders = AgentOrders(
                draining=drain.reason if drain else self._faulty(name) or leaving.get(name),
                drain_deadline_s=drain.deadline_s if drain else 0.0,
                checkpoint=job.asked.checkpoint,
                sample_step=job.asked.sample_step,
            )
            self.agents.order(name, orders)

    def _faulty(self, job: str = "") -> Reason | None:
        """Why the node, or a job that uses GPUs, should leave; None: it need not."""
        uses = not job or bool(self.agents.running[job].config.gpus)
        return self.health.leaves(gpus=uses)

    def _end_overdue(self, now_s: float) -> None:
        """Agents end by themselves when their job is over or stopping, or at the deadline of a drain; those that do not
        are signalled."""
        drain = self._cluster.drains.get(self.settings.node)
        drained_s = self._drained.lasts_s(str(drain), drain is not None, now_s)
        late_s = drained_s - drain.deadline_s if drain and drain.deadline_s else 0.0
        for name in list(self.agents.running):
            job = self._cluster.jobs.get(name)
            ends = job is not None and (job.over or job.state.phase is Phase.STOPPING)
            status = self.agents.running[name].status
            earlier = job is not None and reconcile.of_an_earlier_job(job, status)
            ends = job is not None and (ends or earlier or late_s > 0 or self._of_another_user(job))
            overdue_s = self._overdue.lasts_s(name, ends, now_s)
            if job is None or not ends:
                continue
            signalled = self.agents.running[name].ending_s is not None
            number = reconcile.signal_for(job, overdue_s, signalled, status, late_s)
            if number is not None:
                self.agents.signal(name, number)
                self.agents.running[name].ending_s = now_s

    def _of_another_user(self, job: Job) -> bool:
        """Whether the agent here is of an earlier job of this name, which another user had."""
        owner = self.agents.running[job.name].owner
        uid = owner[0] if owner else os.geteuid()
        return job.spec is not None and uid != (os.geteuid() if job.spec.uid is None else job.spec.uid)

    def _publish(self, stays_out: str) -> None:
        agents = {
            job: LocalAgent(job, a.pid, a.config.slots, a.status, a.orders.draining)
            for job, a in self.agents.running.items()
        }
        snapshot = Snapshot(
            cluster=self._cluster,
            contact=replace(
                self._contact,
                version=self.writer.version,
                alarms=self.writer.alarms,
                members=self.writer.members,
                certificates=self._chores.certificates,
                anonymous=bool(self.writer.anonymous),
            ),
            plan=self._plan,
            agents=agents,
            trouble=self.agents.why_none(self._plan.of(self.settings.node)),
            registered=self._lease is not None,
            stays_out=stays_out,
            turn=self._turn,
        )
        self.published.publish(snapshot)

    def _tell_systemd(self) -> None:
        if not self._ready:
            # Not before our own record is visible: a query right after the start must find this node.
            if self._contact.connected and self._lease is not None and self.settings.node in self._cluster.nodes:
                self._ready = True
                self.notify.ready()
                self.log.info("daemon.ready", turn=self._turn)
            else:
                self.notify.not_yet(30.0)
        agents = len(self.agents.running)
        why = f": {self._contact.error.splitlines()[0]}" if self._contact.error else ""
        etcd = "" if self._contact.connected else f"; etcd cannot be reached{why}"
        self.notify.status(f"{agents} {'agent' if agents == 1 else 'agents'} here{etcd}")
