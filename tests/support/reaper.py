"""Cleans up after a test run that could not: reaper.py TOKEN PID, with a pipe from the run as stdin.

The run says `bye` when it ends well. A pipe that closes without it means that the run was killed, or ended itself
because a test took too long: then everything that carries its token is ended, and its cgroups, links and folders
removed.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from support import scratch
from support.machine import cgroup2
from support.procs import end_all, tagged


def main() -> None:
    token, pid = sys.argv[1:]
    if sys.stdin.readline().strip() == "bye":  # not to the end: a child of a test may hold the pipe, too
        return
    root = cgroup2()
    groups = sorted(root.glob(f"elt{pid}[a-z]*")) if root else []
    for group in groups:
        (group / "cgroup.kill").write_text("1")
    for _ in range(20):
        if not (left := tagged(token, "ELASTIC_TEST_RUN")):
            break
        end_all(left)
    for _ in range(100):  # a group is busy until its last process is gone, a moment after the kill
        if not (groups := [group for group in groups if group.exists()]):
            break
        for group in groups:
            for folder in [*sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True), group]:
                subprocess.run(["rmdir", folder], check=False, timeout=10)
        time.sleep(0.02)
    for folder in pathlib.Path("/run").glob(f"elt{pid}[a-z]*"):
        shutil.rmtree(folder)
    if (folder := pathlib.Path(os.environ.get("TMPDIR", ""))).name.startswith("elt-tmp-"):
        shutil.rmtree(folder, ignore_errors=True)
    scratch.remove_orphans()
    for link in pathlib.Path("/sys/class/net").glob(f"elt{pid}[a-z]*"):
        subprocess.run(["ip", "link", "del", link.name], check=False, timeout=10)


if __name__ == "__main__":
    main()
