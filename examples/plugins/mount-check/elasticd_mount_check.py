"""A node without its file system of data takes no work, and the jobs that run there leave it."""

import os

from elasticd.plugins import HealthCheck, Log, NodeFacts

MARK = os.environ.get("DATA_MARK", "/data/.mounted")
"""A file that is there as long as the file system is mounted."""


class DataMount(HealthCheck):
    every_s = 2.0
    leave = True

    def look(self) -> str:
        return "" if os.path.exists(MARK) else f"{MARK} is not there: mount the file system of data"


def check(node: NodeFacts, log: Log) -> HealthCheck:
    log.info("data_mount.watched", file=MARK)
    return DataMount()
