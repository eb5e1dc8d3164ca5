"""The source of the state when a group has formed: one decision, identical on every rank from the same offers.

The ranks that hold the same part of the state have the same *key*, and are replicas of each other. All go on from the
newest version that every key can be had at, and the ranks of each key get it from their nearest source. Where the whole
state is on every rank, there is one key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from elastic.contract.origin import Origin

Version = tuple[int, int]
"""(generation of the last commit, steps committed): states with equal versions are bit-identical."""

_RANKING = (Origin.CHECKPOINT, Origin.SNAPSHOT, Origin.LIVE)
"""Preference among equally new states: live state needs no read, a snapshot no disk."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The states that one rank has or can load."""

    rank: int
    key: int = 0
    """Equal on ranks that hold the same part of the state; 0: all of it."""
    names: int = 0
    """Equal on ranks whose modules have tensors of the same names."""
    version: Version
    """Of its live state."""
    clean: bool
    """The live state is consistent: no step or transfer was interrupted halfway."""
    established: bool
    """The live state is the job's (committed or received), not only built by `setup`."""
    snapshot: Version | None = None
    """Newest snapshot this rank could load by itself."""
    older: Version | None = None
    """The one before it, if it could load that one, too: of a part of the state, another rank may lack the newest."""
    others: tuple[tuple[int, Version], ...] = ()
    """(key, version) of snapshots of other ranks' parts in the memory of this rank's node, which it could send."""
    checkpoint: Version | None = None
    """Newest checkpoint this rank could load by itself."""
    storage_id: int = 0
    """Where that lies, as a hash: ranks of one host that see one folder have the same, and so have all that load from
    one remote end. 0: not known."""
    known_step: int = 0
    """The newest step for which the job is known to have had a checkpoint, found or not; 0: none."""
    reached: Version = (0, 0)
    """Of the newest commit known to this rank or its agent, whether or not that state still exists."""
    described: int = 0
    """Number of tensors of its live state when they were last listed. Decides nothing about the source."""


class UnreadableRange(NamedTuple):
    """Checkpoints that a rank has found damaged, or could not read, while it loaded: those of one storage, newer than
    what it has loaded in the end, up to the newest one there."""

    storage_id: int
    loaded: Version
    newest: Version

    def covers(self, version: Version) -> bool:
        return self.loaded < version <= self.newest


LookAgain = Callable[[Sequence[UnreadableRange]], tuple[Version | None, int]]
"""Returns the newest checkpoint, and the id of its storage, by now and without those that other ranks have
passed over."""


class Saved(NamedTuple):
    """What a rank could load by itself; see `Offer`."""

    snapshot: Version | None = None
    checkpoint: Version | None = None
    """By its manifest: only `Handover.load` finds out whether it is intact."""
    unusable_step: int = 0
    """Newest step of the checkpoints that cannot be loaded, if there are no others; 0: none."""
    storage_id: int = 0
    look_again: LookAgain = lambda _: (None, 0)
    older: Version | None = None
    others: tuple[tuple[int, Version], ...] = ()


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    origin: Origin
    source: int
    """The rank that has the state, or loads it, and sends it to `needs`. One of another key sends a snapshot that it
    cannot load itself."""
    version: Version
    needs: tuple[int, ...]
    """Ranks of the same key that receive, ascending; never the source."""


def reached(offers: Sequence[Offer]) -> int:
    """The newest step known to have been committed, by a rank that takes part or by one that has died."""
    known = [offer.version for offer in offers if offer.established] + [offer.reached for offer in offers]
    return max(known)[1]


class NoStateError(Exception):
    """No rank has, or can load, a state to resume from. The message lists what each rank lacks."""


class StateLostError(NoStateError):
    """The only state left is inconsistent, or is what a rollback goes back from, and nothing was ever saved: training
    can only restart from its set-up."""


def counted_before(offers: Sequence[Offer], restore: str, generation: int) -> int:
    """What `choose` is to take as `before` when `generation` forms.

    While live state is there, numbers continue from its generation: what is saved under the forming one's number or
    above is no earlier state of this job. It lies in a folder that only a node which came late sees, as of an earlier
    job. Asked once, before a rank loads anything: live state that is replaced by a load counts here.
    """
    live = any(origin is Origin.LIVE for offer in offers for origin, _ in _candidates(offer, restore, 0))
    return generation if live else 0


def all_live(offers: Sequence[Offer], generation: int) -> bool:
    """Whether live state that counts is there of every key, and of one version. That of an older generation may belong
    to a node that was partitioned while the others trained on and saved."""
    there: dict[int, set[Version]] = {offer.key: set() for offer in offers}
    for offer in offers:
        if offer.clean and offer.established and offer.version[0] >= generation - 1:
            there[offer.key].add(offer.version)
    return bool(set.intersection(*there.values()))


