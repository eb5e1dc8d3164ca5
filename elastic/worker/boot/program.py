"""A worker that is a program other than Python: the process forked for it becomes that program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from errno import ENOEXEC

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a program that cannot be run, as those of a shell."""


def become_program(command: Sequence[str]) -> int:
    """Replace this process by `command`, found by PATH if its first word has no slash. Returns an exit code, with the
    reason on stderr, if that fails.

    The channel and the beat page stay open: a shell script that ends with ``exec python train.py`` has the same process
    id, and elastic.run in it is managed as in any worker.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), os.environ)
    except OSError as error:
        hint = "; a script needs an interpreter in its first line, such as #!/bin/sh" if error.errno == ENOEXEC else ""
        print(f"elastic: {command[0]}: {error.strerror}{hint}", file=sys.stderr, flush=True)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
