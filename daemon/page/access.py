"""Which requests may read the page: on loopback all of this machine, with a token set those that give it."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from pathlib import Path

from ..config import MAKE_TOKEN, is_loopback
from ..errors import InvalidConfig, Refused
from ..etcd.trust import check_secret
from ..settings import PageSettings

FEWEST_CHARS = 16
"""Of a token: it is the only defence against guessing."""


def token(settings: PageSettings, euid: int, readable: bool = False) -> str:
    """The token that a reader must give; '': none is needed. `readable`: see `check_secret`. Raises InvalidConfig."""
    if not (settings.listen and settings.token_file):  # `config.check` requires one for other addresses than loopback
        return ""
    path = settings.token_file
    try:
        check_secret("page.token_file", path, euid, readable)
        found = Path(path).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"page.token_file = {path!r}: cannot be read: {error}") from None
    if len(found) < FEWEST_CHARS or not found.isascii():
        raise InvalidConfig(
            f"page.token_file = {path!r}: its first line must hold a token of at least {FEWEST_CHARS} ASCII "
            f"characters: {MAKE_TOKEN}"
        )
    return found


def check(headers: Mapping[str, str], wanted: str) -> None:
    """Raise Refused (401, 403) unless the request with these headers may read the page.

    Without a token the name by which the page was opened must be one of this machine's own: else a page from elsewhere
    could have the browser read this one, under a name that it has made resolve to loopback.
    """
    if wanted:
        if not hmac.compare_digest(_given(headers.get("authorization", "")).encode(), wanted.encode()):
            raise Refused(401, "this page needs its token (page.token_file) as the password, with any user name")
        return
    name = headers.get("host", "")
    bare = name.rpartition(":")[0] if not name.endswith("]") and ":" in name else name
    if not is_loopback(bare.strip("[]").lower()):
        raise Refused(403, "open this page as http://localhost, with its port; other names need page.token_file")


def _given(authorization: str) -> str:
    """The token in 'Bearer TOKEN' or 'Basic base64(USER:TOKEN)'; '' if there is none."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
