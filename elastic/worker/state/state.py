"""The state of a training job that is carried from step to step: everything that must survive, and nothing else."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from elastic.checkpoint.format.json_values import Codecs
from elastic.checkpoint.format.manifest import ITEM_BYTES
from elastic.contract.worker.tensor_table import Table, TensorInfo
from elastic.worker.link.misuse import MisuseAttributeError, MisuseRuntimeError, MisuseTypeError, MisuseValueError
from elastic.worker.state.parts.boxes import WHOLE, Accepted, box_of, local
from elastic.worker.state.parts.data_progress import DataProgress
from elastic.worker.state.parts.described import Described
from elastic.worker.state.parts.object_parts import ValuePart, object_part
from elastic.worker.state.parts.parts import ModulePart, OptimizerPart, Part, optimizer_part
from elastic.worker.torch_internals import gc_pause
from elastic.worker.torch_internals.torch_private import pytree

from .commit_point import CommitPoint
from .guards import left_behind
from .modes import Hooks, Modes
from .optimizers import Optimizers, is_sharded, sharded
from .receive_plan import (
    InitialLayout,
    ReceivePlan,
    listed,
    mismatch,
    own_tensors,
    refuse_lazy,
    refuse_other_boxes,
    refuse_sharded,
    reorder,
)
from .state_source import Version

FORMAT = 1
"""Format of `State.extra`."""

PROVEN_COMMITS = 2
"""At the first commits of a process everything is encoded once, as for a replacement, so that what cannot be encoded
is refused there."""


class Parked(NamedTuple):
    """A rank's part of a state, kept while `setup` builds it anew."""

    table: Table
    extra: dict[str, Any]
    tensors: list[torch.Tensor]


