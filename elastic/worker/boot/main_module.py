"""Runs a script or a module as the interpreter would, in a process that has run other code before."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import types
from collections.abc import Sequence

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
