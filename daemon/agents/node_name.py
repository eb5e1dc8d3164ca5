"""The name of this node outlives a change of the setting, or of the host's name, while agents have it.

An agent is a member of its job under its node's name. A daemon with another name would take that for a second node of
the job, and would order the agent to drain and not to drain in turn.
"""

from __future__ import annotations

import errno
from pathlib import Path

from elastic.contract.keys import NAME
from elastic.util.files import read_file, replace_file

from . import job_folders

FILE = "node"
MOST_BYTES = 256


def kept(state_dir: Path, node: str) -> str:
    """`node`, the name that is set; or the one before it, while agents run that an elasticd of that name started here.
    A full disk keeps elasticd from remembering the name, not from its work. Raises other OSErrors."""
    file = state_dir / FILE
    try:  # elasticd's own file: what an agent's folder says of its node, its job's user may have written
        before = read_file(file, MOST_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        before = ""
    if before != node and NAME.fullmatch(before):
        folders = [folder for folder in (state_dir / "jobs").glob("*") if NAME.fullmatch(folder.name)]
        if any(job_folders.has_agent(folder) for folder in folders):
            return before
    if before != node:
        try:
            replace_file(file, node.encode())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
    return node
