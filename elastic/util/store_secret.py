"""The secret of a generation: see `sealed_store`, which imports torch."""

from __future__ import annotations

import secrets

NBYTES = 16


def new() -> str:
    """In hexadecimal, as it stands in the generation's record."""
    return secrets.token_hex(NBYTES)
