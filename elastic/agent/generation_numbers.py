"""Generation numbers continue from those in the job's checkpoints, so that newer state always has the larger number."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from ..checkpoint.errors import CheckpointError
from ..checkpoint.find import newest_generation, peek
from ..checkpoint.remote import list_remote
from ..contract.records import MemberRecord
from ..contract.spec import JobSpec

log = structlog.get_logger()


def newest_saved(spec: JobSpec, members: Collection[MemberRecord], *, remote: bool) -> int:
    """The newest generation of the checkpoints that any member may load; 0: there is none. `remote`: of those at the
    remote end too. Raises OSError for the folder, and CheckpointError if only the remote end can have one and does not
    answer."""
    rules = spec.checkpoint
    newest = max([newest_generation(rules.dir, spec.name), *(member.saved_generation for member in members)])
    if not rules.remote or not remote:
        return newest
    try:
        return max([newest, *(generation for _, generation, _ in list_remote(rules.remote, spec.name))])
    except CheckpointError as error:
        if not peek(rules.dir, spec.name):
            raise  # the workers need it, too
        log.warning("checkpoints.remote_not_listed", remote=rules.remote, error=str(error))
        return newest


def of_own_folder(spec: JobSpec) -> int:
    """The newest generation in this node's checkpoint folder, if no other node can see it; 0: there is none."""
    rules = spec.checkpoint
    if rules.shared or not rules.dir:
        return 0
    try:
        return newest_generation(rules.dir, spec.name)
    except OSError as error:  # its workers cannot load from it either
        log.warning("checkpoints.not_read", folder=rules.dir, error=str(error))
        return 0
