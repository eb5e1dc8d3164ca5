"""Whether two nodes see one checkpoint folder: the first one writes an id into it, which all others then read."""

from __future__ import annotations

import os
import secrets
import threading
import time
from pathlib import Path

from elastic.util.files import read_file

NAME = ".elastic-folder"
WRITE_S = 2.0
"""The node that creates the file needs a moment to write it."""
ID_BYTES = 16


def folder_id(directory: str) -> str:
    """The id of the folder, which is created if there is none; '' if it cannot be read within WRITE_S. Raises
    OSError."""
    os.makedirs(directory, exist_ok=True)
    path = Path(directory, NAME)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        deadline_s = time.monotonic() + WRITE_S
        while len(found := read_file(path, 2 * ID_BYTES)) < 2 * ID_BYTES and time.monotonic() < deadline_s:
            threading.Event().wait(0.02)  # files of other hosts appear without an event
        return found.decode(errors="replace") if len(found) == 2 * ID_BYTES else ""
    with open(descriptor, "w") as file:
        file.write(made := secrets.token_hex(ID_BYTES))
    return made
