"""The folder of one job on this node, partly another user's.

<state_dir>/jobs/<job>/            elasticd's user's; others may pass through, not list it
<state_dir>/jobs/<job>/agent/      the job's user's, mode 0700: see `agent_files`
<state_dir>/jobs/<job>/logs/       the job's user's
<state_dir>/jobs/<job>/agent.out   stdout and stderr of an agent of another user: systemd opens it as root, so it
                                   must not lie where that user could put a link in its place
<state_dir>/jobs/~<job>~<uid>~<s>  what an earlier job of that name left, of another user; or a folder that is about
                                   to be removed
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from elastic.contract.keys import NAME
from elastic.util import files
from elastic.util.files import read_file, replace_file
from elasticd.base import ownership
from elasticd.base.errors import CannotStart
from elasticd.base.folders import Folder, open_file

OUTPUT = "agent.out"
LAST_BYTES = 2_000


def prepare(folder: Path, owner: tuple[int, int] | None) -> None:
    """Create a job's folder for the user `owner` (uid, gid); None: this daemon's own. What another user's job of this
    name left is moved aside, so that the new one cannot read it. Raises CannotStart, OSError."""
    if owner is not None or os.geteuid() == 0:
        _move_aside(folder, owner[0] if owner else 0)
    if owner is None:
        (folder / "agent").mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "logs").mkdir(parents=True, exist_ok=True, mode=0o750)
        return
    ownership.searchable(folder.parent)
    ownership.searchable(folder)
    for name in ("agent", "logs"):
        ownership.given(folder / name, *owner, 0o700)


def _move_aside(folder: Path, uid: int) -> None:
    for name in ("agent", "logs"):
        try:
            entry = os.lstat(folder / name)
        except FileNotFoundError:
            continue
        if entry.st_uid == uid:
            continue
        try:
            set_aside(folder, entry.st_uid)
        except OSError as error:
            why = f"{folder} is of an earlier job of uid {entry.st_uid}, and cannot be moved aside: {error.strerror}"
            raise CannotStart(why) from error
        return


def set_aside(folder: Path, uid: int) -> Path:
    """Rename a job's folder, so that its name is free. Raises OSError."""
    aside = folder.with_name(f"~{folder.name}~{uid}~{time.time():.0f}")
    os.rename(folder, aside)
    return aside


def has_agent(folder: Path) -> bool:
    """Whether a process holds the lock of the agent in a job's folder, or may hold it. Raises OSError."""
    try:
        with Folder(folder.parent, (folder.name, "agent")).opened() as descriptor:
            lock = open_file(descriptor, "lock")
    except FileNotFoundError:
        return False
    except (NotADirectoryError, PermissionError):  # a link or a pipe in its place
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def last_line(folder: Path) -> str:
    """The last line that the job's agent wrote, to its log or, before that was open, to its output; '' if none."""
    lines: list[tuple[int, str]] = []
    for path in (folder / "agent" / "agent.log", folder / OUTPUT):
        with contextlib.suppress(OSError):
            line = files.last_line(path, LAST_BYTES)
            lines += [(path.lstat().st_mtime_ns, line)] if line else []
    return max(lines, default=(0, ""))[1]


NODE = "node"
"""The file with the name of this node."""
MOST_BYTES = 256


def kept_name(state_dir: Path, node: str) -> str:
    """`node`, the name that is set; or the one before it, while agents run that an elasticd of that name started here.

    An agent is a member of its job under its node's name. A daemon with another name would take that for a second node
    of the job, and would order the agent to drain and not to drain in turn. A full disk keeps elasticd from remembering
    the name, not from its work. Raises other OSErrors."""
    file = state_dir / NODE
    try:  # elasticd's own file: what an agent's folder says of its node, its job's user may have written
        before = read_file(file, MOST_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        before = ""
    if before != node and NAME.fullmatch(before):
        folders = [folder for folder in (state_dir / "jobs").glob("*") if NAME.fullmatch(folder.name)]
        if any(has_agent(folder) for folder in folders):
            return before
    if before != node:
        try:
            replace_file(file, node.encode())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
    return node
