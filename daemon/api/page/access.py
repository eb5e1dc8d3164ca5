"""Which requests may read the page: on loopback all of this machine, with a token set those that give it."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from elasticd.base.config import MAKE_TOKEN, is_loopback
from elasticd.base.errors import InvalidConfig, Refused
from elasticd.base.settings import PageSettings
from elasticd.etcd.trust import check_secret

if TYPE_CHECKING:
    from elasticd.base.log import Log  # imports structlog, which `lean` must import first

FEWEST_CHARS = 16
"""Of a token: it is the only defence against guessing."""


def token(settings: PageSettings, euid: int, readable: bool = False) -> str:
    """The token that a reader must give; '': none is needed. `readable`: see `check_secret`. Raises InvalidConfig."""
    if not (settings.listen and settings.token_file):  # `config.check` requires one for other addresses than loopback
        return ""
    path = settings.token_file
    try:
        check_secret("page.token_file", path, euid, readable)
        secret = Path(path).read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"page.token_file = {path!r}: cannot be read: {error}") from None
    if len(secret) < FEWEST_CHARS or not secret.isascii():
        raise InvalidConfig(
            f"page.token_file = {path!r}: its first line must hold a token of at least {FEWEST_CHARS} ASCII "
            f"characters: {MAKE_TOKEN}"
        )
    return secret


Token = Callable[[], str | None]
"""The token that counts now; '': none is needed; None: nothing is served."""


class TokenFile:
    """The token, read again when its file changes. A file that cannot be used, or is gone, lets no reader in."""

    def __init__(self, settings: PageSettings, euid: int, readable: bool, log: Log) -> None:
        """Raises InvalidConfig."""
        self._settings, self._euid, self._readable, self._log = settings, euid, readable, log
        self._stamp = self._look()
        self._value: str | None = token(settings, euid, readable)

    def __call__(self) -> str | None:
        if (stamp := self._look()) != self._stamp:
            self._stamp = stamp
            try:
                self._value = token(self._settings, self._euid, self._readable)
                self._log.info("page.token_changed")
            except InvalidConfig as error:
                self._value = None
                self._log.error(
                    "page.token_refused",
                    error=str(error),
                    why="all page requests are refused until the token file is readable",
                )
        return self._value

    def _look(self) -> tuple[int, ...]:
        try:
            entry = os.stat(self._settings.token_file)
        except OSError:  # also where none is set
            return ()
        return entry.st_ino, entry.st_mtime_ns, entry.st_ctime_ns, entry.st_size


def check(headers: Mapping[str, str], wanted: str | None) -> None:
    """Raise Refused (401, 403, 503) unless the request with these headers may read the page.

    Without a token the name by which the page was opened must be one of this machine's own: else a page from elsewhere
    could have the browser read this one, under a name that it has made resolve to loopback.
    """
    if wanted is None:
        raise Refused(503, "the page's token (page.token_file) cannot be read: elasticd's log has the reason")
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
