"""The state as of its last commit: returns to it, or detects that this is not possible.

Between two commits a training loop may change anything: a forward updates BatchNorm's statistics, the loop increments
counters, a scheduler steps. If the generation ends in between, the step is repeated, so all of that must be as at the
commit. Small items are copied at each commit and restored. Parameters are large and change in an optimizer step, which
the state observes; they are only watched, in order to detect changes that no optimizer of the state has made.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, MutableMapping, Sequence

import torch

from elastic.worker.state.guards.optimizer_marks import OptimizerMarks
from elastic.worker.state.guards.watch import TensorWatch, versions
from elastic.worker.state.parts.boxes import local
from elastic.worker.state.parts.copies import Copy, Mark, counted, equal, mark, unmarked, writable
from elastic.worker.state.parts.object_parts import ValuePart
from elastic.worker.state.parts.parts import OptimizerPart, Part, Slot
from elastic.worker.torch_internals import torch_private

COPIED_BYTES = 16 * 1024 * 1024
"""Buffers, and tensors held by other parts, are copied at each commit up to this size; larger ones are watched."""

PROMOTED_BYTES = 64 * 1024 * 1024
"""A parameter that changes before the optimizer step (`max_norm`, clipping) is copied up to this size."""

TOTAL_BYTES = 256 * 1024 * 1024
"""Total for buffers and such parameters, and again for tensors held by other parts, such as an average of the
weights. Tensors beyond it are only watched."""

MAX_CHECKED_EACH_STEP = 256
"""Up to this number of watched tensors, changes before the optimizer step are looked for at each step; above it, at
one in `SELDOM`."""

SELDOM = 64


class CommitPoint:
    """One per state. Call `take` at each commit; `changed` and `put_back` when the generation has ended."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts
        self._promoted: set[str] = set()
        self._taken = False
        self.again = False
        """Taken more than once since the last `drop`, a step was committed since `train` was entered; or all was as it
        was then when the first round began: what a loop's first batch finds changed was changed where it must not."""
        self._stale = True
        self._steps = 0
        self._stepped: set[int] = set()
        self._swapped: dict[str, torch.Tensor] = {}
        """Parameters that their optimizer swaps for an average and back by arithmetic, with `eval()` and `train()`, as
        those of schedulefree: whether they are what they were is a matter of their last digits, and changes."""
        self._swapped_at: list[int] = []
        self._watched: list[Slot] = []
        self._entries: list[tuple[MutableMapping[str, torch.Tensor | None], str]] = []
        """Holder and key of each of them: of each slot its attributes take longer to read than the tensor."""
        self._saved = SavedTensors([])
        self._watch = TensorWatch()
        self._optimizers: dict[str, OptimizerMarks] = {}
        self._held = 0
        """Number of tensors in the optimizers' state."""
        self._large: list[tuple[str, torch.Tensor]] = []
        self._rests: dict[str, Copy | None] = {}
        self._room_bytes = TOTAL_BYTES
        """Bytes that may still be copied of the parts' rests; used while they are made."""

    def drop(self) -> None:
        """Another state is adopted: there is no commit to return to. Modules may have changed, too."""
        self._taken, self.again, self._stale = False, False, True
        self._rests = {}

    def take(self) -> None:
        """Record the current state as committed. Raises CannotEncodeError."""
        if self._stale:
            self._look()
        self._rests = self._rests_now()
        self._large = [
            (name, tensor)
            for name, rest in self._rests.items()
            if rest is not None and rest.tensors
            for tensor, saved in zip(rest.tensors, rest.saved, strict=True)
            if saved is None
        ]
        tensors = self._tensors()
        if self._stale:
            self._look()
            tensors = self._tensors()
        self._watch.take(tensors)
        if self._swapped:
            self._swapped_at = versions(list(self._swapped.values()))
        self._held = sum(marks.take() for marks in self._optimizers.values())
        self._saved.take()
        self._taken, self.again = True, self._taken

    def round_begins(self) -> None:
        """The body of a `job.epochs` is entered: what is made there up to its first batch is made again after a
        failure."""
        self.again = self.again or (self._taken and self.differs() is None)

    def before_step(self) -> None:
        """The first optimizer of a step is about to change the state: changes so far were made by a forward or by
        the loop. What they changed is copied from the next commit on."""
        self._steps += 1
        if self._taken and (
            len(self._watched) <= MAX_CHECKED_EACH_STEP
            or self._steps < MAX_CHECKED_EACH_STEP // SELDOM
            or self._steps % SELDOM == 0
        ):
            self._promote(self._watch.stepped(self._tensors()))

    def changed(self) -> str | None:
        """Name of the first changed item that cannot be restored, None if there is none. Waits for the device."""
        if not self._taken:
            return None
        places = self._watch.changed(self._tensors())
        self._promote(places)
        return self._name_at(places[0]) if places else self._optimizer_changed()

    def put_back(self) -> None:
        """Restore everything that is copied."""
        if not self._taken:
            return
        self._saved.put_back()
        rests = self._rests_now()
        for name, part in self._parts.items():
            kept, now = self._rests.get(name), rests[name]
            if kept is not None:
                kept.put_tensors_back()
                if now is None or not kept.same(now):
                    part.put_back(kept.restored())

    def differs(self) -> str | None:
        """Name of the first item that differs from the commit, even if it could be restored; None if none does.
        Fast."""
        if not self._taken:
            return None
        if self._swapped and (at := versions(list(self._swapped.values()))) != self._swapped_at:
            return next(name for name, a, b in zip(self._swapped, at, self._swapped_at, strict=True) if a != b)
        look = len(self._watched) <= MAX_CHECKED_EACH_STEP or self._steps % SELDOM == 1
        if look and (places := self._watch.differs(self._tensors())):
            return self._name_at(places[0])
        look = self._held <= MAX_CHECKED_EACH_STEP or self._steps % SELDOM == 1
        if look and (name := self._optimizer_changed()) is not None:
            return name
        if (name := self._saved.changed()) is not None:
            return name
        now = self._rests_now()
        for name, kept in self._rests.items():
            rest = now[name]
            value = isinstance(self._parts[name], ValuePart)  # its tensors are other objects only if they were set
            if not (kept is rest if kept is None or rest is None else kept.same(rest, wait=value)):
                return name
        return None

    def _optimizer_changed(self) -> str | None:
        return next((f"{name}.state" for name, marks in self._optimizers.items() if marks.changed()), None)

    def _look(self) -> None:
        """List the tensors, and choose which to copy and which to watch."""
        self._stale = False
        optimizers = [part for part in self._parts.values() if isinstance(part, OptimizerPart)]
        self._stepped = {id(param) for part in optimizers for param in part.stepped()}
        self._optimizers = {part.name: OptimizerMarks(part.value) for part in optimizers}
        seen: set[int] = set()
        total = 0
        watched: list[Slot] = []
        saved: list[Slot] = []
        for part in self._parts.values():
            for slot in part.slots():
                tensor = slot.holder[slot.key]
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                copied = slot.name in self._promoted or (slot.is_buffer and tensor.nbytes <= COPIED_BYTES)
                copied = copied and total + tensor.nbytes <= TOTAL_BYTES
                total += tensor.nbytes if copied else 0
                (saved if copied else watched).append(slot)
        theirs = {id(param) for part in optimizers if _swaps(part.value) for param in part.stepped()}
        slots = ((slot.name, slot.holder[slot.key]) for slot in (*watched, *saved) if theirs)
        self._swapped = {name: tensor for name, tensor in slots if tensor is not None and id(tensor) in theirs}
        self._watched, self._saved, self._watch = watched, SavedTensors(saved), TensorWatch()
        self._entries = [(slot.holder, slot.key) for slot in watched]

    def _tensors(self) -> list[torch.Tensor]:
        try:
            tensors = [tensor for holder, key in self._entries if (tensor := holder[key]) is not None]
        except KeyError:  # a parameter was taken out of its module (pruning, parametrizations, fully_shard)
            self._stale = True
            tensors = []
        tensors += [tensor for _, tensor in self._large]
        return tensors

    def _name_at(self, place: int) -> str:
        if place < len(self._watched):
            return self._watched[place].name
        place -= len(self._watched)
        return self._large[place][0] if place < len(self._large) else "a parameter"

    def _promote(self, places: Sequence[int]) -> None:
        if not places:
            return
        slots = [self._watched[place] for place in places if place < len(self._watched)]
        fit = {s.name for s in slots if (t := s.holder.get(s.key)) is not None and t.nbytes <= PROMOTED_BYTES}
        if fit - self._promoted:
            self._promoted |= fit
            self._stale = True

    def _rests_now(self) -> dict[str, Copy | None]:
        self._room_bytes = TOTAL_BYTES
        return {name: part.rest(self._rests.get(name), self._is_watched) for name, part in self._parts.items()}

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._stepped or tensor.nbytes > COPIED_BYTES:
            return True
        self._room_bytes -= tensor.nbytes
        return self._room_bytes < 0


