"""Removes what `retention` names, once an hour and at `elasticctl gc`. No link is followed, no other name touched."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.contract.keys import NAME, ClusterKeys
from elastic.util.log_trim import trim
from elasticd.base.command_answers import Cleanup, Removed
from elasticd.base.folders import Folder
from elasticd.base.log import Log
from elasticd.base.settings import Settings
from elasticd.cluster.published_state import Snapshot

from . import job_folders
from .retention import AGENT_FILES, ASIDE, LOG, JobFolder, RegularFile, forgettable, mb, removals

FIRST_S = 300.0
"""From the start of the daemon to the first time."""
EVERY_S = 3600.0


@dataclass(eq=False)
class Cleaner:
    """Used by its own thread and by those of requests. `retire`: see `Agents.retire`. `now`: the daemon's newest
    state."""

    settings: Settings
    keys: ClusterKeys
    retire: Callable[[str], Path | None]
    now: Callable[[], Snapshot]
    log: Log

    def __post_init__(self) -> None:
        self._jobs_dir = Path(self.settings.state_dir) / "jobs"
        self._one = threading.Lock()
        self.forget: Callable[[Sequence[str]], object] = lambda jobs: None
        """Forgets jobs in etcd, those of them that are still over. Set before the thread is started."""

    def turn(self) -> float:
        """Clean up, and forget jobs. Returns the pause to the next turn."""
        self.clean()
        snapshot = self.now()
        jobs = forgettable(snapshot.cluster.jobs.values(), self.settings.retention, time.time())
        if jobs and snapshot.contact.connected:
            self.forget(jobs)
        return EVERY_S

    def clean(self, *, dry_run: bool = False) -> Cleanup:
        """Remove what the settings do not keep; with `dry_run` only say what that is. Returns the answer of /v1/gc."""
        with self._one:
            snapshot, settings = self.now(), self.settings.retention
            agents = {job: a.status.incarnation if a.status else "" for job, a in snapshot.agents.items()}
            folders, problems = listed(self._jobs_dir, agents)
            rows: list[Removed] = []
            in_etcd = known_jobs(snapshot, self.keys)
            for removal in removals(folders, in_etcd, settings, time.time()):
                if dry_run or self._remove(removal, problems):
                    rows.append(removal)
            if settings.etcd_log_mb:
                rows += self._trim(folders, int(settings.etcd_log_mb * 1e6), dry_run, problems)
        for row in rows if not dry_run else ():
            self.log.info("retention.removed", folder=row.folder, what=row.what, mb=row.mb, why=row.why)
        for problem in problems:
            self.log.warning("retention.not_removed", why=problem)
        return Cleanup(
            node=self.settings.node, dry_run=dry_run, removed=rows, freed_mb=round(sum(row.mb for row in rows), 3),
            problems=problems, jobs_known=in_etcd is not None,
        )  # fmt: skip

    def _remove(self, removal: Removed, problems: list[str]) -> bool:
        """Whether it was removed."""
        folder = self._jobs_dir / removal.folder
        try:
            if removal.what == "logs":
                _unlink(Folder(self._jobs_dir, (removal.folder, "logs")), removal.names)
                return True
            if not ASIDE.fullmatch(removal.folder):
                retired = self.retire(removal.folder)
                if retired is None:  # an agent was started since the listing
                    return False
                folder = retired
            _remove_folder(folder)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
            return False
        return True

    def _trim(
        self, folders: list[JobFolder], limit_bytes: int, dry_run: bool, problems: list[str]
    ) -> Iterator[Removed]:
        """Drop the middle of logs to which running processes write: the embedded etcd, agents of other users."""
        output = job_folders.OUTPUT
        names = [f.name for f in folders if any(file.name == output for file in f.rest)]
        paths = {"etcd": Path(self.settings.state_dir) / "etcd" / "etcd.log"}
        paths |= {name: self._jobs_dir / name / output for name in names}
        for where, path in paths.items():
            try:
                entry = os.lstat(path)
                over_bytes = entry.st_blocks * 512 - limit_bytes
                if not stat.S_ISREG(entry.st_mode) or over_bytes <= 0:
                    continue
                freed_bytes = over_bytes if dry_run else trim(path, limit_bytes)
            except FileNotFoundError:
                continue
            except OSError as error:
                problems.append(f"{path}: {error.strerror or error}")
                continue
            why = f"more than {limit_bytes / 1e6:g} MB: the middle goes"
            yield Removed(where, "middle", [path.name], mb(freed_bytes), why)


def known_jobs(snapshot: Snapshot, keys: ClusterKeys) -> frozenset[str] | None:
    """The jobs of which etcd has any record, also one that is refused or of another version; None: not known now."""
    cluster = snapshot.cluster
    if not snapshot.contact.connected or not cluster.revision:
        return None
    unread = {keys.authority(key)[1] for key in (*cluster.foreign, *cluster.refused)}
    return frozenset(cluster.jobs) | unread


def listed(jobs_dir: Path, agents: Mapping[str, str]) -> tuple[list[JobFolder], list[str]]:
    """The folders in `jobs_dir`, without what is no job's, and the problems. `agents`: job -> its agent's incarnation,
    '' if that is not known yet."""
    folders: list[JobFolder] = []
    problems: list[str] = []
    try:
        names = sorted(os.listdir(jobs_dir))
    except FileNotFoundError:
        return [], []
    for name in names:
        if not (NAME.fullmatch(name) or ASIDE.fullmatch(name)):
            continue
        try:
            folders.append(_listed(jobs_dir, name, agents))
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile; a file or a link
            continue
        except OSError as error:
            problems.append(f"{jobs_dir / name}: {error.strerror or error}")
    return folders, problems


def _listed(jobs_dir: Path, name: str, agents: Mapping[str, str]) -> JobFolder:
    logs: list[RegularFile] = []
    rest: list[RegularFile] = []
    strange = 0
    with Folder(jobs_dir, (name,)).opened() as folder:
        mtime_wall_s = os.fstat(folder).st_mtime
        for entry, at in _entries(folder):
            if entry in ("agent", "logs") and stat.S_ISDIR(at.st_mode):
                continue
            ours = entry == job_folders.OUTPUT and stat.S_ISREG(at.st_mode)
            rest += [_found(entry, at)] if ours else []
            strange += not ours
    for inside, kept in (("agent", rest), ("logs", logs)):
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            Folder(jobs_dir, (name, inside)).opened() as folder,
        ):
            for entry, at in _entries(folder):
                if _is_ours(inside, entry) and stat.S_ISREG(at.st_mode):
                    kept.append(_found(entry, at))
                else:
                    strange += 1
    has_agent = name in agents or job_folders.has_agent(jobs_dir / name)
    return JobFolder(name, tuple(logs), tuple(rest), strange, mtime_wall_s, has_agent, agents.get(name, ""))


def _is_ours(inside: str, name: str) -> bool:
    return name in AGENT_FILES if inside == "agent" else LOG.fullmatch(name) is not None


def _entries(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)


def _found(name: str, at: os.stat_result) -> RegularFile:
    return RegularFile(name, at.st_blocks * 512, at.st_mtime)


def _remove_folder(folder: Path) -> None:
    """What elasticd created in a job's folder, and the folder. Raises OSError, also if anything else is in it."""
    for inside in ("agent", "logs"):
        part = Folder(folder.parent, (folder.name, inside))
        with contextlib.suppress(FileNotFoundError):
            with part.opened() as descriptor:
                names = [name for name in os.listdir(descriptor) if _is_ours(inside, name)]
            _unlink(part, names)
            os.rmdir(folder / inside)
    (folder / job_folders.OUTPUT).unlink(missing_ok=True)
    os.rmdir(folder)


def _unlink(folder: Folder, names: tuple[str, ...] | list[str]) -> None:
    with folder.opened() as descriptor:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
