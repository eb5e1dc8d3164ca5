"""What the tables and lists of the screen and of the page say of a node, a job, a rank and an incident, by name. Pure.

elasticctl imports this: it needs no record, and nothing that is slow to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from elasticd.base import phrases
from elasticd.base.answers import Checkpoint, Incident, InMemorySnapshot, Job, JobDetail, Verdict, WorkerError
from elasticd.diagnosis import goodput, step_time

OVER = ("succeeded", "failed", "stopped")
LIVE = ("running", "stopping")
"""Phases in which a job makes steps; in any other its rate is that of its last steps."""

Facts = list[tuple[str, str]]
"""(name, value); a value that is empty or '-' is not shown."""


class Column(msgspec.Struct, frozen=True):
    title: str
    cell: Callable[[Any], object]
    """Of a row."""
    spare: int = 0
    """Order in which columns are left out for lack of room: the highest first; 0: never."""
    right: bool = False
    flex: bool = False
    """Sentences: folded at words. Other columns stay on one line if possible."""
    state: bool = False
    """A word that is shown in its colour."""


NODES = (
    Column("node", lambda row: row.node),
    Column("state", lambda row: row.state, state=True),
    Column("slots", lambda row: f"{row.slots_used}{'' if row.slots is None else f'/{row.slots}'}", right=True),
    Column("gpus", lambda row: number(row.gpus), 3, right=True),
    Column("address", lambda row: row.address, 2),
    Column("jobs", lambda row: ", ".join(row.jobs), 1, flex=True),
    Column("why", lambda row: row.why, flex=True),
)

JOBS = (
    Column("job", lambda row: row.job),
    Column("phase", lambda row: row.phase, state=True),
    Column("gen", lambda row: row.generation or "-", 6, right=True),
    Column("world", lambda row: row.world_size or "-", 3, right=True),
    Column("nodes", lambda row: row.nodes or "-" if row.phase in OVER else nodes(row), 2, True),
    Column("step", lambda row: steps(row.managed, row.step), right=True),
    Column("step/s", lambda row: number(row.steps_per_s if row.phase in LIVE else None, ".1f"), 4, right=True),
    Column("loss", lambda row: number(row.loss, ".4g"), 1, right=True),
    Column("checkpoint", lambda row: _checkpoint(row.checkpoint), 5, right=True),
    Column("restarts", lambda row: row.restarts, 7, right=True),
    Column("last incident", lambda row: incident_short(row.last_incident), 8),
)

INCIDENTS = (
    Column("when", lambda row: clock(row.wall_s), 1),
    Column("job", lambda row: row.job),
    Column("gen", lambda row: row.generation, 7, right=True),
    Column("class", lambda row: row.verdict.cls),
    Column("kind", lambda row: row.kind, 6),
    Column("node", lambda row: row.node, 2),
    Column("ranks", lambda row: ", ".join(map(str, row.ranks)), 3, flex=True),
    Column("took", lambda row: seconds(row.took_s), 2, right=True),
    Column("lost", lambda row: "-" if row.open else row.lost, right=True),
    Column("from", lambda row: row.restored_from, 5),
    Column("world", lambda row: f"{row.world_size_before} → {row.world_size_after or ('-' if row.open else 0)}", 4),
    Column("what happened", lambda row: "person needed: " * row.verdict.person + row.verdict.cause, flex=True),
)


def ranks(managed: bool | None) -> dict[str, Column]:
    """Title -> column. `managed`: whether the script commits steps."""
    columns = (
        Column("rank", lambda row: row.rank if row.rank >= 0 else "-", right=True),
        Column("node", lambda row: row.node),
        Column("slot", lambda row: row.slot, 3, right=True),
        Column("pid", lambda row: row.pid or "-", 4, right=True),
        Column("phase", lambda row: row.phase or "-"),
        Column("step", lambda row: steps(managed, row.step), right=True),
        Column("behind", lambda row: number(row.behind), 2, right=True),
        Column("worker", lambda row: number(row.incarnation), 3, right=True),
        Column("step time", lambda row: number(row.step_s * 1000 if row.step_s else None, ".0f", " ms"), 1, right=True),
        Column("memory", lambda row: number(row.rss_mb, ".0f", " MB"), 1, right=True),
        Column("goodput", lambda row: share(row.time.goodput if row.time else None), 2, right=True),
        Column("as of", lambda row: ago(row.age_s) if row.age_s else "-" if row.step is None else "now", 3, right=True),
    )
    return {column.title: column for column in columns}


_MANNER = {
    True: "managed: it has called elastic.run, and keeps its processes over failures",
    False: "plain so far: it has not called elastic.run, and until it does it is started anew after each failure",
    None: "",
}
_MANNER_OVER = {True: "managed: it has called elastic.run", False: "plain: it has not called elastic.run", None: ""}


def nodes(job: Job) -> str:
    """'2 of 1:2', with the spare ones that it wants: '3 of 2 + 1 spare'."""
    return f"{job.members} of {job.nodes}" + (f" + {job.spare_nodes} spare" if job.spare_nodes else "")


def job_facts(job: JobDetail) -> Facts:
    spec = job.spec or {}
    runs = spec.get("script") or spec.get("program") or f"-m {spec.get('module', '?')}"
    generation = f"{job.generation}, world {job.world_size}: {job.why_generation}".rstrip(": ")
    rate = f", {job.steps_per_s:.2f} a second" if job.steps_per_s and job.phase in LIVE else ""
    logged = {**job.logged, **job.logged_not_finite}
    owner = f" for {job.owner}" if job.owner not in ("", job.submitted_by) else ""
    return [
        ("why", job.why),
        ("runs", " ".join([runs, *spec.get("args", ())])),
        ("script", (_MANNER_OVER if job.phase in OVER else _MANNER)[job.managed] if job.generation else ""),
        ("submitted", f"{clock(job.submitted_wall_s)} by {job.submitted_by}{owner}" if spec else "unknown"),
        ("nodes", nodes(job)),
        ("generation", generation if job.generation else "none yet"),
        ("step", f"{steps(job.managed, job.step)}{rate}"),
        ("loss", number(job.loss, ".6g")),
        ("logged", ", ".join(f"{name} {v if isinstance(v, str) else f'{v:.6g}'}" for name, v in logged.items())),
        ("step time", step_time.text(job.step_time)),
        ("goodput", goodput.text(job.goodput) or (goodput.UNKNOWN if job.managed is False else "")),
        ("rank time", goodput.summed_text(job.rank_time, job.world_size)),
        ("checkpoint", _checkpoint_long(job.checkpoint)),
        ("resumed", f"from step {job.resumed.step}: {job.resumed.source}" if job.resumed else ""),
        ("snapshot", "" if job.phase in OVER else _snapshot(job.snapshot)),
        ("restarts", f"{job.restarts}, {job.failures_in_window} within the window"),
        ("excluded", ", ".join(job.excluded_nodes)),
    ]


def verdict_facts(verdict: Verdict, lost: str) -> Facts:
    unit, spent_s = ("GPU", verdict.cost.gpu_s) if verdict.cost.gpu_s is not None else ("rank", verdict.cost.rank_s)
    again = "an unknown number of steps" if lost == "unknown" else lost
    return [
        *(("evidence", f"{each.line}  ({each.source})") for each in verdict.evidence),
        *(("followed", text) for text in verdict.followed),
        ("done", verdict.done),
        ("waits for", verdict.held_by),
        ("cost", f"{again} to repeat, {'unknown' if spent_s is None else f'{spent_s:.1f}'} {unit}-seconds"),
        ("person", "needed" if verdict.person else "not needed"),
        ("fix", verdict.fix),
    ]


def failed_first(error: WorkerError) -> str:
    """'rank 1 on a failed first at step 39'; before its first generation a worker has a slot and no rank."""
    worker = f"rank {error.rank}" if error.rank >= 0 else f"the worker in slot {error.slot}"
    step = f" at step {error.step}" if error.step is not None else ""
    return f"{worker} on {error.node} failed first{step}"


def incident_short(row: Incident | None) -> str:
    if row is None:
        return "-"
    lost = ", not over yet" if row.open else f", {row.lost}{' steps' if row.lost == 'unknown' else ''} lost"
    return f"{row.verdict.cls} {seconds(row.took_s)}{lost}, {ago(row.age_s)}"


def number(value: float | None, form: str = "", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def share(value: float | None) -> str:
    return "-" if value is None else goodput.percent(value)


def ago(age_s: float | None) -> str:
    return "-" if age_s is None else f"{phrases.age(age_s)} ago"


def seconds(value: float | None) -> str:
    """'144 ms', '8.20 s'."""
    return "-" if value is None else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def clock(wall_s: float | None, form: str = "%m-%d %H:%M:%S") -> str:
    return phrases.clock(wall_s, form, "?") if wall_s else "-"


def steps(managed: bool | None, step: int | None) -> str:
    """'-' of a script that has not called `elastic.run`: it commits no steps."""
    return "-" if step is None or (managed is False and not step) else str(step)


def picked(columns: Sequence[Column], *titles: str) -> list[Column]:
    by_title = {column.title: column for column in columns}
    return [by_title[title] for title in titles]


def _checkpoint(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None or (checkpoint.step is None and not checkpoint.error):
        return "-"
    return f"{_saved(checkpoint)} (failed)" if checkpoint.error else _saved(checkpoint)


def _checkpoint_long(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return ""
    saved = _saved(checkpoint) if checkpoint.step is not None else "none yet"
    skipped = f"{checkpoint.skipped} skipped" if checkpoint.skipped else ""
    failed = f"the newest one failed: {checkpoint.error}" if checkpoint.error else ""
    return "; ".join(filter(None, (saved, checkpoint.interval, skipped, failed)))


def _saved(checkpoint: Checkpoint) -> str:
    if checkpoint.step is None:
        return "none"
    age = f", {ago(checkpoint.age_s)}" if checkpoint.age_s is not None else ""  # unknown if by an earlier agent
    return f"step {checkpoint.step}{age}"


def _snapshot(snapshot: InMemorySnapshot | None) -> str:
    """The in-memory snapshot of the leader's node."""
    if snapshot is None:
        return ""
    step = f"step {snapshot.step}" if snapshot.step is not None else "none yet"
    every = f"every {snapshot.interval}" if snapshot.interval[:1].isdigit() else snapshot.interval
    costs = f"a lost node costs {snapshot.lost_node_costs}" if snapshot.lost_node_costs else ""
    kept = ", ".join(part for part in (step, every, f"{snapshot.memory_mb:.0f} MB a node") if part)
    return "; ".join(part for part in (kept, costs) if part)