class SavedTensors:
    """Copies of tensors held in dictionaries: a module's buffers, where the entry may be another tensor next time."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._tensors: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._copies: list[torch.Tensor | None] = []
        self._always: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """(copies, tensors) that are copied each time; each pair of lists has one dtype on one device."""
        self._counted: dict[int, Mark] = {}
        """Place -> mark, of those that are copied only if that has changed."""

    def take(self) -> None:
        if self._slots:
            self._take()

    def _now(self) -> list[torch.Tensor | None]:
        """Of DTensors what is in this rank's memory."""
        return [None if (held := slot.holder.get(slot.key)) is None else local(held) for slot in self._slots]

    @torch.no_grad()
    def _take(self) -> None:
        tensors = self._now()
        if len(tensors) != len(self._tensors) or not all(map(operator.is_, tensors, self._tensors)):
            self._begin(tensors)
        elif any(copy.shape != tensor.shape for pair in self._always for copy, tensor in zip(*pair, strict=True)):
            self._begin(tensors)  # resized in place
        else:
            for pair in self._always:
                torch_private.foreach_copy(*pair)
            for place, then in self._counted.items():
                tensor, copy = tensors[place], self._copies[place]
                if tensor is not None and copy is not None and (now := mark(tensor)) != then:
                    self._counted[place] = now
                    copy.copy_(tensor)
        self._versions = versions([tensor for tensor in tensors if tensor is not None])

    def _begin(self, tensors: list[torch.Tensor | None]) -> None:
        self._tensors = tensors
        self._copies = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
        pairs = [
            (place, copy, tensor)
            for place, (copy, tensor) in enumerate(zip(self._copies, tensors, strict=True))
            if copy is not None and tensor is not None
        ]
        self._counted = {place: mark(tensor) for place, _, tensor in pairs if counted(tensor)}
        groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for _, copy, tensor in pairs:
            if not counted(tensor):
                copies, originals = groups.setdefault((tensor.dtype, tensor.device), ([], []))
                copies.append(copy)
                originals.append(tensor)
        self._always = list(groups.values())

    def changed(self) -> str | None:
        """Name of the first entry that is another tensor or has other contents. A tensor whose version counter has
        moved is compared with its copy, which waits for the device."""
        now = self._now()
        for slot, tensor, before in zip(self._slots, now, self._tensors, strict=False):
            if tensor is not before:
                return slot.name
        held = zip(self._slots, self._tensors, self._copies, strict=False)
        there = [(slot.name, tensor, copy) for slot, tensor, copy in held if tensor is not None and copy is not None]
        counters = versions([tensor for _, tensor, _ in there])
        for (name, tensor, copy), version, before_it in zip(there, counters, self._versions, strict=True):
            if version != before_it and not equal(tensor, copy):
                return name
        self._versions = counters
        return None

    @torch.no_grad()
    def put_back(self) -> None:
        for i, (slot, copy, tensor) in enumerate(zip(self._slots, self._copies, self._now(), strict=False)):
            if copy is None:
                slot.holder[slot.key] = None
            elif (
                tensor is not None
                and tensor is self._tensors[i]
                and i in self._counted
                and unmarked(tensor, self._counted[i])
            ):
                continue
            elif tensor is None or tensor.shape != copy.shape or tensor.dtype != copy.dtype:
                slot.holder[slot.key] = copy.clone()
            elif writable(tensor):
                tensor.copy_(copy)
            elif not equal(tensor, copy):
                slot.holder[slot.key] = copy.clone()


def _swaps(optimizer: torch.optim.Optimizer) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))
