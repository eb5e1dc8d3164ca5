"""The records of one job in etcd as one consistent view: the input of every decision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.contract.keys import NUMBER_DIGITS, JobKeys
from elastic.contract.records.decoding import Decoder, Member, R, Stored
from elastic.contract.records.generation_delta import Base, GenerationReader
from elastic.contract.records.incident_account import IncidentAccount
from elastic.contract.records.job_records import (
    BrokenRecord,
    GenerationRecord,
    JobState,
    MemberRecord,
    ProgressRecord,
    SpecRecord,
    decode,
)

from . import reachability

Dead = frozenset[tuple[str, str]]
"""(node, incarnation) of agents that are proven dead, even if their leases are still valid."""

RECOVERY_GENERATIONS = 8
"""For about how many failures back the failure reports that belong to an incident are read: not for how many numbers,
of which many may be left out after a loss of etcd."""

RECOVERY_ACCOUNTS = 16
"""How many accounts of incidents are read, the newest: an agent looks for the end of its own last incident alone."""


# Cached: after an outage all member records are read again, and most are unchanged.


@functools.lru_cache(maxsize=16384)
def _member(raw: bytes) -> MemberRecord:
    return decode(MemberRecord, raw)


class MembersFromGeneration(Mapping[str, Member]):
    """The nodes of a generation as members, made from its record where member records are not watched. Whether they
    are still alive is not known."""

    def __init__(self, formed: GenerationRecord | None) -> None:
        self._formed = formed

    def __getitem__(self, node: str) -> Member:
        at = self._formed.at(node) if self._formed else None
        if self._formed is None or at is None:
            raise KeyError(node)
        place = self._formed.nodes[at]
        record = MemberRecord(
            node=place.node,
            incarnation=place.incarnation,
            host=place.host,
            port=place.port,
            slots=len(place.slots),
            ready=place.slots,
        )
        return Member(record, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._formed.order if self._formed else ())

    def __len__(self) -> int:
        return len(self._formed.nodes) if self._formed else 0

    def __eq__(self, other: object) -> bool:
        return self._formed == other._formed if isinstance(other, MembersFromGeneration) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def _numbers(keys: Iterable[str], prefix: str) -> tuple[int, ...]:
    """The generations that have a record below `prefix`, newest first."""
    digits = (key[len(prefix) :] for key in keys if key.startswith(prefix))
    numbers = (int(text) for text in digits if len(text) == NUMBER_DIGITS and text.isascii() and text.isdecimal())
    return tuple(sorted(numbers, reverse=True))


class _Listed(NamedTuple):
    """The generations that have a failure report, and the keys of accounts of incidents; newest first."""

    broken: tuple[int, ...] = ()
    accounts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobView:
    """The records of one job at one etcd revision; of a large job perhaps only its head (see `watch_scope`)."""

    spec: SpecRecord | None = None
    state: JobState = field(default_factory=JobState)
    state_revision: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    generation: GenerationRecord | None = None
    generation_revision: int = 0
    base: Base | None = field(default=None, compare=False)
    """Of `generation`: see `generation_delta`."""
    base_revision: int = field(default=0, compare=False)
    """Of the record with its nodes; 0: that is not there, or only the head of the job is watched."""
    written_back: bool = False
    """Whether `generation` was written back after etcd had lost its data, and none has been published since."""
    saved_step: int = 0
    """Step of the newest checkpoint that the leader has published."""
    saved_generation: int = 0
    """In which that step was committed; 0: not known."""
    progress: ProgressRecord | None = field(default=None, compare=False)
    """The progress record; None where it does not exist, or only the head of the job is watched."""
    broken: BrokenRecord | None = None
    """The failure report of `generation`, if it is broken."""
    broken_before: tuple[BrokenRecord, ...] = field(default=(), compare=False)
    """Those of the generations before it, newest first: more may be reported of a failure during the recovery from it,
    and further generations may break during that recovery."""
    accounts: tuple[IncidentAccount, ...] = field(default=(), compare=False)
    """Of the newest incidents; none where only the head of the job is watched."""
    revision: int = 0
    has_all_members: bool = True
    """Whether member records are included. Otherwise `members` are the nodes of `generation`, dead or alive."""
    disputes: frozenset[reachability.Dispute] = field(init=False, compare=False)
    """Pairs of members of which at least one cannot reach the other."""

    def __post_init__(self) -> None:
        disputes: frozenset[reachability.Dispute] = frozenset()
        if self.has_all_members and any(m.record.unreachable for m in self.members.values()):
            disputes = reachability.disputes({node: m.record.unreachable for node, m in self.members.items()})
        object.__setattr__(self, "disputes", disputes)

    @staticmethod
    def read(keys: JobKeys, kvs: Mapping[str, Stored], revision: int, has_all_members: bool = True) -> JobView:
        """Raises ProtocolVersionMismatch for a record of another version."""
        return JobReader(keys).read(kvs, revision, has_all_members)


class JobReader:
    """Reads one etcd snapshot of a job after another, and decodes only the values that are new objects.

    A snapshot is complete, with a key for each node, and almost nothing in it has changed.
    """

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._kvs: Mapping[str, Stored] = {}
        self._members: Mapping[str, Member] = {}
        self._listed = _Listed()
        self._seats: tuple[GenerationRecord | None, MembersFromGeneration] = (None, MembersFromGeneration(None))
        self._decoder = Decoder()
        self._generations = GenerationReader()

    def read(self, kvs: Mapping[str, Stored], revision: int, has_all_members: bool = True) -> JobView:
        """`has_all_members`: whether the members are among `kvs`.

        Raises ProtocolVersionMismatch for a record of another version, msgspec.ValidationError for a malformed one;
        BaseMissing for a large generation whose base is neither known nor among `kvs`.
        """
        keys, members, listed = self._keys, self._members, self._listed
        if not has_all_members:
            listed = self._list(kvs)
        elif kvs is not self._kvs:
            changed = [key for key, kv in kvs.items() if self._kvs.get(key) is not kv]
            changed += self._kvs.keys() - kvs.keys()
            members = self._changed_members(kvs, changed)
            # A pass over a large job's keys costs as much as all the rest.
            if any(key.startswith((keys.broken_all, keys.incidents)) for key in changed):
                listed = self._list(kvs)
        spec, state, generation = kvs.get(keys.spec), kvs.get(keys.state), kvs.get(keys.generation)
        base = kvs.get(keys.base)
        formed = self._generation(generation, base) if generation else None
        restored, broken = kvs.get(keys.restored), kvs.get(keys.broken(formed.number)) if formed else None
        progress = kvs.get(keys.progress)
        view = JobView(
            spec=self._record(SpecRecord, spec) if spec else None,
            state=self._record(JobState, state) if state else JobState(),
            state_revision=state.mod_revision if state else 0,
            members=members if has_all_members else self._seated(formed),
            generation=formed,
            generation_revision=generation.mod_revision if generation else 0,
            base=self._generations.base if generation else None,
            base_revision=self._base_revision(base) if has_all_members else 0,
            written_back=bool(generation and restored and restored.mod_revision == generation.mod_revision),
            broken=self._record(BrokenRecord, broken) if broken else None,
            broken_before=self._failed_before(kvs, formed, listed.broken) if formed else (),
            accounts=self._accounts(kvs, listed.accounts),
            revision=revision,
            saved_step=(self._record(ProgressRecord, progress).checkpoint_step or 0) if progress else 0,
            saved_generation=self._record(ProgressRecord, progress).checkpoint_generation if progress else 0,
            progress=self._record(ProgressRecord, progress) if progress else None,
            has_all_members=has_all_members,
        )
        if has_all_members:
            self._kvs, self._members, self._listed = kvs, members, listed
        return view

    def _generation(self, generation: Stored, base: Stored | None) -> GenerationRecord:
        read = functools.partial(self._generations.read, base=base.value if base else None)
        return self._record(GenerationRecord, generation, read)

    def _base_revision(self, base: Stored | None) -> int:
        return base.mod_revision if base and self._generations.is_base(base.value) else 0

    def _list(self, kvs: Mapping[str, Stored]) -> _Listed:
        keys = self._keys
        accounts = sorted((key for key in kvs if keys.is_account(key)), reverse=True)
        return _Listed(_numbers(kvs, keys.broken_all), tuple(accounts[:RECOVERY_ACCOUNTS]))

    def _failed_before(
        self, kvs: Mapping[str, Stored], formed: GenerationRecord, listed: tuple[int, ...]
    ) -> tuple[BrokenRecord, ...]:
        numbers = [number for number in listed if number < formed.number]
        reports = []
        for place, number in enumerate(numbers[: RECOVERY_GENERATIONS - 1]):
            reports.append(self._record(BrokenRecord, kvs[self._keys.broken(number)], name=f"broken {place}"))
        return tuple(reports)

    def _accounts(self, kvs: Mapping[str, Stored], listed: tuple[str, ...]) -> tuple[IncidentAccount, ...]:
        return tuple(self._record(IncidentAccount, kvs[key], name=key) for key in listed)

    def _seated(self, formed: GenerationRecord | None) -> MembersFromGeneration:
        if self._seats[0] is not formed:
            self._seats = formed, MembersFromGeneration(formed)
        return self._seats[1]

    def _changed_members(self, kvs: Mapping[str, Stored], changed: Iterable[str]) -> Mapping[str, Member]:
        """`changed`: keys whose values are new, or that are gone."""
        prefix = self._keys.members
        keys = [key for key in changed if key.startswith(prefix)]
        if not keys:
            return self._members
        members = dict(self._members)
        for key in keys:
            if (kv := kvs.get(key)) is None:
                del members[key.removeprefix(prefix)]
            else:
                members[key.removeprefix(prefix)] = Member(_member(kv.value), kv.create_revision)
        return members

    def _record(self, kind: type[R], kv: Stored, read: Callable[[bytes], R] | None = None, name: str = "") -> R:
        """`name`: distinguishes records of one kind that are read from different keys."""
        return self._decoder.read(kind, name or kind.__name__, kv, read)
