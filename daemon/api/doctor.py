"""The checks of this node, of etcd and of all other nodes, compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

import elastic
from elastic.contract.keys import ClusterKeys
from elastic.etcd.client import Etcd, EtcdError
from elasticd.base.answers import Diagnosis, Finding, Json
from elasticd.base.config import port_range
from elasticd.base.log import Log
from elasticd.base.settings import Settings
from elasticd.cluster.cluster import Cluster
from elasticd.cluster.published_state import Snapshot
from elasticd.diagnosis import why
from elasticd.etcd.versions import VersionSupport, judge
from elasticd.machine import addresses, doctor, expiring, reach
from elasticd.machine.doctor import ERROR, WARNING
from elasticd.machine.health import Health
from elasticd.node.asks import CLOCKS, Asker, User, ask_each

MEMBER_S = 3.0

NO_ETCD = 503


def unanswered(node: str, answer: Json) -> Finding:
    """Of a node that has answered with an error. Where etcd is what fails, that node may be well."""
    clocks = f"synchronise the clocks of this node and of {node} by NTP: timedatectl on both tells which one is wrong"
    by_status = {CLOCKS: ("clock", clocks), NO_ETCD: ("node", "first what is said of etcd; then ask again")}
    check, fix = by_status.get(answer.get("status", 0), ("node", f"on {node}: systemctl status elasticd"))
    return Finding(check=check, level=ERROR, node=node, text=str(answer["error"]), fix=fix)


def known_faults(versions: Sequence[str]) -> Iterator[Finding]:
    """Of etcd. `versions`: of each member; empty: not known."""
    for version in sorted({*versions} - {""}):
        if (verdict := judge(version, len(versions))).support is not VersionSupport.SOUND:
            fix = f"take etcd {verdict.take} or newer" if verdict.take else "take a supported version"
            yield Finding(check="etcd", level=WARNING, text=verdict.text, fix=fix)


def without_daemon(cluster: Cluster) -> Iterator[Finding]:
    """Nodes that have agents of jobs and no elasticd."""
    jobs: dict[str, list[str]] = {}
    for job in cluster.jobs.values():
        for node in () if job.over else job.members.keys() & cluster.known.keys() - cluster.nodes.keys():
            jobs.setdefault(node, []).append(job.name)
    for node, names in sorted(jobs.items()):
        yield Finding(
            check="node", level=WARNING, node=node,
            text=f"no elasticd runs there; its agents of {', '.join(sorted(names))} go on",
            fix=f"start it on {node} (systemctl start elasticd); its log says why it ended",
        )  # fmt: skip


def absent(cluster: Cluster, wall_s: float) -> Iterator[Finding]:
    """Nodes of the inventory that have neither an elasticd nor agents."""
    at_work = {node for job in cluster.jobs.values() if not job.over for node in job.members}
    for node in cluster.absent:
        if node not in at_work:
            state, reason = why.absence(cluster, node, wall_s)
            yield Finding(
                check="node", level=ERROR if state == "lost" else WARNING, node=node, text=f"{state} {reason}",
                fix=f"start the machine and its elasticd, or: elasticctl nodes forget {node}",
            )  # fmt: skip


def older_agents(cluster: Cluster) -> Iterator[Finding]:
    """Agents that still run what was installed before an upgrade."""
    for name, node in sorted(cluster.nodes.items()):
        if older := node.record.older:
            agents = ", ".join(f"{job} ({version})" for job, version in older.items())
            yield Finding(
                check="versions", level=WARNING, node=name,
                text=f"agents of another elasticd than the node's {node.record.version}: {agents}",
                fix=f"elasticctl drain {name} --wait, then elasticctl uncordon {name}",
            )  # fmt: skip


class Doctor:
    """Measures this node, and asks the others to do the same. Used in the threads of requests."""

    def __init__(self, settings: Settings, etcd: Etcd, asker: Asker, gpus: bool, health: Health) -> None:
        self._settings, self._etcd, self._asker, self._gpus, self._health = settings, etcd, asker, gpus, health
        self._key = ClusterKeys(settings.cluster).root  # etcd's role for elasticd covers this cluster's keys only

    def here(self) -> list[Finding]:
        """Findings of this machine; nothing is asked of etcd or other nodes."""
        settings = self._settings
        findings = doctor.local(
            address=settings.address, interface=settings.interface, state_dir=settings.state_dir,
            secrets=(settings.etcd.password_file, settings.etcd.key_file, settings.page.token_file),
            gpus=self._gpus,
            alone=addresses.only_loopback(settings),
        )  # fmt: skip
        findings += expiring.findings(expiring.look(settings), time.time())
        return [msgspec.structs.replace(finding, node=settings.node) for finding in findings]

    def _checked(self) -> Iterator[Finding]:
        """By the health checks, whose log says it, too."""
        for finding in self._health.findings():
            yield msgspec.structs.replace(finding, node=self._settings.node)

    def log_findings(self, log: Log) -> None:
        """At the daemon's start: warnings and errors of this machine, with their fixes."""
        for finding in self.here():
            if finding.level != doctor.OK:
                say = log.error if finding.level == ERROR else log.warning
                say("doctor.finding", check=finding.check, text=finding.text, fix=finding.fix)

    def answer(self, connect: str, snapshot: Snapshot) -> Json:
        """What another node's doctor asks of this one. `connect`: host:port of a listener there."""
        unreached, mbit_s = reach.try_it(connect, {n.record.address for n in snapshot.cluster.nodes.values()})
        return {
            "node": self._settings.node,
            "findings": [*self.here(), *self._checked(), *self._latency()],
            "versions": versions(),
            "unreached": unreached,
            "mbit_s": mbit_s,
            "wall_s": time.time(),
        }

    def whole(self, snapshot: Snapshot, by: User) -> Diagnosis:
        me = self._settings.node
        findings = [*self.here(), *self._checked(), *self._latency(), *self._members()]
        findings += without_daemon(snapshot.cluster)
        findings += [*absent(snapshot.cluster, time.time()), *older_agents(snapshot.cluster)]
        others = sorted(snapshot.cluster.nodes.keys() - {me})
        with reach.listener(self._settings.address, port_range(self._settings.ports)) as listening:
            began_s = time.time()
            query = {"connect": listening}
            answers = ask_each(self._asker, others, "/v1/doctor/local", query, by)
            ended_s = time.time()
        facts = {me: versions()}
        clocks, unreached, rates = {}, dict[str, str](), dict[str, float]()
        for node, answer in answers.items():
            if "error" in answer:
                findings.append(unanswered(node, answer))
                continue
            findings += [msgspec.convert(row, Finding) for row in answer["findings"]]
            facts[node] = answer["versions"]
            clocks[node] = answer["wall_s"] - (began_s + ended_s) / 2, (ended_s - began_s) / 2
            unreached[node] = answer["unreached"]
            if answer["mbit_s"] is not None:
                rates[node] = answer["mbit_s"]
        findings += reach.judge(me, listening, unreached, rates)
        findings += [*doctor.compare(facts), *doctor.judge_clocks(clocks)]
        return Diagnosis(node=me, worst=doctor.worst(findings), versions=facts, findings=findings)

    def _latency(self) -> Iterator[Finding]:
        """How long a read confirmed by a quorum takes, and a new connection with TLS and login."""
        me, call_s = self._settings.node, self._settings.timeouts.etcd_call_s
        try:
            took_s = doctor.median_s(lambda: self._etcd.get(self._key))
            fix = "etcd needs a quick disk and network of its own"
            yield doctor.judge_latency("a read", took_s, call_s, fix, me)
            fresh = Etcd(self._etcd.access, call_s=call_s)
            try:
                took_s = doctor.median_s(lambda: fresh.get(self._key), 1)
            finally:
                fresh.close()
            fix = "client certificates in place of a password: no bcrypt at each login"
            yield doctor.judge_latency("a new connection with login", took_s, call_s, fix, me)
        except EtcdError as error:
            yield Finding(check="etcd", level=ERROR, node=me, text=f"etcd does not answer: {error}",
                          fix="see [etcd] in the settings, and etcd's own log")  # fmt: skip

    def _members(self) -> Iterator[Finding]:
        members = self._etcd.members(MEMBER_S)
        yield from doctor.judge_members([(m.endpoint, m.ok, m.version, m.error) for m in members])
        yield from known_faults([member.version for member in members])


def versions() -> dict[str, str]:
    return {**doctor.versions(), "elasticd": elastic.__version__}
