"""A checkpoint as this worker's state: what goes into it beside the tensors, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint import find, read
from ..checkpoint.errors import Damaged
from ..checkpoint.files import REAL
from ..core.manifest import Manifest
from ..core.source import Version
from ..core.tensors import Table, TensorInfo
from .state import State


def extra_of(state: State, positions: Sequence[int]) -> dict[str, Any]:
    """What a share keeps beside its tensors: the rest of the state, and where its tensors stand in the whole table."""
    return {"state": state.extra(), "positions": list(positions)}


def whole_table(manifest: Manifest) -> Table:
    """The table as the state had it, put together from the shares'."""
    placed: list[tuple[int, TensorInfo]] = []
    for share in manifest.shares:
        placed += zip(share.extra["positions"], share.tensors, strict=True)
    return tuple(info for _, info in sorted(placed, key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True)
class Disk:
    """The job's checkpoints on a file system."""

    directory: str
    job: str

    def newest(self) -> Version | None:
        """What `load` would most likely bring; a look at names and manifests only."""
        for step, generation, _ in find.peek(self.directory, self.job):
            return generation, step
        return None

    def load(self, state: State) -> str:
        """The newest good checkpoint into `state`; returns words for it. A damaged one is set aside on the way.

        Raises NoGoodCheckpoint when there are checkpoints but none is good: starting from zero is for a person to
        decide.
        """
        aside: list[find.Aside] = []
        while found := find.newest_good(self.directory, self.job, hashes=False):
            aside += found.aside
            before = REAL.identity(found.path)
            state.adopt(whole_table(found.manifest), found.manifest.extra["state"])
            here: dict[str, torch.Tensor] = {info.name: tensor for info, tensor in state.tensors()}
            try:
                read.load(found, lambda info, here=here: here[info.name])  # type: ignore[misc]
            except Damaged as damage:
                if damage.reason == "unreadable":
                    raise
                aside.append(find.set_aside(found.path, damage, before=before))
                continue
            state.filled()
            said = f"checkpoint step {found.step} at {found.path}"
            return said + "".join(f"; set aside {one}" for one in aside)
        raise FileNotFoundError(f"no checkpoint of job {self.job!r} in {self.directory}")
