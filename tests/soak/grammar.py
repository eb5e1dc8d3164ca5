"""Numbered cases: a real training loop × the place of a kill. Pure: a number and a seed give the same case for ever.

Every field is drawn from a random stream of its own, named by the field, so that a new field leaves the others of every
number as they were. What cannot stand together is put right afterwards, in `_consistent`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 8
"""Steps of a script."""

LAYERS = (
    "batchnorm", "dropout", "spectral", "spectral_old", "extra_tensor", "extra_json", "hook_clones", "counter",
    "rebound", "tied", "converts", "recomputed",
)  # fmt: skip
"""Layers that a model may have beside its two linear ones; see `render`."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One training script. Every combination that `draw` gives can be rendered."""

    loop: str
    """plain: forward, backward, step · closure: the backward runs inside `optimizer.step(closure)` · lbfgs: several
    of them in one step · gan: discriminator, then generator · gan_frozen: the same, the discriminator without gradients
    meanwhile · two: two optimizers on one loss · amp: autocast and a GradScaler · manual: parameters changed under
    `no_grad`, without an optimizer."""

    layers: tuple[str, ...]
    """Of LAYERS."""

    optimizer: str
    """sgd, momentum, adamw, rmsprop, adagrad; global: keeps state under no parameter; dotted: under 'exp.avg'."""

    optimizer_in: str
    """state: a part of the State · train: built in `train`, unknown to the State."""

    data: str
    """batches: `job.batches` · own: a loop of the script's own over steps."""

    accumulate: int
    """Micro-batches per step."""

    sync: str
    """How micro-batches are told apart from the last one: parts: `batch.parts()` · flag: the script sets
    `require_backward_grad_sync`, as nanoGPT does."""

    log: str
    """A collective of the script's own for the mean loss: none · before · after the optimizer's step."""

    ema: bool
    """An averaged model in the State, updated after the optimizer's step."""

    scheduler: str
    """none · step: once a step · metric: ReduceLROnPlateau on the mean loss over all ranks."""

    no_grad: str
    """A parameter changed under `no_grad`: none · top: before the forward · clamp: after the optimizer's step."""

    value: str
    """A plain value in the State: none · top: counted up before the forward · end: before the commit · late: after the
    commit · list: a list that grows, before the forward · tensor: a tensor changed in place, before the forward."""

    evaluate: str
    """An evaluation pass with a collective every third step: none · before · after the commit."""

    train_mode: str
    """`model.train()`: top: at the top of each step · eval: only after an evaluation."""

    clip: bool
    """Gradients clipped by their norm."""

    size: str
    """small · many: 40,000 tensors · 64mb, 2gb: of weights that are not trained."""

    def __str__(self) -> str:
        plain = dataclasses.asdict(Script(**PLAIN))
        differs = {name: value for name, value in dataclasses.asdict(self).items() if value != plain[name]}
        told = {name: "+".join(value) if isinstance(value, tuple) else value for name, value in differs.items()}
        return " ".join(f"{name}={value}" for name, value in told.items()) or "plain"


PLAIN: dict[str, Any] = {
    "loop": "plain", "layers": (), "optimizer": "adamw", "optimizer_in": "state", "data": "batches", "accumulate": 1,
    "sync": "parts", "log": "none", "ema": False, "scheduler": "none", "no_grad": "none", "value": "none",
    "evaluate": "none", "train_mode": "top", "clip": False, "size": "small",
}  # fmt: skip


