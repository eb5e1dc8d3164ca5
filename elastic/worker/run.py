"""``elastic.run``: call `train`, and call it again after each re-formation, with the state preserved."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from elastic.checkpoint.interval import IntervalRule
from elastic.contract.origin import Origin
from elastic.contract.structs import replace
from elastic.contract.worker import messages
from elastic.contract.worker.beat import Doing
from elastic.contract.worker.worker_config import SLOT, RankVariables, WorkerConfig, variable
from elastic.worker.job.job import Job, Setup, Train, build
from elastic.worker.link.agent_link import AgentLink
from elastic.worker.link.session import GenerationEnded, Session, is_worker
from elastic.worker.snapshots.agent_snapshots import AgentSnapshots
from elastic.worker.snapshots.buddy import Neighbour
from elastic.worker.snapshots.checkpoint_scheduler import CheckpointScheduler, RankPosition
from elastic.worker.state.handover import shared_values
from elastic.worker.state.handover.restore import Disk, Store
from elastic.worker.state.handover.sync import Handover, SyncResult
from elastic.worker.torch_internals import torch_private
from elastic.worker.torch_internals.device_marks import DeviceMarks
from elastic.worker.torch_internals.mesh_groups import MeshGroups, can_put_back, put_back

from .comm import reconfigured
from .comm.errors import COMPLAINT_CHARS, FormError, GroupAborted, is_communication_error
from .comm.group import Group, cuda_failure
from .comm.in_flight import complete
from .comm.kept_group import group_is_over, kept_group
from .link import misuse
from .state.parts.boxes import Accepted, local
from .state.state import Parked, State
from .state.state_source import StateLostError


def run(
    setup: Setup,
    train: Train,
    *,
    checkpoint_dir: str | None = None,
    checkpoint_every_steps: int = 0,
    sharded: bool = False,
) -> State:
    """Train to completion, across failures. Returns the final state.

    `setup(job)` builds the `State`. It is called once per process, and again only if all ranks have lost the state and
    none was ever saved. `train(job, state)` is called once per generation, with `state.step` steps already committed,
    and returns when training is complete.

    Under elasticd this process survives failures elsewhere, and the job's settings determine the checkpoints. Under
    torchrun, or standalone, the same script uses torchrun's process group, or none; it resumes from `checkpoint_dir`
    (default: $ELASTIC_CHECKPOINT_DIR) and saves there every `checkpoint_every_steps` steps; 0: as often as is worth the
    cost.

    `sharded`: `setup` is called with the process group formed, also again in a later one, and may make meshes, shard
    the model (fully_shard, tensor parallelism) and exchange data. Each rank keeps and restores its own part of the
    state. Under elasticd only.

    Raises TypeError if `setup` does not return a `State`, MisuseRuntimeError at a second call in one program under
    elasticd, and what `setup` and `train` raise.
    """
    if is_worker(os.environ):
        misuse.refuse_second_run()
    session = Session.from_environment(os.environ)
    if session is None:
        from .standalone import run_standalone

        if sharded:
            raise misuse.MisuseRuntimeError(
                "elastic.run(sharded=True) without elasticd: each rank's part is kept by its node's agent. Submit the "
                "script with `elasticctl run`"
            )
        directory = checkpoint_dir or os.environ.get(variable("checkpoint_dir"), "")
        return run_standalone(setup, train, directory, IntervalRule(every_steps=checkpoint_every_steps))
    return ManagedWorker(session, setup, train, WorkerConfig.read(os.environ), sharded=sharded).run()


class ManagedWorker:
    """Runs a worker that has an agent: one generation after the other."""

    def __init__(
        self, session: Session, setup: Setup, train: Train, settings: WorkerConfig, *, sharded: bool = False
    ) -> None:
        Accepted.sharded = self._sharded = sharded
        self._parked: tuple[int, Parked] | None = None
        """(key, this rank's part) from before `setup` until all ranks have the state: the group may break within it."""
        self._told = self._said_again = False
        """What protects the job was said; that `setup` runs again."""
        self._seat: tuple[int, int] | None = None
        """(rank, world size) for which `setup` has built the state; None: it has not, or not to the end."""
        self._groups = MeshGroups()
        """Those that it has made."""
        self._state_is_there = False
        """A rank had the state of a sharded job when this generation formed."""
        self._never = ""
        """Why they cannot be made again; empty: they can, as far as is known."""
        self._session = session
        self._setup = setup
        self._train = train
        self._settings = settings
        # A group that is formed again in place keeps its communicator; meshes are made anew.
        forming = "new" if sharded else settings.forming
        self._group_kind = reconfigured.group_kind(forming, settings.process_group)
        self._state: State
        self._link = AgentLink(session, backward_waits=settings.process_group == "gloo")
        self._trains = False
        """The script's `train` runs: this rank may take part in a step."""
        snapshots = settings.snapshots != "off"
        self._disk: Disk | None = None
        if settings.checkpoint_dir:
            self._disk = Disk(settings.checkpoint_dir, settings.job, settings.checkpoint_remote)
        self._snapshots = AgentSnapshots(session, keep_newest=sharded, required=settings.snapshots == "required")
        self._checkpoint_scheduler: CheckpointScheduler | None = None
        if self._disk or snapshots:
            rule = IntervalRule(every_steps=settings.checkpoint_every_steps, every_s=settings.checkpoint_every_s)
            self._checkpoint_scheduler = CheckpointScheduler(
                self._snapshots, rule if self._disk else None, shared=settings.checkpoint_shared, snapshots=snapshots
            )

    def run(self) -> State:
        try:
            return self._run()
        except (misuse.MisuseError, misuse.MisuseIgnored) as error:
            misuse.note(error)  # the script may handle it, and end in any way
            raise

    def _run(self) -> State:
        session, settings = self._session, self._settings
        for name in os.environ.pop(variable("plain_defaults"), "").split(","):
            os.environ.pop(name, None)  # torch reads them when a group is formed
        session.start()
        session.beat(Doing.STARTING)
        session.send(messages.Managed())
        slot = settings.slot
        job = Job(
            name=settings.job,
            device=self._device(slot),
            local_rank=slot,
            link=self._link,
            fingerprint_every_steps=settings.fingerprint_every_steps,
            ignore_bad_numbers=settings.on_bad_numbers == "ignore",
            debug=(settings.debug_gradients, settings.debug_layers),
        )
        session.on(messages.SampleGradients, lambda message, _: _sample(job, message))
        session.on(messages.Assign, lambda message, _: self._assigned(job, message))
        if job.device.type == "cuda":
            torch.cuda.set_device(job.device)  # initialises CUDA, while the survivors abort their group
        if self._sharded:
            # torch 2.15: in a forked process a backward after DTensor's first use may abort while it sets the number of
            # threads of its pool.
            torch.set_num_threads(torch.get_num_threads())
        else:
            self._state = build(self._setup, job)
        session.beat(Doing.WAITING)
        session.send(messages.Ready())
        try:
            while (form := session.next_form()) is not None:
                self._one_generation(job, form)
                session.beat(Doing.WAITING)
        finally:
            if self._checkpoint_scheduler is not None:
                self._checkpoint_scheduler.leave()  # a standby is given its buffer next
            reconfigured.release()
        session.beat(Doing.DONE)
        group_is_over(first=vars(job).get("rank") == 0)
        return self._state

    def _device(self, slot: int) -> torch.device:
        """A standby (slot below 0) does not use the GPU until it becomes active."""
        if self._settings.process_group != "nccl" or slot < 0:
            return torch.device("cpu")
        return torch.device("cuda", slot)

    def _assigned(self, job: Job, message: messages.Message) -> None:
        assert isinstance(message, messages.Assign)
        os.environ[SLOT] = str(message.slot)
        job.local_rank = message.slot
        job.device = self._device(message.slot)

    def _one_generation(self, job: Job, form: messages.Form) -> None:
        session = self._session
        session.page.place(form.generation, form.rank)
        session.beat(Doing.FORMING)
        self._link.enter(form.generation, self._state.step if hasattr(self, "_state") else 0)
        group = self._group_kind(
            backend=self._settings.process_group,
            rank=form.rank,
            world_size=form.world_size,
            store_host=form.store_host,
            store_port=form.store_port,
            store_secret=form.store_secret,
            generation=form.generation,
            device=job.device,
            timeout_s=form.timeout_s,
            form_timeout_s=self._settings.form_timeout_s,
        )
        failure: BaseException | None = None
        self._trains = False
        try:
            session.holds(group, form.generation)
            self._train_in(group, job, form)
        except (GenerationEnded, GroupAborted, FormError) as error:
            failure = error
        except (Exception, misuse.MisuseIgnored) as error:
            # Of any class: a KeyError may be a bug of the script, which is raised, or how torch reports an aborted
            # group, which is not. Without a state, which a second `setup` was to build, there is nothing to go on with.
            cause = group.cause_of(error)
            if not (hasattr(self, "_state") or self._sharded) or not (
                session.ends(form.generation)
                or is_communication_error(cause)
                or (misuse.found_in(error) and session.ends_within(form.generation, misuse.WAIT_S))
            ):
                raise
            failure = cause
        finally:
            session.holds(None, 0)
            if failure is not None:
                session.beat(Doing.WAITING)  # no longer the script's code: an abort that hangs has `abort_s`
                _forget(failure)
                group.abort(str(failure))
            group.close()
        if failure is not None:
            session.beat(Doing.SYNCING)  # completing a snapshot and restoring the state is progress, not a hang
            if self._checkpoint_scheduler is not None:
                self._checkpoint_scheduler.leave()
            if said := cuda_failure(job.device):
                raise RuntimeError(f"this process cannot use its GPU any more: {said}") from failure
            if hasattr(self, "_state"):
                self._rewind(self._state)
            self._released(form, failure, group.altered)

    def _rewind(self, state: State) -> None:
        if self._sharded:
            (put_back if can_put_back() else reshard)(state.modules())
        if (changed := state.rewind()) is not None:
            print(
                f"elastic: state.{changed} was changed after the commit of step {state.step}, and not by an "
                "optimizer of the state; this rank's state is of no use to the others",
                file=sys.stderr,
                flush=True,
            )

    def _train_in(self, group: Group, job: Job, form: messages.Form) -> None:
        session = self._session
        group.form(lambda: session.over(form.generation))
        session.send(messages.Formed(generation=form.generation))
        session.beat(Doing.SYNCING)
        _announce(form, job)
        self._built_state(job, form).to(job.device)
        synced = self._synchronised(job, form)
        job.rows.receive(synced.logged)
        state = self._state
        if job.device.type == "cuda" and self._link.device is None:
            event = functools.partial(torch.cuda.Event, enable_timing=True)
            capturing = torch.cuda.is_current_stream_capturing
            self._link.device = DeviceMarks(session.page.on_device, event, capturing)
        self._link.enter(form.generation, state.step)
        self._tell_synced(form, synced)
        self._parked = None
        if self._sharded:
            self._tell_protection(form, synced)
            if self._settings.snapshots != "off":
                self._pair(form, synced)
        session.check(form.generation, state.step)
        if self._checkpoint_scheduler is not None:
            self._checkpoint_scheduler.enter(_position(form, synced), state.step)
        state.forget_gradients()
        job.enter(
            rank=form.rank,
            world_size=form.world_size,
            generation=form.generation,
            checkpoint_scheduler=self._checkpoint_scheduler,
            group_s=form.timeout_s,
            state=state,
            keys=synced.keys,
            fence=group.fenced,
        )
        state.begin()
        with kept_group():
            self._trains = True
            job.generators.enter()
            self._train(job, state)
            self._trains = False
        job.left(state)
        session.beat(Doing.FINISHING)
        if self._checkpoint_scheduler is not None:
            # While other ranks still train, its exchange would be matched with their gradient collectives.
            complete(dist.barrier(async_op=True), job.device)
            self._checkpoint_scheduler.finish(state)  # may wait for the writer and for the other ranks
        # No rank is done before all are: until then one may die and need the others' state.
        session.beat(Doing.FINISHING)
        complete(dist.barrier(async_op=True), job.device)
        session.beat(Doing.DONE)
        session.send(messages.Done(generation=form.generation, step=state.step))
        session.wait_after_done(form.generation)
        if not session.finished:
            # A rank died after all: its replacement may need this state.
            raise GenerationEnded(session.why)

    def _tell_synced(self, form: messages.Form, synced: SyncResult) -> None:
        self._session.send(
            messages.Synced(
                generation=form.generation,
                step=self._state.step,
                origin=synced.origin,
                source=synced.source,
                reached=synced.reached,
            )
        )

    def _synchronised(self, job: Job, form: messages.Form) -> SyncResult:
        """Get the newest state there is. If none is left and none was ever saved, that is what a new `setup` builds:
        a survivor that was within a step when another rank died is not at fault and must not fail for it."""
        try:
            synced = self._synchronise(job, form)
            if not (self._state_is_there and synced.origin is Origin.SETUP):
                return synced
            # Parts of other boxes than are needed now, and nothing saved: what `setup` shares out counts after all.
        except StateLostError as error:
            print(f"elastic: {error}; training begins again from setup()", file=sys.stderr, flush=True)
        if self._sharded:
            self._build_in_group(job, form, anew=True)
        elif self._state.established or not self._state.clean():
            self._drop(job)
            self._state = build(self._setup, job)
        self._state.to(job.device)
        return self._synchronise(job, form)

    def _synchronise(self, job: Job, form: messages.Form) -> SyncResult:
        session, state = self._session, self._state
        store = None
        if self._checkpoint_scheduler is not None:
            known = (form.saved_generation, form.saved_step)
            disk = replace(self._disk, known=known, one=self._sharded) if self._disk else None
            store = Store(session, disk, state, form, self._snapshots.room_for)
        try:
            synced = Handover(
                state,
                rank=form.rank,
                world_size=form.world_size,
                restore=form.restore,
                generation=form.generation,
                saved=store.saved if store else None,
                load=store.load if store else None,
                parts=store if self._sharded else None,
                known_step=form.saved_step if self._disk else 0,
                known_commit=form.reached,
                logged=job.rows.kept,
                check=lambda: self._moved(form.generation),
            ).run()
            if store and (nbytes := store.own_nbytes()):
                self._snapshots.room_for(nbytes)
            return synced
        finally:
            if store:
                store.close()

    def _tell_protection(self, form: messages.Form, synced: SyncResult) -> None:
        """Say, once and before the first step, what a failure costs this job if it is sharded, and the memory that this
        takes. An optimizer makes its own state later: two numbers a parameter, as a rule."""
        if self._told:
            return
        self._told = True
        if self._disk and not self._settings.checkpoint_shared and form.world_size > form.local_world_size:
            raise misuse.MisuseValueError(
                "checkpoint.shared = false with a sharded state: each node's folder would hold the parts of its own "
                "ranks, and none the whole. Take one folder for all nodes, and checkpoint.shared = true"
            )
        if form.rank:
            return
        model_mb = sum(t.nbytes for m in self._state.modules() for t in map(local, m.parameters())) / 1e6
        own_mb = model_mb * form.local_world_size * (1 + 2 * bool(self._state.optimizers())) * 2
        memory = self._settings.snapshots != "off"
        disk = "the steps since the last checkpoint" if self._disk else "all steps: the job has no checkpoint.dir"
        snapshot = "the steps since the last snapshot in memory"
        copied = memory and synced.keys == form.world_size and form.group_world_size > 1
        worker, node = snapshot if memory else disk, snapshot if copied else disk
        if synced.keys < form.world_size:
            worker, node = "nothing while a replica of it lives", f"nothing while replicas elsewhere live, else {disk}"
        needs = f"Memory on each node: about {max(1, own_mb):.0f} MB for two copies of its ranks' parts"
        needs += f", and as much for those of another node ({max(2, 2 * own_mb):.0f} MB in all)" if copied else ""
        said = f"elastic: sharded state: a lost worker costs {worker}; a lost node {node}"
        said += f". {needs}" if memory else ""
        print(said, file=sys.stderr, flush=True)

    def _pair(self, form: messages.Form, synced: SyncResult) -> None:
        """Parts that one node alone has are copied to another from now on."""
        own = Neighbour(synced.key, form.group_rank, form.local_rank, self._snapshots.buddy.listen())
        everyone = _gathered(msgspec.to_builtins(own), form)
        self._snapshots.pair(form.rank, [msgspec.convert(each, Neighbour) for each in everyone])

    def _built_state(self, job: Job, form: messages.Form) -> State:
        """What `setup` has built; of a sharded job in this group, unless it was in another one, and its groups can be
        made again."""
        if not self._sharded:
            return self._state
        built = hasattr(self, "_state")
        has_it = self._parked is not None or (built and self._state.established)
        self._state_is_there = any(_gathered(has_it, form))
        fits = self._state_is_there or not self._groups.shares_out
        repeats = built and self._seat == (form.rank, form.world_size) and fits
        self._never = self._never or (self._groups.why_not(self._state.modules()) if repeats else "")
        if repeats and not self._never:
            try:
                self._groups.again(self._state.modules())
            except Exception as error:
                if self._session.over(form.generation) or is_communication_error(error):
                    raise
                self._never = f"its groups cannot be made again: {error}"
                raise GroupAborted(self._never) from error
            self._session.check(form.generation, -1)
            return self._state
        if repeats and not self._said_again and form.rank == 0:
            self._said_again = True
            why = f"setup runs again in each generation: {self._never}"
            print(f"elastic: {why}. The result is the same, and takes its time", file=sys.stderr, flush=True)
        self._build_in_group(job, form)
        return self._state

    def _drop(self, job: Job) -> None:
        """Free the state, before `setup` builds the next one: a GPU may not have memory for two."""
        if hasattr(self, "_state"):
            del self._state
        job.forget()
        gc.collect()

    def _build_in_group(self, job: Job, form: messages.Form, *, anew: bool = False) -> None:
        """Run `setup` in the formed group. This rank's part goes on, unless `anew`, if its boxes are still the same."""
        if anew:
            self._parked = None
        elif hasattr(self, "_state") and self._state.established and self._state.clean():
            self._parked = self._state.shard_key(), self._state.parked()
        self._drop(job)
        torch_private.forget_sharding()
        torch_private.set_random_tracker(None)
        job.rank, job.world_size = form.rank, form.world_size
        before = self._seat[1] if self._seat else 0
        self._seat, self._groups = None, MeshGroups()
        try:
            self._session.beat(Doing.STARTING)
            with self._groups.recorded(state_is_there=self._state_is_there and not anew):
                self._state = build(self._setup, job)
            self._session.beat(Doing.SYNCING)
        except (RuntimeError, ValueError) as error:
            if form.world_size >= before or self._session.over(form.generation) or is_communication_error(error):
                raise
            raise misuse.MisuseRuntimeError(
                f"setup() fails in a world of {form.world_size} ranks: {error}. If it needs as many as before "
                f"({before}), give that as the minimum of `nodes`: the job then waits for them. Otherwise let its "
                "meshes follow from dist.get_world_size()"
            ) from error
        self._seat = form.rank, form.world_size
        self._session.check(form.generation, -1)
        if self._parked is not None and self._parked[0] == self._state.shard_key():
            self._state.unpark(self._parked[1])

    def _moved(self, generation: int) -> None:
        """One more piece of the state has been received or sent. Raises GenerationEnded."""
        self._session.copied(0)
        self._session.check(generation, -1)

    def _released(self, form: messages.Form, failure: BaseException, altered: str) -> None:
        session = self._session
        step, clean = (self._state.step, self._state.clean()) if hasattr(self, "_state") else (0, False)
        stepped = session.committed_in == form.generation
        stepless_s = time.monotonic() - session.committed_s if stepped else None
        said: dict[str, Any] = {"step": step, "clean": clean, "stepless_s": stepless_s}
        if not altered and (session.over(form.generation) or isinstance(failure, GenerationEnded)):
            between = not self._trains or (isinstance(failure, GenerationEnded) and failure.between)
            session.send(messages.GroupClosed(generation=form.generation, between=between, **said))
            return
        message = f"{type(failure).__name__}: {failure}"[:COMPLAINT_CHARS]
        complaint = failure.why if isinstance(failure, FormError) else message
        session.send(messages.CollectiveFailed(generation=form.generation, error=complaint, altered=altered, **said))


def _gathered(value: Any, form: messages.Form) -> Sequence[Any]:
    """Of all ranks, on all ranks."""
    cpu = torch.device("cpu")
    return shared_values.gather(value, rank=form.rank, world_size=form.world_size, device=cpu)


def _position(form: messages.Form, synced: SyncResult) -> RankPosition:
    return RankPosition(
        form.rank,
        form.world_size,
        form.local_rank,
        form.local_world_size,
        key=synced.key,
        leads=synced.leads,
        staged=synced.staged,
        planner=synced.source_rank,
        node=form.group_rank,
    )


def reshard(modules: Sequence[torch.nn.Module]) -> None:
    """A forward or backward was interrupted: FSDP's parameters are the sharded ones again, as between two steps."""
    for module in modules:
        module.state_dict(keep_vars=True)  # its hook does that


def _sample(job: Job, message: messages.Message) -> None:
    assert isinstance(message, messages.SampleGradients)
    job.sampler.asked_at = message.at_step


def _announce(form: messages.Form, job: Job) -> None:
    """Set torchrun's environment variables, for code that reads them."""
    ranks = msgspec.convert(form, RankVariables, from_attributes=True)
    os.environ.update(ranks.environment() | {SLOT: str(job.local_rank)})


def _forget(failure: BaseException) -> None:
    """Drop what the traceback references: the script's frames hold the DDP module, which holds the group."""
    for error in misuse.causes(failure):
        with contextlib.suppress(RuntimeError):  # a frame that is still running: one of this module
            traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
    gc.collect(0)
