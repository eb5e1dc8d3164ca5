"""Histories of a sharded job's snapshots: what lies in which node's memory, when ranks and nodes die at any instant.

The model has nodes, ranks with a part each, and events. The product's own decisions run in it: which buffer is
filled next (`Buffers`), who has a copy of whose part (`buddies`), what a rank finds in its node's memory (`kept_in`),
where all go on from (`choose`), and what is discarded then (`Store.discard_newer`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from elastic.checkpoint.memory.buffers import Buffers
from elastic.contract.origin import Origin
from elastic.worker.comm.direct import Endpoint
from elastic.worker.snapshots.buddy import Neighbour, buddies, least_needed
from elastic.worker.state.handover.restore import Kept, Store, kept_in
from elastic.worker.state.state_source import Choice, NoStateError, Offer, Version, choose

NOTHING: Version = (-1, -1)
EVENTS = 60


class Broken(AssertionError):
    """A promise was broken."""


class Header(NamedTuple):
    complete: bool
    generation: int
    step: int
    shard: int
    shards: int
    parts: int = 1


class Content(NamedTuple):
    """What is in a rank's state or in an arena: its part, its version, and the history that has led to it."""

    key: int
    version: Version
    chain: int
    rank: int


@dataclass(eq=False)
class Memory:
    """An arena."""

    world_size: int
    content: Content | None = None

    def header(self) -> Header:
        held = self.content
        generation, step = held.version if held else NOTHING
        return Header(held is not None, generation, step, held.rank if held else -1, self.world_size)

    def key(self) -> int:
        return self.content.key if self.content else 0

    def clear(self) -> None:
        self.content = None

    def close(self) -> None: ...


@dataclass(eq=False)
class Node:
    """Its memory outlives its workers, and ends with it."""

    slots: int
    world_size: int
    own: list[Buffers] = field(default_factory=list)
    guests: list[Buffers] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wiped()

    def wiped(self) -> None:
        self.own, self.guests = ([self._pair() for _ in range(self.slots)] for _ in range(2))

    def _pair(self) -> Buffers:
        buffers = Buffers(keep_newest=True)
        buffers.replace([Memory(self.world_size), Memory(self.world_size)])  # type: ignore[list-item]
        return buffers

    def memories(self) -> list[Memory]:
        return [arena for buffers in (*self.own, *self.guests) for arena in buffers.arenas]  # type: ignore[misc]


@dataclass
class Rank:
    key: int
    live: Content | None = None
    clean: bool = True
    filling: Memory | None = None
    sending: Memory | None = None
    """The snapshot that is on its way to the buddy."""
    receiving: Memory | None = None
    """Where its buddy writes it."""


