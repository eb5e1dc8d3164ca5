"""train_recorded.py, where an abort shuts gloo's sockets in both directions at once: then gloo keeps sends without an
error so often (one abort in seven) that a test meets it."""

from __future__ import annotations

import pathlib
import runpy
import sys

from elastic.worker import group

if __name__ == "__main__":
    group.GENTLE_LOOKS = 0
    sys.argv += ["--record", "record"]
    runpy.run_path(str(pathlib.Path(__file__).with_name("train_recorded.py")), run_name="__main__")
