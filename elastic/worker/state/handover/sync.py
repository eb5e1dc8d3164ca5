"""After a group has formed: find out which ranks have the state, and send it to all that do not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import msgspec
import torch

from elastic.checkpoint.format.errors import NoGoodCheckpoint
from elastic.checkpoint.memory.arena import Image
from elastic.checkpoint.memory.memcpy import device_type
from elastic.contract.origin import Origin
from elastic.contract.worker.messages import LoggedRow
from elastic.contract.worker.tensor_table import Table
from elastic.worker.comm import p2p
from elastic.worker.state import state_source
from elastic.worker.state.parts.described import Described
from elastic.worker.state.receive_plan import ReceivePlan
from elastic.worker.state.state import State
from elastic.worker.state.state_source import Choice, LookAgain, Offer, Saved, UnreadableRange, Version
from elastic.worker.torch_internals import gc_pause

from . import broadcast, pull, shared_values
from .restore import Store

Given = tuple[str, int, Sequence[LoggedRow]]
"""Description of the source; bytes and rows of `job.log` that this rank has received."""

_NONE: Version = (-1, -1)

Message = TypeVar("Message", bound=msgspec.Struct)


class SyncResult(msgspec.Struct, frozen=True):
    step: int
    origin: Origin
    source: str
    """The same in words, as 'checkpoint step 40 at PATH'."""
    nbytes: int
    """Bytes received by this rank; 0 if it had the state."""
    source_rank: int
    logged: Sequence[LoggedRow]
    """With the state: rows of `job.log` that rank 0 may lack."""
    reached: int
    """The newest step that any rank has a record of as committed."""
    key: int
    """See `Offer`."""
    leads: bool
    """The lowest rank of that key."""
    keys: int
    """Number of different keys."""
    staged: bool
    """Names of tensors differ between the ranks, as those of a pipeline's stages do."""


LOOKS, LOOK_S = 25, 0.2
"""How often, and how long apart, a rank looks for a checkpoint that another rank has seen."""

EARLY_TENSORS = 1000
"""From so many tensors on, the source sends its list of them before it checks that they are still those: meanwhile the
receivers make what they lack. With fewer that gains less than a message takes."""


class SourceTensors(msgspec.Struct, frozen=True):
    """The tensors of the source, in the order of the table."""

    table: Table
    devices: tuple[str, ...]
    """Device type of each tensor: NCCL and gloo must not wait for each other."""

    @staticmethod
    def of(described: Sequence[Described]) -> SourceTensors:
        return SourceTensors(tuple([each.info for each in described]), tuple([each.device for each in described]))


class StateHeader(msgspec.Struct, frozen=True):
    """Header sent before the contents of the tensors."""

    tensors: SourceTensors | None
    """None: those that were sent early."""
    extra: dict[str, Any]
    source: str
    window: pull.Window
    """Where ranks on the source's host can read the tensors."""
    logged: tuple[LoggedRow, ...] = ()
    """As JSON; see `SyncResult`."""


