"""Name look-ups that must not wait for a name server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_dns() -> Iterator[None]:
    """For a thread that has not used DNS before: its queries fail, at once, for as long as it lives.

    torch's TCPStore looks up the name of its peer's address, for messages only; each lost answer would cost a second.
    glibc reads RES_OPTIONS at the first query of a thread, so other threads keep their resolver.
    """
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = "attempts:0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["RES_OPTIONS"]
        else:
            os.environ["RES_OPTIONS"] = before
