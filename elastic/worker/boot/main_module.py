"""Runs a script or a module as the interpreter would, in a process that has run other code before; or becomes a program
other than Python."""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from errno import ENOEXEC

from .kept_imports import install


def run_as_main(argv: Sequence[str]) -> None:
    """As ``python ARGV``, with the code that the job began with; raises what the script raises. Its module remains
    `__main__`, for its threads and handlers and for objects pickled by that name."""
    finder = install()
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if "multiprocessing.process" in sys.modules:  # spawned children resolve a relative script path against it
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]  # what the interpreter calls for -m
        return
    path = os.path.abspath(argv[0])
    sys.argv = list(argv)
    there = os.path.isfile(path) or finder.code.find(path) is not None
    if not there or path.endswith((".zip", ".pyz", ".pyc")):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(path))
    loader = finder.loader("__main__", path)
    loader.announce()
    module.__dict__.update(__file__=path, __cached__=None, __spec__=None, __loader__=loader)
    exec(loader.compiled(), module.__dict__)


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