class ImageHeader(msgspec.Struct, frozen=True):
    """Header sent before the contents of a snapshot that its sender cannot load itself. As MessagePack."""

    image: Image
    logged: tuple[LoggedRow, ...] = ()
    """As JSON; see `SyncResult`."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A group has formed: `run`, which all ranks call, makes every rank's `state` the newest there is, over torch's
    default group."""

    state: State
    _: KW_ONLY
    rank: int
    world_size: int
    restore: str = "newest"
    generation: int = 0
    saved: Callable[[], Saved] | None = None
    """Returns the versions that `load` could load on this rank. Called only if no rank's live state qualifies; given on
    all ranks or none. May take a while."""
    load: Callable[[Origin, Version], str] | None = None
    """Loads this rank's snapshot of that version, or its newest checkpoint, into the state (adopt, fill, filled).
    Returns a description, such as 'checkpoint step 40 at /ckpt/step-40'. Raises if nothing can be loaded."""
    known_step: int = 0
    """Step of the newest checkpoint that the job is known to have had."""
    known_commit: Version = (0, 0)
    """Version of the newest commit that this rank's agent has a record of."""
    parts: Store | None = None
    """Where each rank has a part of its own: sends and takes the snapshots of other keys that were offered."""
    logged: Callable[[], Sequence[LoggedRow]] = tuple
    """Returns the rows of `job.log` that this rank has."""
    check: Callable[[], None] = lambda: None
    """Raises once the group was aborted."""

    def run(self) -> SyncResult:
        """If this raises half-way, `state.clean()` is False and the rank needs the state from another one. Raises
        NoStateError (StateLostError: on all ranks), ValueError (this rank's model differs), broadcast.CorruptError, and
        what `load` raises."""
        state = self.state
        offer = Offer(
            rank=self.rank,
            key=state.shard_key(),
            names=state.shard_names(),
            version=state.version,
            clean=state.clean(),
            established=state.established,
            known_step=self.known_step,
            reached=self.known_commit,
            described=len(state.last_described()),
        )
        offers, saved = _gather(offer, self.world_size), Saved()
        if self.saved is not None and (self.restore != "newest" or not state_source.all_live(offers, self.generation)):
            saved = self.saved()
            self.check()
            offer = msgspec.structs.replace(
                offer,
                snapshot=saved.snapshot,
                older=saved.older,
                others=saved.others,
                checkpoint=saved.checkpoint,
                storage_id=saved.storage_id,
                known_step=max(self.known_step, saved.unusable_step),
            )
            offers = _gather(offer, self.world_size)
            offer, offers = self._seen_by_all(offer, offers, saved.look_again)
        with gc_pause.paused():
            choices, source = self._chosen(offer, offers, saved.look_again)
            choice = choices[offer.key]
            source, nbytes, rows = self._bring_all(choices, source, offers)
        self.check()
        if self.parts is not None:
            self.parts.discard_newer(choice.version)
        return SyncResult(
            step=state.step,
            origin=choice.origin,
            source=source,
            nbytes=nbytes,
            source_rank=choice.source,
            logged=rows,
            reached=state_source.reached(offers),
            key=offer.key,
            keys=len({each.key for each in offers}),
            staged=len({each.names for each in offers}) > 1,
            leads=all(each.rank >= self.rank for each in offers if each.key == offer.key),
        )

    def _seen_by_all(self, offer: Offer, offers: list[Offer], look_again: LookAgain) -> tuple[Offer, list[Offer]]:
        """Where each rank loads a part of its own: a checkpoint that was completed after a rank has looked is seen by
        that one, too."""
        for _ in range(LOOKS):
            newest = max((each.checkpoint or _NONE for each in offers), default=_NONE)
            if offer.key == 0 or all((each.checkpoint or _NONE) == newest for each in offers):
                break
            if (offer.checkpoint or _NONE) < newest:
                time.sleep(LOOK_S)
                checkpoint, storage_id = look_again(())
                offer = msgspec.structs.replace(offer, checkpoint=checkpoint, storage_id=storage_id)
            offers = _gather(offer, self.world_size)
            self.check()
        return offer, offers

    def _chosen(self, own: Offer, offers: Sequence[Offer], look_again: LookAgain) -> tuple[dict[int, Choice], str]:
        """The sources, and the description of the checkpoint that this rank has loaded; '' if it has loaded none yet.

        Only loading shows that a checkpoint is damaged. The one before it may be older than what another rank has, so
        all ranks choose again, by what was really loaded. All make the same number of exchanges.
        """
        source, damaged = "", None
        loaded: set[int] = set()
        passed: list[UnreadableRange] = []
        before = state_source.counted_before(offers, self.restore, self.generation)
        while True:
            try:
                choices = state_source.choose(offers, self.restore, before)
            except state_source.NoStateError:
                if damaged is not None:
                    raise damaged from None  # it lists the checkpoints
                raise
            choice = choices[own.key]
            reads = [each for each in choices.values() if each.origin is Origin.CHECKPOINT]
            if all(each.source in loaded for each in reads):
                return choices, source
            if own.rank == choice.source and choice in reads:
                try:
                    source = self._loaded(choice)
                    version = self.state.version
                except NoGoodCheckpoint as error:
                    print(f"elastic: {error}", file=sys.stderr, flush=True)
                    damaged, version = error, None
                known_step = max(own.known_step, choice.version[1])
                clean = own.clean and version is None and self.state.clean()
                own = msgspec.structs.replace(own, clean=clean, checkpoint=version, known_step=known_step)
            at = {each.source: offers[each.source].storage_id for each in reads}
            offers = _gather(own, len(offers))
            self.check()
            failed = [each for each in reads if offers[each.source].checkpoint != each.version]
            loaded.update(at)
            if failed:
                passed += [
                    UnreadableRange(at[each.source], offers[each.source].checkpoint or _NONE, each.version)
                    for each in failed
                ]
                if len(choices) > 1:  # what one key cannot be had from is of no use to the others
                    loaded.clear()
                # Else each rank of a shared folder would offer the damaged one, and load it.
                if own.rank not in loaded:
                    newest, storage_id = look_again(passed)
                    own = msgspec.structs.replace(own, checkpoint=newest, storage_id=storage_id)
                offers = _gather(own, len(offers))

    def _loaded(self, choice: Choice) -> str:
        assert self.load is not None, "a rank without `load` offers nothing to load"
        return self.load(choice.origin, choice.version)

    def _bring_all(self, choices: dict[int, Choice], source: str, offers: Sequence[Offer]) -> Given:
        given: Given = source, 0, ()
        own = offers[self.rank].key
        # In the same order on all ranks: one may send a part of another key, and receive its own.
        for key, choice in sorted(choices.items()):
            if offers[choice.source].key == key:
                given = self._bring(choice, source, offers[choice.source].described) if key == own else given
            elif self.rank in (choice.source, *choice.needs):
                came = self._pass_on(key, choice)
                given = came if key == own else given
        return given

    def _bring(self, choice: Choice, source: str, described: int) -> Given:
        """`described`: see `Offer`; of the source."""
        # What a rank has loaded meanwhile is in other tensors than those that it has listed.
        early = choice.origin in (Origin.LIVE, Origin.SETUP) and described >= EARLY_TENSORS
        source = source if choice.origin is Origin.CHECKPOINT else choice.origin.value
        if self.rank in choice.needs:
            return self._take(choice, early=early)
        if self.rank == choice.source:
            if choice.origin is Origin.SETUP:
                self.state.establish(self.generation)
            elif choice.origin is Origin.SNAPSHOT:
                source = self._loaded(choice)
            if choice.needs:
                self._give(source, choice, early=early)
        return source, 0, ()

    def _pass_on(self, key: int, choice: Choice) -> Given:
        """The rank that has a snapshot of another key sends it, as it is, to the ranks of that key."""
        chain = (choice.source, *choice.needs)
        previous, following = _neighbours(chain, self.rank)
        assert self.parts is not None
        if previous is None:
            image, data = self.parts.kept_for(key, choice.version).image()
            rows = tuple(row.as_json() for row in self.logged()) if 0 in choice.needs else ()
            p2p.send_bytes(msgspec.msgpack.encode(ImageHeader(image, rows)), following)
            self._relay([torch.frombuffer(data, dtype=torch.uint8)], chain)
            self.check()
            return "", 0, ()
        raw = p2p.receive_bytes(previous)
        p2p.send_bytes(raw, following)
        head = msgspec.msgpack.decode(raw, type=ImageHeader)
        arena = self.parts.arena_for(head.image.nbytes)
        self._relay([torch.frombuffer(arena.fill_from(head.image), dtype=torch.uint8)], chain)
        arena.seal_as(head.image)
        return self.parts.load_arena(arena), head.image.nbytes, [row.from_json() for row in head.logged]

    def _give(self, source: str, choice: Choice, *, early: bool) -> None:
        extra: dict[str, Any] = {}
        rows = tuple(row.as_json() for row in self.logged()) if 0 in choice.needs else ()
        sent = SourceTensors.of(self.state.last_described()) if early else None
        if sent is not None:
            p2p.send_bytes(msgspec.json.encode(sent), choice.needs[0])
        held = self.state.described(extra)  # nothing changes here until all ranks have it
        described, tensors = [each for each, _ in held], [tensor for _, tensor in held]
        ours = SourceTensors.of(described)
        with pull.open_to_readers([each.address for each in described]) as window:
            head = StateHeader(None if ours == sent else ours, extra, source, window, rows)
            p2p.send_bytes(msgspec.json.encode(head), choice.needs[0])
            readers = [bool(p2p.receive_number(rank)) for rank in choice.needs]
            for rank in choice.needs:
                p2p.exchange(torch.tensor(readers, dtype=torch.int64), target=rank)
            dense, rest = _split(tensors, window)
            self._relay(rest, (choice.source, *choice.needs))
            waiting = [rank for rank, reads in zip(choice.needs, readers, strict=True) if not reads]
            self._relay(dense, (choice.source, *waiting))
            reading = [rank for rank in choice.needs if rank not in waiting]
            if reading:
                digests = torch.tensor(pull.digests(*_readable(ours.table, window), self.check), dtype=torch.int64)
                for rank in reading:
                    p2p.exchange(digests, target=rank)
                for rank in reading:
                    p2p.receive_number(rank)  # until that rank has read everything, nothing here may change
        self.check()

    def _take(self, choice: Choice, *, early: bool) -> Given:
        chain = (choice.source, *choice.needs)
        previous, following = _neighbours(chain, self.rank)
        assert previous is not None
        theirs = _received(SourceTensors, previous, following) if early else SourceTensors((), ())
        plan = self.state.receive_plan(theirs.table, theirs.devices)
        head = _received(StateHeader, previous, following)
        if head.tensors is not None:
            theirs = head.tensors
            plan.made.clear()  # before others are made: the memory may not be there twice
        reads = pull.can_read(head.window)
        p2p.send_number(reads, choice.source)
        readers = torch.zeros(len(choice.needs), dtype=torch.int64)
        p2p.exchange(readers, source=choice.source)
        tensors = _adopt(self.state, theirs, head.extra, plan)
        dense, rest = _split(tensors, head.window)
        self._relay(rest, chain)
        if reads:
            where = _readable(theirs.table, head.window)
            digests = torch.tensor(pull.pull(dense, *where, head.window.pid, self.check), dtype=torch.int64)
            sent = torch.empty_like(digests)
            p2p.exchange(sent, source=choice.source)
            p2p.send_number(1, choice.source)
            broadcast.compare(digests, sent)
        else:
            waiting = [r for r, flag in zip(choice.needs, readers.tolist(), strict=True) if not flag]
            self._relay(dense, (choice.source, *waiting))
        self.check()
        self.state.filled()
        rows = [row.from_json() for row in head.logged]
        return head.source, sum(info.nbytes for info in theirs.table), rows

    def _relay(self, tensors: Sequence[torch.Tensor], chain: Sequence[int]) -> None:
        previous, following = _neighbours(chain, self.rank)
        if len(chain) > 1 and any(tensor.numel() for tensor in tensors):
            broadcast.relay(tensors, previous=previous, following=following, check=self.check)


