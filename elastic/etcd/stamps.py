"""The ordering rule: no record has an effect that is older than one of the same key that was read before.

A record carries a stamp, which grows with each write of its key (`elastic.etcd.signing`). `Stamps` remembers the newest
one of every key, also of keys that are gone, and a daemon keeps it in a file (`entries`, `load`), so that the rule
outlives its restart and a loss of etcd's data.

- A **lower** stamp is refused, also in an etcd that was set back to a backup: daemons write what they know over it.
- The **same** stamp is refused under a key that was seen to go and is leased: its writer has ended.
- A deletion for good leaves a record at `ended/<key>` (`ClusterKeys.ended`): what was signed before it is refused.
- Stamps of the keys that are gone are bounded. Of those dropped the highest stays as a floor: a key that is not
  remembered takes no record below it. A job's keys are counted by themselves, since its user signs them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from elastic.contract.keys import ClusterKeys

MOST_GONE = 20_000
"""Keys that are gone of which the stamp is remembered; and jobs."""
MOST_GONE_OF_JOB = 2_000
"""And of the questions that were answered."""
ENDED = "-"
_ASKED = "asked/"
"""Among the names of jobs: questions of other nodes' daemons, by their ids."""
_DROPPED = -1
_FLOOR = ""
"""In place of a key: what holds for those that are not remembered."""


class NewestRead(NamedTuple):
    """The newest record of a key that was read."""

    stamp: int = 0
    gone: bool = False
    """The key was deleted after that."""
    submission: str = ""
    """Of a spec: the submission that is the job's current one. ENDED: the key was deleted for good."""


Entry = tuple[str, int, bool, str]
"""A key, and the fields of its `NewestRead`. A key that ends with `/` stands for a floor."""