def choose(offers: Sequence[Offer], restore: str = "newest", before: int = 0) -> dict[int, Choice]:
    """Choose, for each key, the state to resume from. `restore`: 'newest', or 'snapshot' to ignore all live state.
    `before`: snapshots and checkpoints of this generation, or a newer one, do not count; 0: all do.

    The newest version that every key can be had at wins; of each key live before snapshot before checkpoint, then the
    lowest rank. If no rank ever had the job's state, the lowest rank of each key whose newly built state is consistent
    sends it to the others: replicas must be equal.

    Raises StateLostError, NoStateError, ValueError. A job that once had a checkpoint never restarts from its set-up by
    itself: a checkpoint folder that is empty or not mounted needs a user's attention.
    """
    if restore not in ("newest", "snapshot"):
        raise ValueError(f"restore = {restore!r}: 'newest' or 'snapshot'")
    alike: dict[int, list[Offer]] = {}
    for offer in offers:
        alike.setdefault(offer.key, []).append(offer)
    best = _best(alike, offers, restore, before)
    if common := set.intersection(*map(set, best.values())):
        newest = max(common)
        nearest = {key: versions[newest] for key, versions in best.items()}
        return {key: _choice(_RANKING[n], -minus, newest, alike[key]) for key, (n, _, minus) in nearest.items()}
    known_step = max(offer.known_step for offer in offers)
    if any(offer.established for offer in offers):
        kind_of_error = NoStateError if known_step else StateLostError
        raise kind_of_error(f"nothing to go on from (restore = {restore!r}): {'; '.join(map(_lacks, offers))}")
    if known_step > 0:
        raise NoStateError(
            f"the job has had a checkpoint of step {known_step}, by its record or by a folder step-{known_step}… in "
            "checkpoint.dir, and now no rank finds a good one, nor a snapshot, nor live state: training does not begin "
            "again from step 0 by itself. Is checkpoint.dir there, and the right one? To begin anew, move the damaged "
            "ones in it away, and submit the job again"
        )
    built: dict[int, Offer] = {}
    for offer in sorted(offers, key=lambda o: o.rank):
        if offer.clean:
            built.setdefault(offer.key, offer)
    if len(built) == len(alike):
        return {key: _choice(Origin.SETUP, o.rank, o.version, alike[key]) for key, o in built.items()}
    raise StateLostError(f"nothing to go on from: {'; '.join(map(_lacks, offers))}")


Nearness = tuple[int, bool, int]
"""(index of the origin, whether the rank that has it is of the key, that rank, negated): the largest is the nearest."""


def _best(
    keys: Iterable[int], offers: Sequence[Offer], restore: str, before: int
) -> dict[int, dict[Version, Nearness]]:
    """Key -> version -> where the nearest is."""
    best: dict[int, dict[Version, Nearness]] = {key: {} for key in keys}
    for offer in offers:
        there = [(offer.key, origin, version) for origin, version in _candidates(offer, restore, before)]
        there += [(key, Origin.SNAPSHOT, version) for key, version in offer.others if _counts(version, before)]
        for key, origin, version in there:
            if (versions := best.get(key)) is not None:
                nearness = _RANKING.index(origin), key == offer.key, -offer.rank
                versions[version] = max(nearness, versions.get(version, nearness))
    return best


def _candidates(offer: Offer, restore: str, before: int) -> list[tuple[Origin, Version]]:
    candidates: list[tuple[Origin, Version]] = []
    if restore == "newest" and offer.clean and offer.established:
        candidates.append((Origin.LIVE, offer.version))
    saves = (Origin.SNAPSHOT, offer.snapshot), (Origin.SNAPSHOT, offer.older), (Origin.CHECKPOINT, offer.checkpoint)
    for origin, saved in saves:
        if saved is not None and _counts(saved, before):
            candidates.append((origin, saved))
    return candidates


def _counts(saved: Version, before: int) -> bool:
    return not before or saved[0] < before


def _choice(origin: Origin, source: int, version: Version, replicas: Sequence[Offer]) -> Choice:
    def has_it(offer: Offer) -> bool:
        return origin is Origin.LIVE and offer.clean and offer.established and offer.version == version

    needs = tuple(sorted(o.rank for o in replicas if o.rank != source and not has_it(o)))
    return Choice(origin=origin, source=source, version=version, needs=needs)


def _lacks(offer: Offer) -> str:
    live = "half-changed" if not offer.clean else f"of step {offer.version[1]}" if offer.established else "only set up"
    saved = [f"{name} of step {version[1]}" if version else f"no {name}"
             for name, version in (("snapshot", offer.snapshot), ("checkpoint", offer.checkpoint))]  # fmt: skip
    return f"rank {offer.rank}: live state {live}, {', '.join(saved)}"