def _gather(offer: Offer, world_size: int) -> list[Offer]:
    """Every rank's, by rank."""
    own, cpu = msgspec.to_builtins(offer), torch.device("cpu")
    offers = shared_values.gather(own, rank=offer.rank, world_size=world_size, device=cpu)
    return [msgspec.convert(each, Offer) for each in offers]


def _received(kind: type[Message], previous: int, following: int | None) -> Message:
    """What rank `previous` has sent, once it is passed on to rank `following`."""
    raw = p2p.receive_bytes(previous)
    p2p.send_bytes(raw, following)
    return msgspec.json.decode(raw, type=kind)


def _adopt(state: State, theirs: SourceTensors, extra: dict[str, Any], plan: ReceivePlan) -> list[torch.Tensor]:
    tensors = state.adopt(theirs.table, extra, plan)
    for info, tensor, device in zip(theirs.table, tensors, theirs.devices, strict=True):
        if device_type(tensor) != device:
            raise ValueError(f"{info.name} lies on {tensor.device.type} here and on {device} at the source")
    return tensors


def _split(tensors: Sequence[torch.Tensor], window: pull.Window) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns (tensors that can be read from the source's memory, the others)."""
    dense: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for tensor, address in zip(tensors, window.addresses, strict=True):
        (dense if address else rest).append(tensor)
    return dense, rest


def _readable(table: Table, window: pull.Window) -> tuple[list[int], list[int]]:
    """(addresses, bytes) of the tensors that can be read from the source's memory."""
    sizes = [info.nbytes for info, address in zip(table, window.addresses, strict=True) if address]
    return [address for address in window.addresses if address], sizes


def _neighbours(chain: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    place = chain.index(rank)
    return chain[place - 1] if place else None, chain[place + 1] if place + 1 < len(chain) else None