class Stamps:
    """Thread-safe."""

    def __init__(self, keys: ClusterKeys) -> None:
        self.keys = keys
        self.lock = threading.RLock()
        """Held from the check of a record to `take`."""
        self._groups: dict[str, dict[str, NewestRead]] = {"": {}}
        """Job, '' for the cluster's own keys -> key -> newest."""
        self._unsaved: dict[str, NewestRead | None] = {}
        self.urgent = False
        """Whether something changed, since `entries` was called, that is to be saved before it is acted on."""

    def of(self, key: str) -> NewestRead:
        with self.lock:
            group = self._groups.get(self._job(key), {})
            floor = self._groups[""] if self.keys.is_spec(key) else group
            return group.get(key) or floor.get(_FLOOR) or NewestRead()

    def submission(self, job: str) -> str | None:
        """The current submission of a job; ENDED for one that was forgotten, None for one that is not known."""
        spec = self._groups.get(job, {}).get(f"{self.keys.jobs}{job}{ClusterKeys.SPEC}")
        return spec.submission if spec else None

    def ended(self, key: str) -> bool:
        """Whether the record at `key` was deleted for good, and none was written since."""
        return self.of(key).submission == ENDED

    def highest(self, job: str) -> int:
        with self.lock:
            return max((newest.stamp for newest in self._groups.get(job, {}).values()), default=0)

    def take(self, key: str, stamp: int, submission: str = "") -> None:
        """A record was read and accepted. A spec of another submission ends what is known of the job's other keys:
        their writers have not read the records of the submission before."""
        with self.lock:
            if self.keys.is_spec(key) and self.submission(self._job(key)) != submission:
                self._drop_job(self._job(key))
            self._set(key, NewestRead(stamp, False, submission))

    def end(self, key: str, stamp: int) -> None:
        """A record at `ended/<key>` was read."""
        with self.lock:
            if stamp <= self.of(key).stamp:
                return
            if self.keys.is_spec(key):
                self._drop_job(self._job(key))
            self._set(key, NewestRead(stamp, True, ENDED))

    def deleted(self, keys: Iterable[str]) -> None:
        """These keys are not in etcd any more."""
        with self.lock:
            for key in keys:
                if (newest := self._groups.get(self._job(key), {}).get(key)) and not newest.gone:
                    self._set(key, NewestRead(newest.stamp, True, newest.submission))

    def only(self, there: set[str]) -> None:
        """No other keys than these are in etcd."""
        with self.lock:
            self.deleted([key for group in self._groups.values() for key in group if key and key not in there])

    def first_time(self, question: str, stamp: int) -> bool:
        """Whether the question of this id, asked at `stamp`, has not been answered: it is from now on."""
        key = f"{self.keys.root}{_ASKED}{question}"
        with self.lock:
            if self.of(key).stamp >= stamp:
                return False
            self._set(key, NewestRead(stamp, True))
            return True

    # ── kept in a file ──────────────────────────────────────────────────────────────────────────────────────

    def load(self, entries: Iterable[Entry]) -> None:
        """What an earlier process has remembered; of a key the last entry counts, one with the stamp -1 drops it."""
        with self.lock:
            for key, stamp, gone, submission in entries:
                if not key.startswith(self.keys.root):
                    continue  # of another cluster
                group, name = self._groups.setdefault(self._job(key), {}), _FLOOR if key.endswith("/") else key
                if stamp == _DROPPED:
                    group.pop(name, None)
                else:
                    group[name] = NewestRead(stamp, gone, submission)

    def entries(self) -> list[Entry]:
        """What has changed since the last call."""
        with self.lock:
            self._trim()
            changed, self._unsaved, self.urgent = self._unsaved, {}, False
            return [(key, *(newest or NewestRead(_DROPPED))) for key, newest in changed.items()]

    def __len__(self) -> int:
        """How many entries `all_entries` has."""
        with self.lock:
            return sum(map(len, self._groups.values()))

    def all_entries(self) -> Iterator[Entry]:
        with self.lock:
            for job, group in self._groups.items():
                yield from ((key or self._floor_key(job), *newest) for key, newest in group.items())

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _job(self, key: str) -> str:
        if key.startswith(self.keys.jobs):
            return key[len(self.keys.jobs) :].partition("/")[0]
        return _ASKED if key.startswith(self.keys.root + _ASKED) else ""

    def _floor_key(self, job: str) -> str:
        return f"{self.keys.jobs}{job}/" if job not in ("", _ASKED) else f"{self.keys.root}{job}"

    def _set(self, key: str, newest: NewestRead) -> None:
        group = self._groups.setdefault(self._job(key), {})
        if group.get(key) != newest:
            group[key] = self._unsaved[key] = newest
            kind = self.keys.kind(key)
            self.urgent |= kind.acted_on and (newest.gone or not kind.leased)

    def _drop(self, job: str, key: str) -> None:
        self._groups[job].pop(key, None)
        self._unsaved[key or self._floor_key(job)] = None

    def _drop_job(self, job: str) -> None:
        for key in list(self._groups.get(job, {})):
            self._drop(job, key)

    def _trim(self) -> None:
        for job, group in list(self._groups.items()):
            most = MOST_GONE_OF_JOB if job else MOST_GONE
            if (
                len(group) > 2 * most
                and len(gone := [k for k, newest in group.items() if k and newest.gone]) > 2 * most
            ):
                self._raise_floor(job, [(group[key].stamp, job, key) for key in gone], most)
        if len(self._groups) > 2 * MOST_GONE:
            specs = ((job, f"{self.keys.jobs}{job}{ClusterKeys.SPEC}") for job in self._groups if job)
            over = [(g[s].stamp, job, s) for job, s in specs if s in (g := self._groups[job]) and g[s].gone]
            for _, job, _ in self._raise_floor("", over, MOST_GONE):
                self._drop_job(job)
                del self._groups[job]

    def _raise_floor(self, job: str, gone: list[tuple[int, str, str]], most: int) -> list[tuple[int, str, str]]:
        """Drop the lowest of (stamp, job, key), all but `most`; returns them."""
        dropped = sorted(gone)[: max(0, len(gone) - most)]
        for _, owner, key in dropped:
            self._drop(owner, key)
        if dropped:
            floor = NewestRead(max(dropped[-1][0], self._groups[job].get(_FLOOR, NewestRead()).stamp))
            self._groups[job][_FLOOR] = self._unsaved[self._floor_key(job)] = floor
        return dropped