class World:
    """`play` raises Broken."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        nodes, self.slots = dice.choice([(2, 1), (2, 2), (3, 1), (3, 2)])
        self.size = nodes * self.slots
        replicas = dice.random() < 0.3
        self.nodes = [Node(self.slots, self.size) for _ in range(nodes)]
        self.ranks = [Rank(1 + (rank % self.slots if replicas else rank)) for rank in range(self.size)]
        self.generation, self.chain, self.step = 0, 0, 0
        self.chains: dict[Version, int] = {}
        """Version -> the one history that has led to it."""
        self.disk: Version = NOTHING
        self.on_disk: dict[Version, int] = {}
        self.whole = self.copied = NOTHING
        """Newest snapshot that all ranks have had, and that of which each part was on two nodes, since the last
        recovery in which it could be lost."""
        self.dead_nodes: set[int] = set()
        self.dead = False
        self.begun = False

    def play(self) -> None:
        self.recover(self._all_live)
        for _ in range(EVENTS):
            act = self.dice.choices(
                [self.commit, self.snapshot, self.transfer, self.save, self.rank_dies, self.node_dies],
                [30, 14, 24, 2, 4, 4],
            )[0]
            act()
            if self.dead:
                self.again()

    def place(self, rank: int) -> Node:
        return self.nodes[rank // self.slots]

    # ── training ────────────────────────────────────────────────────────────────────────────────────────────

    def commit(self) -> None:
        self.settle()
        self.step += 1
        self.chain = hash((self.chain, self.generation, self.step))
        torn = self.dice.random() < 0.08
        done = [rank for rank in range(self.size) if not torn or self.dice.random() < 0.5]
        if torn:  # a rank dies within it
            self.dead = True
            self.ranks[self.dice.randrange(self.size)].live = None
        version = (self.generation, self.step)
        for number, rank in enumerate(self.ranks):
            if rank.live is not None and number in done:
                rank.live = Content(rank.key, version, self.chain, number)
            elif rank.live is not None and self.dice.random() < 0.5:
                rank.clean = False
        if done:
            self.chains.setdefault(version, self.chain)

    def snapshot(self) -> None:
        """All ranks take one, if all can; a death may strike between any two."""
        self.settle()
        if any(rank.sending for rank in self.ranks) or not self._stepped():
            return
        buffers = [self.place(rank).own[rank % self.slots] for rank in range(self.size)]
        if any(each.free() is None for each in buffers):
            return
        order = list(range(self.size))
        self.dice.shuffle(order)
        for number in order:
            self.ranks[number].filling = self._buffer(buffers[number])
            if self.dice.random() < 0.01:
                self.rank_dies()
                break

    def _buffer(self, buffers: Buffers) -> Memory:
        """That which is to be filled now; what was in it is gone."""
        free = buffers.free()
        assert free is not None
        memory: Any = buffers.arenas[free]
        memory.clear()
        return cast("Memory", memory)

    def settle(self) -> None:
        """The copies under way are complete, and on their way to the buddies."""
        if any(rank.filling is None for rank in self.ranks):
            return
        to = buddies(self.neighbours())
        for number, rank in enumerate(self.ranks):
            assert rank.filling is not None
            rank.filling.content = rank.live
            if to.get(number) is not None:
                rank.sending = rank.filling
            rank.filling = None
        self.whole = (self.generation, self.step) if self.ranks[0].live else self.whole
        self._is_copied(self.whole)

    def transfer(self) -> None:
        """One copy gets on: it begins to overwrite, or is complete."""
        under_way = [number for number, rank in enumerate(self.ranks) if rank.sending]
        if not under_way:
            return
        number = self.dice.choice(under_way)
        rank, to = self.ranks[number], buddies(self.neighbours())[number]
        assert to is not None
        guests = self.place(to).guests[to % self.slots]
        assert rank.sending is not None
        arenas: Any = guests.arenas
        if any(arena.content == rank.sending.content for arena in arenas):
            rank.sending = None
        elif rank.receiving is None:
            least: Any = least_needed(arenas, rank.key)
            least.clear()
            rank.receiving = least
        else:
            rank.receiving.content, rank.sending, rank.receiving = rank.sending.content, None, None
        self._is_copied(self.whole)

    def _is_copied(self, version: Version) -> None:
        if not any(rank.sending for rank in self.ranks):
            self.copied = version

    def save(self) -> None:
        self.settle()
        if not self._stepped():
            return
        self.disk = (self.generation, self.step)
        self.on_disk[self.disk] = self.chain

    def _stepped(self) -> bool:
        """Whether this generation has committed a step."""
        return (self.generation, self.step) in self.chains

    def neighbours(self) -> list[Neighbour]:
        return [
            Neighbour(rank.key, number // self.slots, number % self.slots, Endpoint())
            for number, rank in enumerate(self.ranks)
        ]

    # ── deaths ──────────────────────────────────────────────────────────────────────────────────────────────

    def rank_dies(self) -> None:
        self.dead = True
        self.ranks[self.dice.randrange(self.size)].live = None

    def node_dies(self) -> None:
        self.dead = True
        at = self.dice.randrange(len(self.nodes))
        self.dead_nodes.add(at)
        self.nodes[at].wiped()
        for number in range(at * self.slots, (at + 1) * self.slots):
            self.ranks[number].live = None

    def again(self) -> None:
        """A generation forms, perhaps several times: ranks die in each."""
        while True:
            for rank in self.ranks:
                rank.filling = rank.sending = rank.receiving = None
                if rank.live is None:
                    rank.clean = True
            struck = self.dice.random() < 0.25
            self.recover(self._some_live if struck else self._all_live)
            if not struck:
                return
            self.dice.choice([self.rank_dies, self.node_dies])()

    # ── recovery ────────────────────────────────────────────────────────────────────────────────────────────

    def recover(self, load: Callable[[dict[int, Choice], list[Store]], None]) -> None:
        self.generation += 1
        stores = [self._store(number) for number in range(self.size)]
        offers = [self._offer(number, stores[number]) for number in range(self.size)]
        try:
            choices = choose(offers)
        except NoStateError:
            self._promise(NOTHING)
            choices = choose([self._anew(number) for number in range(self.size)])
        versions = {choice.version for choice in choices.values()}
        if len(versions) != 1:
            raise Broken(f"several versions in one world: {versions}")
        if self.begun:
            self._promise(*versions)
        self.begun = True
        load(choices, stores)

    def _promise(self, version: Version) -> None:
        promised = self.whole if not self.dead_nodes else self.copied if len(self.dead_nodes) == 1 else self.disk
        if version < max(promised, self.disk):
            raise Broken(f"back to {version}: {promised} was promised, with nodes {self.dead_nodes} lost")

    def _store(self, number: int) -> Store:
        store = Store(None, None, None, None)  # type: ignore[arg-type]
        memories: Any = self.place(number).memories()
        store._kept, store._others = kept_in(memories, self.ranks[number].key, number, self.size)
        return store

    def _offer(self, number: int, store: Store) -> Offer:
        rank = self.ranks[number]
        own = (*dict.fromkeys(version for version, _ in store._kept), None, None)
        return Offer(
            rank=number,
            key=rank.key,
            version=rank.live.version if rank.live else (0, 0),
            clean=rank.clean,
            established=rank.live is not None and rank.live.version != (0, 0),
            snapshot=own[0],
            older=own[1],
            others=tuple((each.key, version) for version, each in store._others if version),
            checkpoint=self.disk if self.disk != NOTHING else None,
        )

    def _anew(self, number: int) -> Offer:
        self.chains.clear()
        self.chain, self.step = 0, 0
        return Offer(rank=number, key=self.ranks[number].key, version=(0, 0), clean=True, established=False)

    def _all_live(self, choices: dict[int, Choice], stores: list[Store]) -> None:
        self._load(choices, stores, range(self.size))
        (version,) = {choice.version for choice in choices.values()}
        for number, rank in enumerate(self.ranks):
            assert rank.live is not None
            if (rank.live.key, rank.live.version) != (rank.key, version) or rank.live.chain != self._chain(version):
                raise Broken(f"rank {number} has {rank.live} of {version}")
        for store in stores:
            store.discard_newer(version)
        self.step, self.chain = version[1], self._chain(version)
        if self.dead_nodes:  # its neighbour has what came from there; what the lost node had for others is gone
            self.copied = NOTHING
            if {choice.origin for choice in choices.values()} != {Origin.SNAPSHOT}:
                self.whole = NOTHING
        kept = version if version != (0, 0) else NOTHING  # what `setup` has built anew is in no memory
        self.whole, self.copied = min(self.whole, kept), min(self.copied, kept)
        self.dead, self.dead_nodes = False, set()
        self._send_newest()

    def _send_newest(self) -> None:
        """The last generation may have ended within a copy."""
        to = buddies(self.neighbours())
        for number, rank in enumerate(self.ranks):
            newest: Any = self.place(number).own[number % self.slots].newest()
            if to.get(number) is not None and newest is not None:
                rank.sending = newest

    def _some_live(self, choices: dict[int, Choice], stores: list[Store]) -> None:
        """The generation breaks before all have it."""
        self._load(choices, stores, [rank for rank in range(self.size) if self.dice.random() < 0.5])

    def _load(self, choices: dict[int, Choice], stores: list[Store], ranks: Any) -> None:
        given: dict[int, Content] = {}
        for key, choice in choices.items():
            given[key] = self._source(key, choice, stores[choice.source])
        for number in ranks:
            rank, choice = self.ranks[number], choices[self.ranks[number].key]
            if number in choice.needs or number == choice.source:
                rank.live, rank.clean = given[rank.key]._replace(rank=number), True
                if self.ranks[choice.source].key != rank.key:  # received into this node's memory, and loaded from there
                    self._buffer(self.place(number).own[number % self.slots]).content = rank.live

    def _source(self, key: int, choice: Choice, store: Store) -> Content:
        rank = self.ranks[choice.source]
        if choice.origin == "setup" or choice.origin == "checkpoint":
            return Content(key, choice.version, self._chain(choice.version), choice.source)
        if choice.origin == "live":
            assert rank.live is not None
            return rank.live
        kept: Kept = store._kept if rank.key == key else store._others
        held: Any = next(each for version, each in kept if version == choice.version and each.key == key)
        content = held._arenas[0].content
        assert content is not None
        return content

    def _chain(self, version: Version) -> int:
        return 0 if version == (0, 0) else self.on_disk.get(version, self.chains.get(version, -1))