ALL = -1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the process of one rank, or each, kills itself."""

    region: str
    """none: nobody is killed · loop: at a line of the script's loop · forward, backward, optimizer, elastic: at a line
    that runs in torch's modules, in a gradient's hook, in torch's optimizers, in this package · finish: at such a line
    of this package after `train` has returned (of the fixed cases only)."""

    rank: int
    """ALL: every rank kills itself there."""

    step: int
    """Steps committed before."""

    at: float
    """From 0 to 1: which of the region's lines."""

    linger_s: float
    """Waits so long before: all others get as far as they can without this rank."""

    before: str = ""
    """In the loop, instead of `at`: the first line that begins so."""

    again: str = "none"
    """After the recovery, one step later at the same place: none · same: the replacement · other: a survivor, so that
    the replacement alone has the state."""

    def __str__(self) -> str:
        if self.region == "none":
            return "no kill"
        linger = f" after {self.linger_s:g} s" if self.linger_s else ""
        where = f"before {self.before!r}" if self.before else f"in {self.region} ({self.at:.2f})"
        ranks = "all ranks" if self.rank == ALL else f"rank {self.rank}"
        again = "" if self.again == "none" else f", then the {self.again} rank"
        return f"kill {ranks} at step {self.step} {where}{linger}{again}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of a script under elasticd, and what is killed in it."""

    number: int
    seed: int
    script: Script
    place: Place
    nodes: int
    workers: int
    """On each node."""
    checkpoint: str
    """none · steps: every second step into a folder, so that mostly one is in flight."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers

    def __str__(self) -> str:
        saved = "" if self.checkpoint == "none" else ", a checkpoint every 2 steps"
        return f"{self.number}: {self.script} | {self.nodes}x{self.workers}{saved} | {self.place}"


LARGE = {19: "many", 39: "2gb"}
"""Of forty scripts the one that is so large."""

PLACES_PER_SCRIPT = 3
"""Consecutive numbers share a script, so that its undisturbed run is needed once."""


def draw(number: int, seed: int = 1) -> Case:
    """Case `number`. Seed 0 has the cases of `fixed` alone."""
    if seed == 0:
        from .fixed import EDGES, FIXED, LARGE

        return (*FIXED, *LARGE, *EDGES)[number % (len(FIXED) + len(LARGE) + len(EDGES))]
    of_script, of_place = _Streams(f"{seed}/script/{number // PLACES_PER_SCRIPT}"), _Streams(f"{seed}/case/{number}")
    index = number // PLACES_PER_SCRIPT
    script, world_size = _script(of_script, index), of_script.pick("world_size", {2: 6, 1: 1})
    nodes = of_script.pick("nodes", {1: 4, 2: 1}) if world_size == 2 else 1
    place = Place(
        region=of_place.pick(
            "region", {"loop": 10, "backward": 3, "forward": 3, "optimizer": 3, "elastic": 3, "none": 1}
        ),
        rank=ALL
        if of_place.pick("all ranks", {False: 8, True: 1})
        else of_place.pick("rank", {0: 1, 1: 1}) % world_size,
        step=of_place.pick("step", {2: 1, 3: 1, 4: 2, 5: 2, 6: 1}),
        at=round(of_place.stream("at").random(), 3),
        linger_s=of_place.pick("linger", {0.15: 3, 0.0: 1}),
        again=of_place.pick("again", {"none": 5, "same": 1, "other": 1}),
    )
    if place.rank == ALL or place.region == "none" or world_size == 1:
        place = dataclasses.replace(place, again="none")
    if world_size == 1:
        place = dataclasses.replace(place, rank=0)
    checkpoint = of_script.pick("checkpoint", {"none": 3, "steps": 1})
    if script.size in ("64mb", "2gb") and of_place.pick("large saved", {True: 2, False: 1}):
        checkpoint = "steps"
    if script.size == "2gb" and number % PLACES_PER_SCRIPT == 0:
        place = dataclasses.replace(place, region="none")  # what is that large has trouble enough with its checkpoints
    return Case(
        number=number,
        seed=seed,
        script=script,
        place=place,
        nodes=nodes,
        workers=world_size // nodes,
        checkpoint=checkpoint,
    )


def _script(of: _Streams, index: int) -> Script:
    count = of.pick("layer count", {0: 3, 1: 4, 2: 3, 3: 1})
    script = Script(
        loop=of.pick("loop", LOOPS),
        layers=tuple(sorted(of.stream("layers").sample(LAYERS, count))),
        optimizer=of.pick(
            "optimizer",
            {"adamw": 6, "momentum": 3, "sgd": 3, "rmsprop": 1, "adagrad": 1, "global": 1, "dotted": 1},
        ),
        optimizer_in=of.pick("optimizer in", {"state": 6, "train": 1}),
        data=of.pick("data", {"batches": 4, "own": 1}),
        accumulate=of.pick("accumulate", {1: 2, 2: 1}),
        sync=of.pick("sync", {"parts": 1, "flag": 1}),
        log=of.pick("log", {"none": 3, "before": 1, "after": 2}),
        ema=of.pick("ema", {False: 4, True: 1}),
        scheduler=of.pick("scheduler", {"none": 3, "step": 1, "metric": 1}),
        no_grad=of.pick("no grad", {"none": 4, "top": 1, "clamp": 1}),
        value=of.pick("value", {"none": 8, "top": 1, "end": 1, "late": 1, "list": 1, "tensor": 1}),
        evaluate=of.pick("evaluate", {"none": 3, "before": 1, "after": 1}),
        train_mode=of.pick("train mode", {"top": 1, "eval": 1}),
        clip=of.pick("clip", {False: 2, True: 1}),
        size=LARGE.get(index % 40) or of.pick("size", {"small": 20, "64mb": 1}),
    )
    return _consistent(script)


def _consistent(script: Script) -> Script:
    """What cannot stand together, or would say nothing, is replaced."""
    changes: dict[str, Any] = {}
    if script.loop == "manual":
        changes |= {"optimizer": "sgd", "optimizer_in": "train", "scheduler": "none"}
    if script.loop == "lbfgs":
        changes |= {"optimizer": "lbfgs", "optimizer_in": "state", "scheduler": "none", "clip": False}
    if script.optimizer_in == "train":
        changes |= {"scheduler": "none"}
    if script.loop in ("closure", "lbfgs", "gan", "gan_frozen") or script.data == "own":
        changes |= {"accumulate": 1}
    if script.loop == "amp":
        changes |= {"optimizer_in": "state", "clip": False}
    if script.loop in ("gan", "gan_frozen", "amp") and script.optimizer in ("global", "dotted"):
        changes |= {"optimizer": "adamw"}
    if script.size in ("many", "2gb"):
        changes |= {"loop": "plain", "layers": (), "ema": False, "evaluate": "none", "optimizer": "adamw"}
        changes |= {"optimizer_in": "state", "no_grad": "none", "value": "none"}
    if script.data == "own" and script.value == "late":  # nobody can tell that from the beginning of the next step
        changes |= {"value": "end"}
    if changes.get("accumulate", script.accumulate) == 1 or script.loop == "amp":
        changes |= {"sync": "parts"}
    if script.evaluate == "none":
        changes |= {"train_mode": "top"}
    return dataclasses.replace(script, **changes)


LOOPS = {"plain": 10, "closure": 3, "lbfgs": 2, "gan": 3, "gan_frozen": 1, "two": 2, "amp": 2, "manual": 2}


class _Streams:
    """A random stream for each name."""

    def __init__(self, root: str) -> None:
        self._root = root

    def stream(self, name: str) -> random.Random:
        return random.Random(f"{self._root}/{name}")

    def pick(self, name: str, weights: dict[Any, int]) -> Any:
        return self.stream(name).choices(list(weights), list(weights.values()))[0]


def refusable(script: Script) -> Sequence[str]:
    """Why this script may be refused, in words; empty: it must run."""
    why = []
    if script.optimizer_in == "train":
        why.append("the optimizer (or the change by hand) is unknown to the State")
    if script.optimizer in ("global", "dotted"):
        why.append("the optimizer's state has a form of its own")
    if script.no_grad == "top":
        why.append("a parameter is changed before the forward, unknown to the State")
    if script.value == "late":
        why.append("a value is changed after the commit")
    return why
