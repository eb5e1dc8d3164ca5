"""The fixed cases: every element of the grammar, killed where it hurts most. Seed 0 of `make soak`."""

from __future__ import annotations

from typing import Any

from .grammar import PLAIN, STEPS, Case, Place, Script

BACKWARD, COMMIT, LOG = "loss.backward()", "job.commit(", "dist.all_reduce(mean)"


def _case(
    number: int,
    before: str = "",
    *,
    region: str = "loop",
    at: float = 0.5,
    rank: int = 1,
    step: int = 4,
    shape: tuple[int, int] = (1, 2),
    checkpoint: str = "none",
    **script: Any,
) -> Case:
    """`shape`: nodes and workers on each."""
    place = Place(region=region, rank=rank, step=step, at=at, linger_s=0.15, before=before)
    full = Script(**{**PLAIN, **script})
    nodes, workers = shape
    return Case(number=number, seed=0, script=full, place=place, nodes=nodes, workers=workers, checkpoint=checkpoint)


_DRAWN: tuple[dict[str, Any], ...] = (
    {"before": "state.scaler.step", "loop": "amp", "log": "before", "layers": ("recomputed",)},
    {"before": LOG, "optimizer_in": "train", "optimizer": "sgd", "log": "after"},
    {"before": BACKWARD, "loop": "closure", "clip": True},
    {"before": BACKWARD, "loop": "lbfgs", "optimizer": "lbfgs"},
    {"before": "loss = ", "loop": "gan"},
    {"before": BACKWARD, "rank": 0, "loop": "gan_frozen", "optimizer": "momentum", "layers": ("dropout",)},
    {"before": BACKWARD, "layers": ("batchnorm",)},
    {"before": BACKWARD, "rank": 0, "layers": ("batchnorm", "dropout"), "shape": (2, 1)},
    {"before": COMMIT, "layers": ("extra_tensor",)},
    {"before": BACKWARD, "layers": ("extra_json",), "optimizer": "rmsprop"},
    {"before": BACKWARD, "layers": ("hook_clones",), "optimizer": "momentum"},
    {"before": COMMIT, "layers": ("converts",)},
    {"before": BACKWARD, "layers": ("spectral", "tied"), "value": "tensor"},
    {"before": BACKWARD, "layers": ("counter", "rebound", "spectral_old"), "optimizer": "adagrad", "value": "list"},
    {"before": COMMIT, "optimizer": "global"},
    {"before": COMMIT, "optimizer": "dotted", "rank": 0},
    {"before": BACKWARD, "no_grad": "top"},
    {"region": "backward", "value": "top"},
    {"before": "dist.all_reduce(score)", "step": 3, "evaluate": "after", "train_mode": "eval", "layers": ("dropout",)},
    {"before": LOG, "ema": True, "log": "after", "value": "end", "no_grad": "clamp"},
    {"before": LOG, "scheduler": "metric", "evaluate": "before", "checkpoint": "steps"},
    {"before": "head_optimizer.step()", "loop": "two", "data": "own", "log": "before", "scheduler": "step"},
    {"before": LOG, "loop": "manual", "optimizer": "sgd", "optimizer_in": "train", "log": "after"},
    {"before": COMMIT, "shape": (1, 1), "rank": 0, "accumulate": 2, "checkpoint": "steps"},
    {"region": "elastic", "size": "64mb", "checkpoint": "steps", "shape": (2, 1)},
)  # fmt: skip

_LARGE: tuple[dict[str, Any], ...] = (
    {"region": "none", "size": "2gb", "shape": (2, 1), "checkpoint": "steps"},
    {"before": BACKWARD, "size": "2gb", "checkpoint": "steps", "rank": 0},
    {"before": BACKWARD, "size": "many"},
    {"region": "none", "size": "many", "shape": (2, 1), "checkpoint": "steps"},
)  # fmt: skip
"""They need memory and time: in `make soak SEED=0 CASE="25 26 27 28"` alone."""

_EDGES: tuple[dict[str, Any], ...] = (
    {"before": BACKWARD, "step": 0},
    {"before": COMMIT, "step": 0, "rank": 0, "layers": ("batchnorm",)},
    {"before": COMMIT, "step": STEPS - 1, "rank": 0, "value": "end"},
    {"before": LOG, "step": STEPS - 1, "log": "after"},
    {"region": "finish", "at": 0.0, "step": STEPS},
    {"region": "finish", "at": 0.5, "step": STEPS, "rank": 0, "shape": (2, 1), "checkpoint": "steps"},
    {"before": "model.require_backward_grad_sync", "accumulate": 2, "sync": "flag", "loop": "two"},
)  # fmt: skip
"""The first step, the last one, and after it; and what the grammar got later, so that the others keep their numbers."""

OFTEN = frozenset({*range(0, 25, 2), 3, 5, 7, 29, 31, 34, 35})
"""Numbers of those in `make test`: more than half of what was drawn, and four of the others; 2 s of a core each."""

FIXED = tuple(_case(number, **drawn) for number, drawn in enumerate(_DRAWN))
LARGE = tuple(_case(number, **drawn) for number, drawn in enumerate(_LARGE, len(FIXED)))
EDGES = tuple(_case(number, **drawn) for number, drawn in enumerate(_EDGES, len(FIXED) + len(LARGE)))
