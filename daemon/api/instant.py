"""The clocks that the answers need, read at one place."""

from __future__ import annotations

import time

from .views import Now


def now() -> Now:
    return Now(time.monotonic(), time.time())