class State:
    """The state of a job, made of named parts.

        elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, best_loss=math.inf)

    A part is a module, an optimizer, any object with ``state_dict`` and ``load_state_dict``, a random generator, or a
    plain value (numbers, text, lists, dicts, tensors). Plain values are attributes: ``state.best_loss = 1.5``.
    `convert` maps further types to and from JSON: ``{SomeType: (to_json, from_json)}``.

    Raises CannotEncodeError for a value that JSON cannot hold and `convert` does not cover; TypeError for sharded
    modules and optimizers (FSDP, DTensor), lazy modules without shapes and tensors that are not dense; ValueError for a
    part name that is taken.

    Main thread only.
    """

    def __init__(self, *, convert: Codecs | None = None, **parts: Any) -> None:
        self._parts: dict[str, Part] = {}
        self._codecs = dict(convert or {})
        self._step = 0
        self._commit_generation = 0
        self._changing = False
        self._whole = True
        self._established = False
        self._coming: tuple[int, int] | None = None
        self._guard: Callable[[], None] | None = None
        self._proven = 0
        self._described: dict[str, Described] = {}
        self._tied: dict[str, str] = {}
        """Further name of a tensor that modules share -> its name in the table; as `tensors` found it."""
        self._point = CommitPoint(self._parts)
        self._optimizers = Optimizers(self.changing, self._parts, self._parameters)
        self._modes: Modes | None = None
        self._built: InitialLayout | None = None
        self._progress = DataProgress()
        self._sharded = Accepted.sharded
        self._fsdp_modules: list[Any] | None = None
        for name, value in parts.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise MisuseValueError(f"state.{name}: this name is taken; choose another")
            if "." in name:  # tensors are named by part and path
                raise MisuseValueError(f"state.{name}: no dot in the name of a part; choose another")
            self._parts[name] = self._part(name, value)
        self._listed()  # raises now, not at the first checkpoint, for what cannot be encoded
        self._optimizers.listen()

    # ── attributes ──────────────────────────────────────────────────────────────────────────────────────────

    def __getattr__(self, name: str) -> Any:
        if (part := self.__dict__.get("_parts", {}).get(name)) is not None:
            return part.value
        # No misuse: a script may ask whether there is such a part, and what it raises meanwhile has this as context.
        raise AttributeError(self._unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif isinstance(self._parts.get(name), ValuePart):
            part = self._part(name, value)
            part.held()
            self._parts[name] = part
        elif name in self._parts:
            raise MisuseAttributeError(
                f"state.{name} stays the object it was built with: load into it, or let setup() build all that is used"
            )
        elif hasattr(type(self), name):
            raise MisuseAttributeError(f"state.{name} cannot be set")
        else:
            raise MisuseAttributeError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._parts, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "parts are named when it is built, State(…, name=value)"
        return f"the state has no part {name!r}: {hint}"

    def _part(self, name: str, value: Any) -> Part:
        if isinstance(value, torch.nn.Module):
            refuse_sharded(name, value)
            refuse_lazy(name, value)
            return ModulePart(name, value, self._codecs)
        if isinstance(value, torch.optim.Optimizer):
            if is_sharded(value):
                raise MisuseTypeError(f"state.{name}: {sharded(type(value).__name__)}")
            self._optimizers.own(value)
            return optimizer_part(name, value, self._codecs)
        return object_part(name, value, self._codecs)

    # ── version and commits ─────────────────────────────────────────────────────────────────────────────────

    @property
    def step(self) -> int:
        """Number of committed optimizer steps."""
        return self._step

    @property
    def version(self) -> Version:
        """(commit_generation, step): the generation in which the last step was committed, or in which the initial state
        was sent to all ranks; 0: none yet. Standalone it is 0 until the first commit. Two consistent states with the
        same version are bit-identical."""
        return self._commit_generation, self._step

    @property
    def established(self) -> bool:
        """Whether this is the job's state (a step was committed, or it was received), not merely what `setup` built."""
        return self._established

    @property
    def data_progress(self) -> DataProgress:
        """Not for scripts."""
        return self._progress

    def clean(self) -> bool:
        """Whether the state is consistent: not between an optimizer step and the commit, and not partly received."""
        return self._whole and not self._changing

    def committed(self, generation: int) -> None:
        """Commit one more step, in `generation`. Raises CannotEncodeError or TypeError for anything that could not be
        sent to a replacement later, RuntimeError for a partly received state, and for a scheduler that is no part; the
        step is then not committed."""
        if not self._whole:
            raise RuntimeError("commit of a state that was only half received")
        self.reshard()
        self._optimizers.refuse_schedulers()
        if self._optimizers.regrouped() or self._proven < PROVEN_COMMITS:
            self._prove()
        self._point.take()
        now = self.__dict__  # at each step: `__setattr__` costs a microsecond
        now["_step"] += 1
        # Never backwards: a job that continued from another job's checkpoint counts its generations from the start.
        now["_commit_generation"] = max(self._commit_generation, generation)
        now["_changing"] = False
        now["_established"] = True
        if not self._progress.committed() and self._modes is not None:
            self._modes.commit()

    def begin(self) -> None:
        """A generation is about to train: record the current state as the one the first step begins with."""
        self._point.drop()
        self._point.take()
        if self._built is None:
            self._built = InitialLayout(*self._listed(), self.buffers())

    def loop_begins(self) -> None:
        """A loop asks for its first batch. Raises RuntimeError as `turned`, see `CommitPoint.again`."""
        if self._point.again:
            self.turned()
        self._flags().loop_begins()

    def round_begins(self) -> None:
        self._point.round_begins()

    def turned(self) -> None:
        """The loop asks for its next batch. Raises RuntimeError if the state was changed after the commit."""
        self.reshard()
        if not self._changing and (name := self._point.differs()) is not None:
            raise MisuseRuntimeError(
                f"state.{name} was changed between job.commit() and the next batch: after a failure it would be left "
                "out, or made again. Make it before job.commit(), or after the next batch was taken: what begins an "
                "epoch, as a learning rate, moves into the inner loop, to its first turn; what ends one stands behind "
                "the inner loop in `for epoch in job.epochs(…):`, see docs/loop.md"
            )

    def rewind(self) -> str | None:
        """The generation has ended, perhaps within a step: return to the last commit if possible.

        Buffers, plain values, schedules and options are restored. Returns the name of a parameter that was changed
        other than by an optimizer of the state, which makes the state inconsistent. None: the state was restored, or
        was inconsistent before.
        """
        if not self.clean():
            return None
        if (name := self._point.changed()) is not None:
            self._changing = True
            return name
        self._point.put_back()
        return None

    def changing(self) -> None:
        """Declare that the state changes from here until the next commit. Optimizers of the state do so by themselves.
        For code that changes parameters in another way, such as a CUDA graph that includes the optimizer step. All
        ranks call it at the same point. Like `Job.commit`, it may not return."""
        if self._guard is not None:
            self._guard()
        if not self._changing:
            self._point.before_step()
            self.__dict__["_changing"] = True  # as in `committed`

    def watch_optimizers(self, guard: Callable[[], None] | None) -> None:
        """Call `guard` before each optimizer step; it raises if the gradients must not be applied.

        After an abort CUDA continues with queued work: gradients whose all-reduce was not seen to complete on this rank
        have arbitrary contents. An exception from `guard` leaves the state consistent.
        """
        self._guard = guard
        self._optimizers.refuses = guard is not None

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part in self._parts.values():
            for slot in part.slots():
                if (tensor := slot.holder[slot.key]) is not None and not slot.is_buffer:
                    yield slot.name, tensor
            if isinstance(part, ValuePart):
                leaves = pytree.tree_leaves(part.value)
                yield from ((part.name, leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _prove(self) -> None:
        """Check that the present contents can be encoded. An optimizer has its state after its first or second step."""
        self._proven += 1
        for part in self._parts.values():
            if isinstance(part, ModulePart):
                refuse_sharded(part.name, part.value)
        self._optimizers.look_for_unkept()
        for part in self._optimizer_parts():
            refuse_other_boxes(part)
        self.refuse_growth(*self._listed())

    def refuse_growth(self, table: Table, extra: Mapping[str, Any]) -> None:
        """`table` and `extra`: the present contents. Raises TypeError if a replacement could not receive them, as
        `setup` has built something else."""
        if self._built is not None:
            self._built.refuse_others(table, extra)

    # ── contents ────────────────────────────────────────────────────────────────────────────────────────────

    @gc_pause.paused()
    def tensors(
        self, extra: dict[str, Any] | None = None, *, own: bool = True
    ) -> list[tuple[TensorInfo, torch.Tensor]]:
        """All tensors, sharing storage with the state; the order is the same on every rank. None needs a gradient.

        With `own` each is an object of its own, which keeps its memory while the state goes on; without it, quicker,
        it may be the state's object. Weights that modules share (tied) appear once, under their first name. If `extra`
        is given, it is filled with what `extra()` returns, from the same walk. Raises CannotEncodeError.
        """
        return [(each.info, tensor) for each, tensor in self.described(extra, own=own)]

    @gc_pause.paused()
    def described(
        self, extra: dict[str, Any] | None = None, *, own: bool = False
    ) -> list[tuple[Described, torch.Tensor]]:
        """As `tensors`, with what else is known of each tensor."""
        parts: dict[str, Any] = {}
        tensors, self._tied, self._described = self._walk(self._parts.values(), parts, own)
        if extra is not None:
            extra.update(self._with(parts))
        return tensors

    def last_described(self) -> list[Described]:
        """What the last walk over the state has found: the tensors may be others by now."""
        return [each for name, each in self._described.items() if name not in self._tied]

    def _walk(
        self, parts: Iterable[Part], extras: dict[str, Any], own: bool = False
    ) -> tuple[list[tuple[Described, torch.Tensor]], dict[str, str], dict[str, Described]]:
        """(the tensors of `parts`, tied names, descriptions by name); `extras` is filled by part."""
        first: dict[object, str] = {}
        tied: dict[str, str] = {}
        entries: list[tuple[Described, torch.Tensor]] = []
        described: dict[str, Described] = {}
        before = self._described
        for part in parts:
            tensors, extras[part.name] = part.held()
            module = isinstance(part, ModulePart)
            for name, held in tensors:
                tensor, was = local(held), before.get(name)
                if was is None or not was.still(tensor):
                    was = Described(name, tensor, box_of(held))
                described[name] = was
                if module and (known := first.setdefault(was.place(tensor), name)) != name:
                    tied[name] = known
                    continue
                entries.append((was, tensor.detach() if own or tensor.requires_grad else tensor))
        return entries, tied, described

    def volatile(self) -> set[str]:
        """Names of the tensors that may change other than in an optimizer step, such as buffers, which a forward
        changes."""
        stepped = {id(param) for _, _, param in self._groups()}
        names = {name for part in self._parts.values() for name, t in part.held()[0] if id(t) not in stepped}
        for part in self._optimizer_parts():
            names = {name for name in names if not (name.startswith(f"{part.name}.") and ".state." in name)}
        return names

    def stepped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters that an optimizer of the state may step, each once, by name."""
        names = {id(tensor): name for name, tensor in self._parameters()}
        found = {id(param): (f"{part}'s parameter {number}", param) for part, number, param in self._groups()}
        yield from ((names.get(key, name), param) for key, (name, param) in found.items())

    def optimizer_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What the optimizers keep, by name."""
        return [each for part in self._optimizer_parts() for each in part.held()[0]]

    def rates(self) -> dict[str, float]:
        """The learning rate of each parameter group, by name."""
        return {
            f"{part.name}.param_groups[{number}]['lr']": float(group["lr"])
            for part in self._optimizer_parts()
            for number, group in enumerate(part.value.param_groups)
            if "lr" in group
        }

    def _optimizer_parts(self) -> list[OptimizerPart]:
        return [part for part in self._parts.values() if isinstance(part, OptimizerPart)]

    def _groups(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(optimizer, number, parameter) of all that they step."""
        for part in self._optimizer_parts():
            for number, param in enumerate(part.stepped()):
                yield part.name, number, param

    def reshard(self) -> None:
        """A forward without a backward, as an evaluation, leaves FSDP's parameters unsharded: they are no state."""
        if self._sharded and self._fsdp_modules is None:
            found = (inner for module in self.modules() for inner in module.modules())
            self._fsdp_modules = [m for m in found if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]
        for module in self._fsdp_modules or ():
            module.reshard()

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has, and restores, a part of its own."""
        return self._sharded

    def shard_key(self) -> int:
        """Equal on ranks that hold the same tensors, and the same boxes of them, in their modules: they are replicas.
        63 bits; 0: all ranks are."""
        # Of a whole tensor the name alone: the shape of a buffer may change.
        return self._module_digest(lambda info: (info.name, *((info.of, info.at, info.shape) if info.of else ())))

    def shard_names(self) -> int:
        """As `shard_key`, of the names alone: equal on all ranks, but for stages of a pipeline."""
        return self._module_digest(lambda info: info.name)

    def _module_digest(self, row: Callable[[TensorInfo], object]) -> int:
        if not self._sharded:
            return 0
        parts = [part for part in self._parts.values() if isinstance(part, ModulePart)]
        rows = [row(each.info) for each, _ in self._walk(parts, {})[0]]
        return xxhash.xxh3_64_intdigest(msgspec.json.encode(rows)) >> 1

    def table_for(self, came: Table) -> Table:
        """The table of what this rank holds of a state that came as `came`: boxes of any other sharding, or whole
        tensors."""
        if not self._sharded and not any(info.of for info in came):
            return came
        mine = {info.name: info for info in self.table()}
        params = {f"{name}.state.{number}": param for name, number, param in self._groups()}
        here: dict[str, TensorInfo] = {}
        for info in came:
            if info.name not in here:
                here[info.name] = self._box_for(info, mine.get(info.name), params.get(info.name.rpartition(".")[0]))
        return tuple(here.values())

    def _box_for(self, came: TensorInfo, mine: TensorInfo | None, param: torch.Tensor | None) -> TensorInfo:
        """What this rank holds of the tensor of which `came` is a box. `mine`: its own, if it has that already;
        `param`: the parameter that an optimizer keeps it for."""
        shape = came.of or came.shape
        if mine is not None and (mine.of or mine.shape) == shape:
            return mine
        place = box_of(param) if param is not None and tuple(param.shape) == shape else WHOLE
        held = tuple(local(param).shape) if param is not None and place != WHOLE else shape
        return TensorInfo(came.name, came.dtype, held, math.prod(held) * ITEM_BYTES[came.dtype], *place)

    def parked(self) -> Parked:
        """A copy of this rank's part, which outlives the state."""
        extra: dict[str, Any] = {}
        held = self.tensors(extra, own=False)
        return Parked(tuple(info for info, _ in held), extra, [tensor.to("cpu", copy=True) for _, tensor in held])

    def unpark(self, parked: Parked) -> None:
        """Take it back, into what `setup` has built anew. Raises ValueError if it has built other boxes."""
        for tensor, kept in zip(self.adopt(parked.table, parked.extra), parked.tensors, strict=True):
            tensor.copy_(kept)
        self.filled()

    def table(self) -> Table:
        return self._listed()[0]

    def _listed(self) -> tuple[Table, dict[str, Any]]:
        """(`table`, `extra`), from one walk."""
        extra: dict[str, Any] = {}
        return tuple(info for info, _ in self.tensors(extra, own=False)), extra

    def extra(self) -> dict[str, Any]:
        """Everything other than tensors, as JSON: hyper-parameters, schedules, plain values, the version.

        Raises CannotEncodeError."""
        return self._with({name: part.held()[1] for name, part in self._parts.items()})

    def _with(self, parts: dict[str, Any]) -> dict[str, Any]:
        flags = self._modes.changes if self._modes is not None else {}
        return {
            **({"modes": flags} if flags else {}),
            **({"progress": held} if (held := self._progress.as_json()) else {}),
            "format": FORMAT,
            "step": self._step,
            "commit_generation": self._commit_generation,
            "parts": parts,
            "kinds": {name: part.kind for name, part in self._parts.items()},
            "tied": self._tied,
        }

    # ── receiving a state ───────────────────────────────────────────────────────────────────────────────────

    @gc_pause.paused()
    def receive_plan(self, table: Table = (), devices: Sequence[str] = ()) -> ReceivePlan:
        """What `adopt` needs: taken beforehand, that work overlaps the wait. `table`, `devices`: what is expected."""
        modules = [part for part in self._parts.values() if isinstance(part, ModulePart)]
        extras: dict[str, Any] = {}
        held, self._tied, described = self._walk(modules, extras)
        self._described.update(described)
        plan = ReceivePlan([(each.info, tensor) for each, tensor in held], extras)
        return plan.prepared(table, devices, self._parts) if table else plan

    @gc_pause.paused()
    def adopt(self, table: Table, extra: Mapping[str, Any], plan: ReceivePlan | None = None) -> list[torch.Tensor]:
        """Prepare to receive a state with this `table` and `extra`. `plan`: taken since the modules last changed.

        Returns the tensors to fill, in the order of `table`; call `filled()` once they are. The state is inconsistent
        until then. Storage that fits is reused. Raises ValueError naming the first mismatch; the state is then unusable
        unless the mismatch was found before anything was changed.
        """
        if extra.get("format") != FORMAT:
            raise ValueError(f"the state that came has format {extra.get('format')}, this elastic reads {FORMAT}")
        theirs = extra["parts"]
        if list(theirs) != list(self._parts):
            raise ValueError(f"this state has the parts {listed(self._parts)}, the one that came {listed(theirs)}")
        plan = (plan or self.receive_plan()).expecting(table, self._parts)
        if reorder(plan, self._parts):
            plan = self.receive_plan().expecting(table, self._parts, plan.made)
        places = own_tensors(plan, theirs, self.buffers)
        self._whole = False
        self._point.drop()
        for name, part in self._parts.items():
            places.update(plan.adopted(part, theirs[name]))
        if missing := [info for info in table if info.name not in places]:
            raise mismatch(missing[0].name, None, missing[0])
        self._flags().adopt(extra.get("modes", {}))
        self._progress.adopt(extra.get("progress", {}))
        self._coming = int(extra["commit_generation"]), int(extra["step"])
        # Without autograd's record of what is written to them.
        return [t.detach() if (t := local(places[info.name])).requires_grad else t for info in table]

    def filled(self) -> None:
        """All tensors have been filled: the state is complete, and at the step of the one that `adopt` was given."""
        if self._coming is None:
            raise RuntimeError("filled() without adopt()")
        for part in self._parts.values():
            part.filled()
        self._commit_generation, self._step = self._coming
        self._coming = None
        self._whole = True
        self._changing = False
        self._established = True

    def establish(self, generation: int) -> None:
        """Make what `setup` built here the job's state: it is about to be sent to all ranks."""
        self._commit_generation = max(self._commit_generation, generation)
        self._established = True

    def to(self, device: torch.device | str) -> None:
        """Move modules and optimizer state to `device`, for a standby that becomes active. Parameters keep their
        identity; raises RuntimeError if they cannot."""
        for part in self._parts.values():
            part.to(torch.device(device))

    def forget_gradients(self) -> None:
        """`train` is about to be entered: drop what an interrupted step has left behind (`left_behind.forget`). Hooks,
        `training` and `requires_grad` are reset to those of `setup`, these two until the first batch."""
        left_behind.forget(self._parts)
        self._flags().put_back()

    def _flags(self) -> Modes:
        """Made when `setup` has returned, which may set flags of modules that it has put into the state."""
        if self._modes is None:
            modules = {n: p.value for n, p in self._parts.items() if isinstance(p, ModulePart)}
            self._modes = Modes(modules, Hooks(modules.values(), self.optimizers()))
        return self._modes

    def buffers(self) -> set[str]:
        """Names of those that a state_dict has."""
        return {slot.name for part in self._parts.values() for slot in part.slots() if slot.is_buffer}

    def modules(self) -> list[torch.nn.Module]:
        """The parts that are modules."""
        return [part.value for part in self._parts.values() if isinstance(part, ModulePart)]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The parts that are optimizers."""
        return [part.value for part in self._optimizer_parts()]
