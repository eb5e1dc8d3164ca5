"""What a run comes to when nothing happens to it."""

from __future__ import annotations

import functools

from chaos.harness import Cluster
from support.history import final_sha256


@functools.cache
def undisturbed(world_size: int, steps: int, **env: str) -> str:
    """Fingerprint of the final weights, computed once a session."""
    with Cluster(nodes=1, slots=world_size) as cluster:
        job = cluster.submit(steps=steps, pace_s=0.0, env=env)
        job.wait_over()
        return final_sha256(job.check())
