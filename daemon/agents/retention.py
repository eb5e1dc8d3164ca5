"""What may be removed from this node's jobs folder. Pure: from a listing to a list of removals.

Only files of names that elasticd and its agents use are ever named here; a folder that holds anything else (a
checkpoint, a file of the script, a link) stays, with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from elastic.contract.agent_files import KEPT_CODE, LEFT
from elastic.contract.keys import NAME
from elasticd.base.command_answers import Removed
from elasticd.base.settings import RetentionSettings
from elasticd.cluster.cluster import Job

DAY_S = 86_400.0
YOUNG_S = 3_600.0
"""Whatever was written to within this time stays: an agent may have been started since the listing."""

ASIDE = re.compile(rf"~{NAME.pattern}~[0-9]{{1,10}}~[0-9]{{1,12}}")
"""A folder that was moved aside: see `job_folders`."""
LOG = re.compile(
    r"(?P<stem>(?P<place>slot[0-9]{1,6}|standby|zygote)\.(?P<agent>[0-9A-Za-z-]{1,16})(?:\.(?P<worker>[0-9]{1,12}))?"
    r"(?:\.[0-9A-Za-z]{1,8})?)"
    r"\.(?:log|error\.json)"
)
"""A file in a job's `logs`: see `elastic.agent.workers.worker_env.files`."""
_REPLACED = ("config.json", "orders.json", "status.json", LEFT, "history.json", "gradients.json")
AGENT_FILES = frozenset({"lock", "agent.log", KEPT_CODE, *_REPLACED, *(f".{name}.new" for name in _REPLACED)})
"""Files in a job's `agent`: see `elastic.contract.agent_files`. A crash while one is replaced leaves the new one."""


@dataclass(frozen=True, slots=True)
class RegularFile:
    name: str
    disk_bytes: int
    mtime_wall_s: float


@dataclass(frozen=True, slots=True)
class JobFolder:
    name: str
    """The job's, or one that matches `ASIDE`."""
    logs: tuple[RegularFile, ...] = ()
    """Files in `logs` whose names match `LOG`."""
    rest: tuple[RegularFile, ...] = ()
    """`AGENT_FILES` in `agent`, and the agent's output."""
    strange: int = 0
    """How many other entries it has, links included."""
    mtime_wall_s: float = 0.0
    """Of the folder itself."""
    has_agent: bool = False
    """Whether its agent is alive."""
    incarnation: str = ""
    """Of the living agent; empty: none, or not known yet."""

    @property
    def newest_wall_s(self) -> float:
        return max((found.mtime_wall_s for found in (*self.logs, *self.rest)), default=self.mtime_wall_s)


def forgettable(jobs: Iterable[Job], settings: RetentionSettings, now_wall_s: float) -> list[str]:
    """The jobs that are over and not to be kept in etcd any more, the oldest first. One with agents is not complete.
    Those of each user are counted by themselves: many jobs of one, or times that it has signed, push out no other's."""
    over = sorted((job for job in jobs if job.over and not job.members), key=lambda job: job.state.since_wall_s)
    until_wall_s = now_wall_s - settings.over_days * DAY_S if settings.over_days else float("-inf")
    owners = {job.name: job.spec.uid if job.spec else None for job in over}
    surplus = Counter(owners.values())
    names = []
    for job in over:
        owner = owners[job.name]
        if (settings.over_jobs and surplus[owner] > settings.over_jobs) or job.state.since_wall_s <= until_wall_s:
            names.append(job.name)
            surplus[owner] -= 1
    return names


def removals(
    folders: Iterable[JobFolder], known: Collection[str] | None, settings: RetentionSettings, now_wall_s: float
) -> list[Removed]:
    """`known`: the jobs in etcd; None: not known, so that no job's folder is removed."""
    rows: list[Removed] = []
    for folder in folders:
        if _is_forgotten(folder, known, settings, now_wall_s):
            rows += _folder(folder, settings.forgotten_days)
        else:
            rows += _old_logs(folder, settings, now_wall_s)
    return rows


def _is_forgotten(
    folder: JobFolder, known: Collection[str] | None, settings: RetentionSettings, now_wall_s: float
) -> bool:
    if not settings.forgotten_days or folder.has_agent:
        return False
    if not ASIDE.fullmatch(folder.name) and (known is None or folder.name in known):
        return False
    return now_wall_s - folder.newest_wall_s >= max(settings.forgotten_days * DAY_S, YOUNG_S)


def _folder(folder: JobFolder, days: float) -> Iterator[Removed]:
    because = f"etcd has no such job, and nothing was written here for {days:g} days"
    if not folder.strange:
        every = (*folder.logs, *folder.rest)
        yield _removed(folder, "folder", every, because)
    elif folder.logs:
        others = "1 entry" if folder.strange == 1 else f"{folder.strange} entries"
        stays = f"{because}; the folder stays, since it holds {others} that elasticd did not create"
        yield _removed(folder, "logs", folder.logs, stays)


def _old_logs(folder: JobFolder, settings: RetentionSettings, now_wall_s: float) -> Iterator[Removed]:
    """The oldest logs of ended workers, beyond either limit; a worker's error file counts with its log."""
    if folder.has_agent and not folder.incarnation:
        return  # its workers' logs cannot be told from older ones
    running = _running(folder)
    workers: dict[str, list[RegularFile]] = {}
    for file in folder.logs:
        if (stem := _match(file.name)["stem"]) not in running:
            workers.setdefault(stem, []).append(file)
    newest_first = sorted(workers.items(), key=lambda item: (-max(f.mtime_wall_s for f in item[1]), item[0]))
    kept_files, kept_bytes, gone = 0, 0, []
    for _, files in newest_first:
        kept_files, kept_bytes = kept_files + 1, kept_bytes + _bytes(files)
        too_many = bool(settings.log_files) and kept_files > settings.log_files
        too_large = bool(settings.logs_mb) and kept_bytes > settings.logs_mb * 1e6
        if (too_many or too_large) and now_wall_s - max(f.mtime_wall_s for f in files) >= YOUNG_S:
            gone += files
    if gone:
        limits = [f"{settings.log_files} files"] * bool(settings.log_files)
        limits += [f"{settings.logs_mb:g} MB"] * bool(settings.logs_mb)
        yield _removed(folder, "logs", gone, f"logs of ended workers beyond {' or '.join(limits)}")


def _removed(folder: JobFolder, what: str, files: Collection[RegularFile], why: str) -> Removed:
    return Removed(folder.name, what, sorted(f.name for f in files), mb(_bytes(files)), why)


def mb(count: int) -> float:
    return round(count / 1e6, 3)


def _running(folder: JobFolder) -> set[str]:
    """Stems of the logs that processes of the living agent may have open: its zygote's, the newest of each slot, and
    every standby's, since a standby that got a slot goes on writing to its own."""
    newest: dict[str, tuple[int, str]] = {}
    running = set()
    for file in folder.logs if folder.has_agent else ():
        match = _match(file.name)
        if match["agent"] != folder.incarnation[:8]:
            continue
        if match["place"].startswith("slot") and match["worker"]:
            newest[match["place"]] = max(newest.get(match["place"], (-1, "")), (int(match["worker"]), match["stem"]))
        else:
            running.add(match["stem"])
    return running | {stem for _, stem in newest.values()}


def _match(name: str) -> re.Match[str]:
    match = LOG.fullmatch(name)
    assert match is not None, name
    return match


def _bytes(files: Iterable[RegularFile]) -> int:
    return sum(found.disk_bytes for found in files)
